"""From hidden states to what a loss reads: log-probabilities and entropies of trained tokens, from float32 logits.

`logprobs` reads a row, and `logits` has the two ways to compute logits.
"""
