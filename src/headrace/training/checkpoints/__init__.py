"""Checkpoints: the directory on disk (`base`), saving and loading a trainer, the shards of several ranks, and export.

Nothing is imported here, because the controller looks for checkpoints (`base`) without torch.
"""
