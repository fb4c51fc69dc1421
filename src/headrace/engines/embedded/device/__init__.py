"""The embedded engine on a GPU: rows live on the device, and a decode step never returns to Python.

`runner` launches several steps at a time and reads their tokens while later steps already run. `pace` decides how many.
`state` holds the rows and the KV cache, `step` is one decode step, `prompts` computes prompts, and `graphs` captures
work and scores sequences.
"""
