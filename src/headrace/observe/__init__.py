"""What a run shows and keeps: spans, metrics, timeline, live progress, summary and report.

Imported by every stage and importing none. What is computed after the fact reads `journal.db` through its documented
schema, so it can be computed again by anybody.
"""
