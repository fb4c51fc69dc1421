"""New weights reach the engines, with proof: `base` (nouns), `plan`, `digest`, `publisher`, `receiver`, `transports`.

Nothing is imported here: the controller reads manifests and sweeps segments without loading torch.
"""
