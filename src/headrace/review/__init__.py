"""Review examines a run from outside: its summary and report, its rollouts, and whether the records are true.

Everything here reads the directory of a run that is over or still running, and writes nothing into it except
`summary.json` and `report.html`. No stage imports this package.
"""
