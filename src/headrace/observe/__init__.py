"""What a run shows and keeps: spans, metrics, timeline, live progress, summary and report.

Every stage may import this package, and this package imports no stage. Ledgers, summaries and reports are drawn from
plain data, which `review` reads from the journal.
"""
