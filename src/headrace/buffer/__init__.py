"""Scored groups in, admitted batches out: start at `admission` (the arithmetic), then `window`, `ledger`, `journal`."""
