"""Batches become new weights: packing, one optimizer step, checkpoints.

Nothing is imported here: `report`, `packing` and `checkpoint` are used without torch.
"""
