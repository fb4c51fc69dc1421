"""Hugging Face causal language models, unmodified: loading, one attention function, and the check that it fits.

Engines and the trainer share this, which is what keeps generation and training the same function.
"""
