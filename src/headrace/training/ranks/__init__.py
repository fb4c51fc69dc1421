"""A trainer of several processes: the process groups (`base`), and the weights in shards or slices (`sharding`)."""
