"""Deliveries between hosts: a real publisher on the first host, and real engines on the others.

The ends are the processes of `headrace bench delivery`. This process tells them what to do through pipes, so all bytes
between the hosts are the transport's. A version that an engine refuses is offered to it again with all its weights, as
often as the controller of a run would.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
from hosts import Host

from headrace.bench.delivery import Taken
from headrace.bench.delivery_sides import Begin, Publish, Published, PublisherProcess, Side
from headrace.bench.options import DeliveryBench
from headrace.delivery.base import Kind
from headrace.delivery.transports.tcp_wire import KEYS, make_keys
from headrace.pipeline.versions import ATTEMPTS

KEYS_FILE = f"/tmp/{KEYS}"
SECONDS = 120.0
"""Longer than any deadline of a transport, on a machine that stands still now and then."""
SHARE = 0.25
"""The share of a version that has reached a host when its link is cut."""
VERSIONS_TO_CUT = 5
"""On a machine that stands still now and then, a version may be over before the link is cut."""


class Way(NamedTuple):
    """A transport, and what it sends."""

    transport: str
    send: Kind

    def __str__(self) -> str:
        return f"{'gloo' if self.transport == 'nccl' else self.transport}, {self.send}"


def give_keys(hosts: Sequence[Host]) -> None:
    """Give every host the keys of a new run."""
    first, *others = [host.path(KEYS_FILE) for host in hosts]
    make_keys(first)
    for path in others:
        shutil.copy(first, path)  # With its mode: nobody else may read it.


class Engine(Side):
    """The process of an engine, which has no version yet. Several publishers may deliver to it, one after the other."""

    def __init__(self, host: Host, name: str, options: DeliveryBench, *, random_weights: bool = False) -> None:
        """Start the process. Call `answer` with `Ready` to wait for it."""
        begin = Begin(options=options, name=name, keys=KEYS_FILE, random_weights=random_weights)
        super().__init__("headrace.bench.delivery", begin, start=host.start)
        self.host = host
        self.version = 0
        """The newest version that was offered to it."""


@dataclass(frozen=True)
class Delivered:
    """One version that was offered to some engines, and their answers."""

    published: Published
    left_bytes: int
    """What left the publisher's host."""
    offers: list[list[Taken]]
    """The answers of each engine. There are several if it refused the version at first."""

    @property
    def proved(self) -> bool:
        """Whether every engine has proved the version."""
        return all(not answers[-1].refused for answers in self.offers)

    @property
    def seconds(self) -> float:
        """From the beginning of the publish to the last proof."""
        return max(answers[-1].proved_at for answers in self.offers) - self.published.began

    @property
    def stage_seconds(self) -> float:
        """How long the slowest engine fetched and checked the version, while it could decode."""
        return max(answers[-1].stage_seconds for answers in self.offers)

    @property
    def swap_seconds(self) -> float:
        """How long the slowest engine could not decode."""
        return max(answers[-1].swap_seconds for answers in self.offers)


@dataclass(frozen=True)
class Cut:
    """One version in whose middle the link of a host was cut, and the first one after the link was healed."""

    before: int
    """The digest of the version before it."""
    gave_up: Taken
    """The answer of the engine that was cut off."""
    gave_up_seconds: float
    """The time from the cut to this answer."""
    others: Delivered
    """What the other engines answered while the link was cut."""
    after: Delivered
    """The next version, to all engines, when the link was healed."""


class Deliveries:
    """A publisher on the first host, which delivers to engines on others. It ends at the end of `with`."""

    def __init__(
        self,
        hosts: Sequence[Host],
        way: Way,
        options: DeliveryBench,
        engines: Sequence[Engine],
        *,
        random_weights: bool = False,
    ) -> None:
        """Start the publisher, and wait until it is ready."""
        self.way = way
        self.engines = list(engines)
        self.newest: Published | None = None
        self._host = hosts[0]
        begin = Begin(
            options=msgspec.structs.replace(options, engines=len(engines)),
            kind=way.send,
            bind=self._host.address,
            keys=KEYS_FILE,
            # What gloo sends is neither encrypted nor authenticated. Hosts of namespaces reach only each other.
            trusted_network=way.transport == "nccl",
            random_weights=random_weights,
        )
        self._publisher = PublisherProcess(begin, start=self._host.start)

    def __enter__(self) -> Deliveries:
        return self

    def __exit__(self, *error: object) -> None:
        self._publisher.close()

    @property
    def weights_bytes(self) -> int:
        """The size of all weights."""
        assert self.newest is not None
        return sum(entry.nbytes for entry in self.newest.manifest.entries)

    def deliver(self) -> Delivered:
        """Publish the next version, and bring it to all engines."""
        before = self._host.sent_bytes
        published = self._publish()
        offers = self._bring(self.engines, self._offer(self.engines))
        return Delivered(published, self._host.sent_bytes - before, offers)

    def join_late(self, engine: Engine) -> Delivered:
        """Bring the newest version to one more engine. The time begins now."""
        assert self.newest is not None
        self.engines.append(engine)
        before, began = self._host.sent_bytes, time.monotonic()
        offers = self._bring([engine], self._offer([engine]))
        published = msgspec.structs.replace(self.newest, began=began)
        return Delivered(published, self._host.sent_bytes - before, offers)

    def cut_in_the_middle(self, host: Host) -> Cut:
        """Cut the link of a host while it fetches a version. Heal the link once the host's engine has given up.

        A delta is one bucket, which arrives as a whole or not at all. So the link is cut before a delta is offered.
        """
        [cut_off] = [engine for engine in self.engines if engine.host is host]
        others = [engine for engine in self.engines if engine.host is not host]
        for _ in range(VERSIONS_TO_CUT):
            assert self.newest is not None
            digest, before = self.newest.manifest.digest, self._host.sent_bytes
            published, received = self._publish(), host.received_bytes
            if self.way.send == "delta":
                host.cut()
            self._tell(self.engines)
            if self.way.send == "full":
                self._wait_until_received(host, received + SHARE * self.weights_bytes)
                host.cut()
            began = time.monotonic()
            answers = self._bring(others, [[engine.answer(Taken)] for engine in others])
            gave_up = cut_off.answer(Taken)
            left = self._host.sent_bytes - before
            host.heal()
            if gave_up.refused:
                seconds = gave_up.proved_at - began
                return Cut(digest, gave_up, seconds, Delivered(published, left, answers), self.deliver())
        raise AssertionError(f"{VERSIONS_TO_CUT} versions were over before the link was cut")

    def _publish(self) -> Published:
        version = 1 + max(engine.version for engine in self.engines)
        self.newest = self._publisher.publish(Publish(version=version, transport=self.way.transport))
        return self.newest

    def _tell(self, engines: Sequence[Engine]) -> None:
        assert self.newest is not None
        for engine in engines:
            engine.tell(self.newest.manifest)
            engine.version = self.newest.manifest.version

    def _offer(self, engines: Sequence[Engine]) -> list[list[Taken]]:
        self._tell(engines)
        return [[engine.answer(Taken)] for engine in engines]

    def _bring(self, engines: Sequence[Engine], offers: list[list[Taken]]) -> list[list[Taken]]:
        """Offer the newest version again to the engines that have refused it."""
        assert self.newest is not None
        for _ in range(ATTEMPTS - 1):
            refused = [pair for pair in zip(engines, offers, strict=True) if pair[1][-1].refused]
            for engine, _ in refused:
                order = Publish(version=self.newest.manifest.version, transport=self.way.transport, again=True)
                engine.tell(self._publisher.publish(order).manifest)
            for engine, answers in refused:
                answers.append(engine.answer(Taken))
        return offers

    def _wait_until_received(self, host: Host, nbytes: float) -> None:
        deadline = time.monotonic() + SECONDS
        while host.received_bytes < nbytes:
            assert time.monotonic() < deadline, f"{host.name} did not get the version"
            time.sleep(0.001)
