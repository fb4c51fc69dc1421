"""Training turns batches into new weights: `trainer` makes one optimizer step at a time.

Nothing is imported here, so that `base`, `rows` and `checkpoints.base` can be used without torch.
"""
