"""Checkpoints: the directory on disk (`base`), saving and loading a trainer, and export for other programs.

Nothing is imported here, because the controller looks for checkpoints (`base`) without torch.
"""
