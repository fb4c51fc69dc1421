"""Failures are values: an exception of users' code inside an episode becomes the reason of one failed rollout.

In this package, only this module catches every exception.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class EpisodeFailed(Exception):
    """An episode failed. The text is the reason, in one line."""


@contextmanager
def foreign(what: str) -> Iterator[None]:
    """Run code of users: environments, reward functions, chat templates.

    Such code may raise anything, and no exception of it may end a loop that serves other rollouts. The cancellation of
    a task is not an error and passes.
    """
    try:
        yield
    except Exception as error:
        raise EpisodeFailed(f"{what}: {describe(error)}") from error


def describe(error: Exception) -> str:
    """Return the error's type and the first line of its text."""
    name, line = type(error).__name__, first_line(str(error))
    return f"{name}: {line}" if line else name


def first_line(text: str) -> str:
    """Return the first line that is not empty."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")
