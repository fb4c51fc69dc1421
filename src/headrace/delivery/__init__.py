"""Delivery brings new weights from the trainer to the engines and proves that they arrived.

Start with `base` (the nouns), then `publisher` (the trainer's end), `receiver` (an engine's end) and `transports`.
This package imports nothing here, because the controller reads manifests and sweeps segments without loading torch.
"""
