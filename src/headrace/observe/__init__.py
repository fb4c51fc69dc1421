"""What a run shows and keeps: spans, metrics, timeline, live progress, and the formats and charts of its results.

Every stage may import this package, and this package imports no stage. Summaries and charts are drawn from plain data,
which `review` reads from the journal.
"""
