"""Triton kernels of the embedded engine. `headrace.engines.embedded.attention` and `.sampler` are their references."""
