"""Where the records of metrics.jsonl go besides the file: `base` is the protocol, `feed` calls the trackers."""
