"""The embedded engine: any Hugging Face causal LM, served from a paged KV cache with continuous batching.

A request's path: `loop` (commands) → `core` (one step) → `scheduler` (which tokens, over `kv_cache` blocks) → `runner`
(one packed pass, through `attention`) → `sampler` → deltas.
"""
