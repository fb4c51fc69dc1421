"""The Triton kernels of delivery: the digest of a whole model and the copy of a whole model, one launch each.

Only code that runs on a GPU imports these modules, and only when it needs them: Triton may not be installed elsewhere.
"""
