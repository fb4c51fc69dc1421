"""Engines turn prompts into tokens. `base` is the protocol; the other modules implement and serve it."""
