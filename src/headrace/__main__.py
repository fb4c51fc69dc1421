"""The program `headrace`, also as `python -m headrace`. Ctrl-C ends it without a traceback, even while it loads."""

import sys


def main() -> None:
    """Run the command line."""
    try:
        from headrace.cli.main import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
