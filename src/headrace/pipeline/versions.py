"""The life of every version of one policy. Only this object knows where a version stands.

    published ──▶ sent ──▶ proved         groups begin under it
        │          ├─────▶ stranded       refused, and the trainer that could send it again is gone
        └──────────┴─────▶ void           its trainer came back without it: nobody can fetch it any more

A version whose trainer has died is orphaned: engines may fetch its bytes while they last, but nobody can send it again.
A trainer that comes back publishes the same weights under the next free id (`Window.republish`), never the old one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from headrace.delivery.base import Manifest
from headrace.types import NO_VERSION


class Versions:
    """Where each version stands. No I/O and no waiting: others ask, and tell what happened."""

    def __init__(self) -> None:
        self.asked = False
        """Whether the trainer was asked to publish a first version."""
        self.announced = NO_VERSION
        """The newest version that a trainer has published."""
        self.newest: Manifest | None = None
        """The newest version that was sent: the one that engines are brought."""
        self.proved = NO_VERSION
        """The newest version that was declared: engines hold it, and groups begin under it."""
        self._published: deque[Manifest] = deque()
        self._orphaned = NO_VERSION
        self._void = NO_VERSION
        self._stranded = NO_VERSION
        self._fetching: dict[str, int] = {}
        """Engine -> the version that it is fetching."""
        self._held: set[int] = set()
        """Versions whose bytes the trainer keeps, until they are acknowledged."""

    # ---- published

    def published(self, manifest: Manifest) -> None:
        """The trainer offers a version."""
        self.announced = max(self.announced, manifest.version)
        self._published.append(manifest)

    @property
    def waiting(self) -> bool:
        """Whether a published version has not been sent yet."""
        return bool(self._published)

    # ---- sent

    def next(self) -> Manifest:
        """The oldest published version: it is sent from now on."""
        return self.send(self._published.popleft())

    def send(self, manifest: Manifest) -> Manifest:
        """Bring this version to every engine that is behind it."""
        self.newest = manifest
        self._held.add(manifest.version)
        return manifest

    def sent_again(self, manifest: Manifest) -> None:
        """The trainer has made all bytes of a version ready once more."""
        self._held.add(manifest.version)

    @contextmanager
    def fetched_by(self, engine: str, version: int) -> Iterator[None]:
        """While an engine fetches a version, its bytes are kept."""
        self._fetching[engine] = version
        try:
            yield
        finally:
            del self._fetching[engine]

    def superseded(self, version: int) -> bool:
        """Whether a newer version is sent."""
        return self.newest is not None and self.newest.version > version

    # ---- proved

    def declare(self, version: int) -> None:
        """Enough engines have proved this version."""
        self.proved = version

    def release(self, declared: int, *, still_wanted: bool) -> list[int]:
        """The versions whose bytes nobody fetches any more, oldest first; the trainer may use their place again.

        `still_wanted` says whether an engine that is present has yet to fetch the newest version.
        """
        if self.newest is None:
            return []
        wanted = {version for version in self._fetching.values() if version >= declared}
        # A version that is not declared is kept for engines that are away too: they may be all there are.
        if self.newest.version > declared or still_wanted:
            wanted.add(self.newest.version)
        done, self._held = self._held - wanted, self._held & wanted
        return sorted(done)

    # ---- orphaned, stranded, void

    def orphan(self) -> None:
        """The trainer is gone: nobody can send again what was published so far."""
        self._orphaned = self.announced

    def orphaned(self, version: int) -> bool:
        """Whether the trainer that published this version is gone."""
        return version <= self._orphaned

    def strand(self, version: int) -> None:
        """An engine refused this version, and nobody can send it again: engines wait for the next one."""
        self._stranded = version

    def void_before(self, version: int) -> None:
        """Nobody can fetch what is older than this version: its bytes went with the trainer that published it."""
        self._void = version
        self._published = deque(one for one in self._published if one.version >= version)
        self._held = {one for one in self._held if one >= version}

    def void(self, version: int) -> bool:
        """Whether nobody can fetch this version any more."""
        return version < self._void

    def fetchable(self) -> int:
        """The version that engines are to fetch now; `NO_VERSION` if there is none."""
        if self.newest is None or self.newest.version <= self._stranded or self.void(self.newest.version):
            return NO_VERSION
        return self.newest.version
