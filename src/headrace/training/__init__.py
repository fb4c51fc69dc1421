"""Training turns batches into new weights: `trainer` makes one optimizer step at a time, by the passes of `step`.

The folders are `rows` (what is computed together), `attention` and `head` (inside a pass), `ranks` (several processes)
and `checkpoints`. Nothing is imported here, so that `base`, `rows` and `checkpoints.base` can be used without torch.
"""
