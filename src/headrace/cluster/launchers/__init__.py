"""Where worker processes run: this host, or (later) a cluster."""
