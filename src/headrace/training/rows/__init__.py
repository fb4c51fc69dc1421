"""The rows of a step: which tokens of a batch are computed together in one pass, and on which rank.

`base` has the sequences, the families that share a prefix, and the row itself. `packing` plans the rows of a step, and
`for_ranks` makes them cost the same on all ranks. No torch is imported here.
"""
