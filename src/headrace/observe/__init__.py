"""What a run shows and keeps: spans, metrics, timeline, live progress, summary and report.

Every stage may import this package, and it imports none: ledgers, summaries and reports are drawn from plain data.
`review` reads that data from the journal.
"""
