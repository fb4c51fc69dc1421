"""Hugging Face causal language models, unmodified: loading, one attention function, and the check that a model fits.

Engines and the trainer share this code, so that generation and training compute the same function.
"""
