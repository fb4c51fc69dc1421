"""Looking into a run from outside: its summary and report, its recorded rollouts, and whether what is recorded is true.

Everything here reads the directory of a run that is over or under way, writes nothing into it but `summary.json` and
`report.html`, and no stage imports it.
"""
