"""The embedded engine on a GPU: rows live on the device, a decode step never returns to Python.

`runner` launches several steps at a time and reads their tokens when later ones already run; `state` holds the rows,
`step` is what one step does, `graphs` captures it by batch size, `context` attends, `memory` sizes the cache.
"""
