"""`python -m headrace`: the command line."""

from headrace.cli.main import main

main()
