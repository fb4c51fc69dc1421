"""What the pool of agents and its worker processes say to each other: one JSON object a line, over two pipes."""

from __future__ import annotations

from typing import Any

import msgspec

LONGEST_LINE = 64 * 2**20


class Setup(msgspec.Struct, kw_only=True):
    """The first line to a worker: what its agents are. One of the two is given."""

    function: str | None = None
    command: list[str] | None = None


class Hello(msgspec.Struct, kw_only=True):
    """The first line from a worker: ready, or why it never will be."""

    error: str = ""


class Job(msgspec.Struct, kw_only=True, tag="job"):
    """One agent to run."""

    id: str
    """Its session's."""
    base_url: str
    api_key: str
    model: str
    prompt: str
    """The prompt's id."""
    messages: list[dict[str, str]]
    text: str | None = None
    data: dict[str, Any] = {}


class Halt(msgspec.Struct, kw_only=True, tag="halt"):
    """Nobody waits for this agent any more."""

    id: str


class Done(msgspec.Struct, kw_only=True):
    """How an agent ended: with a reward, without one (it has posted it), or with an error."""

    id: str
    reward: float | None = None
    metrics: dict[str, float] = {}
    error: str = ""


ToWorker = Job | Halt


def pack(message: Setup | Hello | Job | Halt | Done) -> bytes:
    """A line."""
    return msgspec.json.encode(message) + b"\n"
