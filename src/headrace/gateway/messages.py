"""The messages between the pool of agents and its worker processes."""

from __future__ import annotations

from typing import Any

import msgspec


class AgentSetup(msgspec.Struct, kw_only=True):
    """The first frame to a worker, which says what its agents are. Either `function` or `command` is given."""

    function: str | None = None
    command: list[str] | None = None


class Job(msgspec.Struct, kw_only=True):
    """A job for a worker: one agent to run."""

    id: str
    """The id of the agent's session."""
    base_url: str
    api_key: str
    model: str
    prompt: str
    """The prompt's id."""
    messages: list[dict[str, str]]
    text: str | None = None
    data: dict[str, Any] = {}


class AgentResult(msgspec.Struct, kw_only=True):
    """How an agent ended: with a reward, without one (because the agent posted it), or with an error."""

    reward: float | None = None
    metrics: dict[str, float] = {}
    error: str = ""
