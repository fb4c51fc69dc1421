"""The embedded engine's Triton kernels. `headrace.engines.embedded.runner` and `.sampler` are their references."""
