"""Attention within packed rows: `packed` plans a row and computes it exactly, `flash` computes it with GPU kernels."""
