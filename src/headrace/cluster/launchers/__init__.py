"""Launchers start worker processes: on this host, or (later) on a cluster."""
