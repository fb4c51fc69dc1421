"""The `headrace` program: its commands, and how they end.

Exit codes: 0 done, 1 the run failed, 2 a mistake of the user's (one line says which), 130 interrupted.
"""

from __future__ import annotations

import sys

import typer

from headrace.cli import bench, check, generate, review, train
from headrace.errors import HeadraceError, PeerDied, UserError

app = typer.Typer(
    help="Asynchronous RL post-training of language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command()(train.train)
app.command()(train.resume)
app.command()(check.check)
app.command()(train.gateway)
app.command()(generate.generate)
bench.register(app)
app.command()(review.report)
app.command()(review.ledger)
app.command()(review.rollouts)
app.command()(review.audit)
app.command()(review.replay)
app.command()(review.stall)
app.command()(review.export)
app.command()(check.doctor)


def main() -> None:
    """Run the program. Headrace's own errors become one line."""
    try:
        app()
    except UserError as error:
        _end(f"headrace: {error}", 2)
    except PeerDied as death:
        _end(f"headrace: {death}" + (f"\n{_indented(death.last_lines)}" if death.last_lines else ""), 1)
    except HeadraceError as error:
        _end(f"headrace: {error}", 1)
    except KeyboardInterrupt:
        _end("headrace: interrupted", 130)


def _indented(text: str) -> str:
    return "\n".join(f"  | {line}" for line in text.splitlines())


def _end(text: str, code: int) -> None:
    sys.stderr.write(text + "\n")
    sys.exit(code)
