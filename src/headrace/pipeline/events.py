"""The events that the controller handles. Only `Controller.serve` takes events from the queue.

event          from                     what the controller does
Heard          a worker's message       passes tokens to their episodes; sends a published version; records a heartbeat
GroupScored    a group's task           judges the group, which enters the window or leaves it with a reason
VersionProved  a delivery to an engine  lets the engine serve the version, or sends the version again
Died           supervision              see `recovery`
Returned       supervision              see `recovery`
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.channel.events import Died, Event, Events, Heard, Returned
from headrace.delivery.base import Proof
from headrace.rollouts.base import AnyEpisode
from headrace.types import Group

__all__ = ["Died", "Event", "Events", "GroupScored", "Heard", "Returned", "VersionProved"]


@dataclass(frozen=True)
class GroupScored(Event):
    """All rollouts of a group have ended, and those that can be scored are scored."""

    group: Group
    episodes: Sequence[AnyEpisode]


@dataclass(frozen=True)
class VersionProved(Event):
    """An engine has answered a delivery: it has proved the version or refused it."""

    proof: Proof
