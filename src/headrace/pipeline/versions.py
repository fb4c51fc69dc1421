"""The state of every version of one policy. Only this module knows the state of a version.

    published ──▶ sent ──▶ proved         groups begin under it
        │          ├─────▶ stranded       an engine refused it, and the trainer that could send it again is gone
        └──────────┴─────▶ void           its trainer restarted without it: no engine can fetch it any more

A version is orphaned when its trainer has died. Engines may fetch its bytes while these last, but nothing can send the
version again. A restarted trainer publishes the same weights under the next free id (`Window.republish`), never under
the old id.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from headrace.delivery.base import Manifest
from headrace.types import NO_VERSION


class Versions:
    """The states of all versions, without I/O or waits: callers report what happened and ask for states."""

    def __init__(self) -> None:
        self.asked = False
        """Whether the trainer was asked to publish a first version."""
        self.announced = NO_VERSION
        """The newest version that a trainer has published."""
        self.newest: Manifest | None = None
        """The newest version that was sent. Deliveries bring this version to the engines."""
        self.proved = NO_VERSION
        """The newest version that was declared: engines hold it, and groups begin under it."""
        self._published: deque[Manifest] = deque()
        self._orphaned = NO_VERSION
        self._void = NO_VERSION
        self._stranded = NO_VERSION
        self._fetching: dict[str, int] = {}
        """The version that each engine is fetching, by engine name."""
        self._held: set[int] = set()
        """The versions whose bytes the trainer keeps until they are acknowledged."""

    # ---- published

    def published(self, manifest: Manifest) -> None:
        """Record that the trainer has published a version."""
        self.announced = max(self.announced, manifest.version)
        self._published.append(manifest)

    @property
    def waiting(self) -> bool:
        """Whether a published version has not been sent yet."""
        return bool(self._published)

    # ---- sent

    def next(self) -> Manifest:
        """Mark the oldest published version as sent, so that every engine with an older version fetches it."""
        self.newest = self._published.popleft()
        self._held.add(self.newest.version)
        return self.newest

    def sent_again(self, manifest: Manifest) -> None:
        """Record that the trainer has made all bytes of a version available once more."""
        self._held.add(manifest.version)

    @contextmanager
    def fetched_by(self, engine: str, version: int) -> Iterator[None]:
        """Keep the bytes of this version while the engine fetches it."""
        self._fetching[engine] = version
        try:
            yield
        finally:
            del self._fetching[engine]

    def superseded(self, version: int) -> bool:
        """Return whether a newer version was sent."""
        return self.newest is not None and self.newest.version > version

    # ---- proved

    def declare(self, version: int) -> None:
        """Record that enough engines have proved this version."""
        self.proved = version

    def release(self, declared: int, *, still_wanted: bool) -> list[int]:
        """Return the versions whose bytes no engine needs any more, oldest first. The trainer may reuse their memory.

        `still_wanted` says whether a present engine has yet to fetch the newest version.
        """
        if self.newest is None:
            return []
        wanted = {version for version in self._fetching.values() if version >= declared}
        # An undeclared version is also kept for engines that are away: there may be no others.
        if self.newest.version > declared or still_wanted:
            wanted.add(self.newest.version)
        done, self._held = self._held - wanted, self._held & wanted
        return sorted(done)

    # ---- orphaned, stranded, void

    def orphan(self) -> None:
        """Record that the trainer is gone: nothing can send the versions published so far again."""
        self._orphaned = self.announced

    def orphaned(self, version: int) -> bool:
        """Return whether the trainer that published this version is gone."""
        return version <= self._orphaned

    def mark_stranded(self, version: int) -> None:
        """Record that an engine refused this version and nothing can send it again: engines wait for the next one."""
        self._stranded = version

    def void_before(self, version: int) -> None:
        """Mark all versions older than this one as void: their bytes went with the trainer that published them."""
        self._void = version
        self._published = deque(one for one in self._published if one.version >= version)
        self._held = {one for one in self._held if one >= version}

    def void(self, version: int) -> bool:
        """Return whether no engine can fetch this version any more."""
        return version < self._void

    def fetchable(self) -> int:
        """Return the version that engines should fetch now; `NO_VERSION` if there is none."""
        if self.newest is None or self.newest.version <= self._stranded or self.void(self.newest.version):
            return NO_VERSION
        return self.newest.version
