"""Who fetches a version from whom: the trainer serves FAN_OUT engines, and each engine that has it FAN_OUT others.

Pure arithmetic over the engines' questions, in the order in which they come: nobody is planned in before it asks, so an
engine that is slow, late or dead keeps nobody waiting but those that already fetch from it, and they have the trainer
to turn to. Only an engine that has the whole version, proved by the manifest's digest, is a parent.
"""

from __future__ import annotations

FAN_OUT = 2
"""A level of the tree takes as many times a copy as its fan-out, and there are as many levels as its logarithm gives:
2 and 3 are the fastest, and 2 takes least of the trainer's line."""
TREE_ABOVE = 2 * FAN_OUT
"""Engines up to which all fetch from the trainer: so few are not served sooner by a second level."""
SILENCE = 10.0
"""Seconds after which an engine that fetches and says nothing is no longer waited for."""

TRAINER = ""
"""The parent that is always there."""


class Tree:
    """The tree of one version, as it grows. Used by one thread at a time."""

    def __init__(self, fan_out: int = FAN_OUT) -> None:
        self._fan_out = fan_out
        self._parents: dict[str, str] = {}
        self._offers: dict[str, str] = {}
        self._seen: dict[str, float] = {}

    def parent_of(self, engine: str, now: float) -> str | None:
        """Where this engine fetches: from the trainer, at a location that another one offers, or None: not yet.

        Who has a parent and asks again has the same one, unless that was lost.
        """
        self._seen[engine] = now
        known = self._parents.get(engine)
        if known is not None and (known == TRAINER or known in self._offers):
            return known
        found = TRAINER if known is not None else self._room()
        if found is None and not self._under_way(now):
            found = TRAINER
        if found is not None:
            self._parents[engine] = found
        return found

    def offered(self, engine: str, location: str) -> None:
        """This engine has the version and serves it there."""
        self._offers[location] = engine

    def lost(self, location: str) -> None:
        """What was offered there did not come, or was wrong: nobody else is sent there."""
        self._offers.pop(location, None)

    def _room(self) -> str | None:
        children = [*self._parents.values()]
        # The trainer first, then who has fewest; of those, who has had the version longest.
        free = [at for at in (TRAINER, *self._offers) if children.count(at) < self._fan_out]
        return TRAINER if TRAINER in free else min(free, key=children.count, default=None)

    def _under_way(self, now: float) -> bool:
        """Whether anybody who fetches may yet become a parent."""
        arrived = set(self._offers.values())
        return any(engine not in arrived and now - self._seen[engine] < SILENCE for engine in self._parents)
