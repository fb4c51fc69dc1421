"""From hidden states to what a loss reads: log-probabilities and entropies of trained tokens, from float32 logits.

`logprobs` reads a row. `reading` is the arithmetic of one chunk of logits. `wide` keeps the logits of any 16-bit head
in float32. `matrix` computes a head that is a plain matrix, on a GPU, as one operation.
"""
