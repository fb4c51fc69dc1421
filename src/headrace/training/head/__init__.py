"""From hidden states to what a loss reads: log-probabilities and entropies of trained tokens, from float32 logits.

`logprobs` reads a row, `logits` has the two ways to compute logits, and `reading` is the arithmetic of one chunk.
"""
