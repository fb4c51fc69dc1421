"""Training turns batches into new weights: `trainer` makes one optimizer step at a time.

`rows` holds what is computed together, `attention` and `logprobs` what happens inside a pass, `ranks` several
processes, and `checkpoints` the files. Nothing is imported here, so that `base`, `rows` and `checkpoints.base` can be
used without torch.
"""
