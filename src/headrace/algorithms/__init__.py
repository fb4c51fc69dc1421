"""Scored groups become per-token advantages (numpy, in the controller) and token losses (torch, in the trainer).

Nothing is imported here: the controller uses `advantages` and `assemble` without torch.
"""
