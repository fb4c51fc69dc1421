"""The embedded engine's Triton kernels. `headrace.engines.embedded.attention` and `.sampler` are their references."""
