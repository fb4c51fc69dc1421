"""The buffer turns scored groups into batches.

Start at `admission` (the arithmetic), then `window`, `ledger`, `journal`.
"""
