"""The embedded engine: it serves any Hugging Face causal LM from a paged KV cache with continuous batching.

The path of a request: `engine` (commands) → `core` (one step) → `scheduler` (which tokens, over `kv_cache` blocks) →
`runner` (one packed pass) → `sampler` → deltas.
"""
