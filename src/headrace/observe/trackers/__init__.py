"""Trackers receive the records of metrics.jsonl besides the file: `base` is the protocol, `feed` calls the trackers."""
