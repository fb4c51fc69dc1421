"""Typed messages between processes: msgspec structs over ZeroMQ, arrays as zero-copy frames."""
