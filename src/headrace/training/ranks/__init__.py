"""A trainer of several processes: the process groups (`base`), weights in shards, and tensor parallelism."""
