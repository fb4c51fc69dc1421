"""The tree in which engines fetch a version: the trainer serves FAN_OUT engines, and each engine that has the version
serves FAN_OUT others.

The tree is pure arithmetic over the engines' requests in the order of their arrival. An engine has no position in the
tree before it asks, so a slow, late or dead engine delays only the engines that already fetch from it, and these can
turn to the trainer. Only an engine that has the whole version, proved by the manifest's digest, becomes a parent.
"""

from __future__ import annotations

FAN_OUT = 2
"""How many engines each parent serves. A level of the tree takes FAN_OUT copies, and the number of levels is the
logarithm of the number of engines to this base. So 2 and 3 are the fastest, and 2 sends least from the trainer."""
TREE_ABOVE = 2 * FAN_OUT
"""Up to this many engines all fetch from the trainer, because a second level would not serve so few any sooner."""
SILENCE = 10.0
"""After this many seconds of silence, an engine that fetches is no longer waited for."""

TRAINER = ""
"""The trainer as a parent; it is always available."""


class Tree:
    """The tree of one version, which grows with every request. Used by one thread at a time."""

    def __init__(self, fan_out: int = FAN_OUT) -> None:
        self._fan_out = fan_out
        self._parents: dict[str, str] = {}
        self._offers: dict[str, str] = {}
        self._seen: dict[str, float] = {}

    def parent_of(self, engine: str, now: float) -> str | None:
        """Return where this engine fetches: `TRAINER`, the location of another engine's offer, or None for "ask again".

        An engine that asks again keeps its parent, unless the parent was lost; then it gets the trainer.
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
        """Record that this engine has the version and serves it at this location."""
        self._offers[location] = engine

    def lost(self, location: str) -> None:
        """Remove an offer that failed or was wrong, so that nobody else is sent there."""
        self._offers.pop(location, None)

    def _room(self) -> str | None:
        children = [*self._parents.values()]
        # The trainer comes first, then the engine with the fewest children; of several, the one that offered first.
        free = [at for at in (TRAINER, *self._offers) if children.count(at) < self._fan_out]
        return TRAINER if TRAINER in free else min(free, key=children.count, default=None)

    def _under_way(self, now: float) -> bool:
        """Return whether an engine that fetches now may still become a parent."""
        arrived = set(self._offers.values())
        return any(engine not in arrived and now - self._seen[engine] < SILENCE for engine in self._parents)
