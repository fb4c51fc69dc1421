"""The pipeline runs a whole run: it assembles the parts, runs the named loops, records, and recovers from deaths."""
