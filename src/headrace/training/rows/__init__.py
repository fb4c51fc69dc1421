"""The rows of a step: which tokens of a batch are computed together in one pass, and on which rank.

`base` has the sequences, the families that share a prefix, and the row itself. `packing` plans the rows of a step. No
torch is imported here.
"""
