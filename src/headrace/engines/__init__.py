"""Prompts to tokens: `base` is the protocol, the others implement it."""
