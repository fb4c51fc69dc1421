"""Training turns batches into new weights: packing, one optimizer step, checkpoints.

Nothing is imported here, so that `report`, `packing` and `checkpoint` can be used without torch.
"""
