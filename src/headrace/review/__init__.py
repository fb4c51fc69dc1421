"""Looking into a run from outside: its recorded rollouts, and whether what is recorded is true.

Everything here only reads a run directory, of a run that is over or under way, and no stage imports it.
"""
