"""What the controller learns, event by event. Every one has one owner: `Controller.serve` takes it from the queue.

event      from                     what the controller does
Heard      a worker's message       tokens go to their episodes; a published version is sent; a beat is recorded
Scored     a group's task           the group is judged, and enters the window or leaves it with a reason
Proved     a delivery to an engine  the engine serves the version, or is brought it again
Died       supervision              see `recovery`
Returned   supervision              see `recovery`
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
    """All rollouts of a group have ended, and those that can be scored are."""

    group: Group
    episodes: Sequence[AnyEpisode]


@dataclass(frozen=True)
class VersionProved(Event):
    """An engine has answered a delivery: it has proved the version, or refused it."""

    proof: Proof
