"""Failures as values: whatever users' code raises inside an episode becomes the reason of one failed rollout.

This is the only place where anything at all is caught.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class EpisodeFailed(Exception):
    """An episode failed; the text is the reason, in one line."""


@contextmanager
def foreign(what: str) -> Iterator[None]:
    """Run code of users: environments, reward functions, chat templates.

    They may raise anything, and none of it may end a loop that serves other rollouts. The cancellation of a task is no
    error and passes.
    """
    try:
        yield
    except Exception as error:
        raise EpisodeFailed(f"{what}: {describe(error)}") from error


def describe(error: Exception) -> str:
    """The error's kind and first line."""
    name, line = type(error).__name__, first_line(str(error))
    return f"{name}: {line}" if line else name


def first_line(text: str) -> str:
    """The first line that says anything."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")
