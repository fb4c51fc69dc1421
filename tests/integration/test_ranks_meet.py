"""Trainer ranks that share no run directory: the first one waits at an address, and the controller tells the others."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from forked_processes import PROCESSES
from headrace.channel.codec import Message
from headrace.channel.heartbeats import Hello, MeetingPoint, MeetingRequest, Stop
from headrace.channel.hub import Hub
from headrace.channel.worker_link import WorkerLink
from headrace.cluster.meeting import Meeting
from headrace.config import Config
from headrace.config.schema import (
    ClusterConfig,
    DeliveryConfig,
    GymTaskConfig,
    ModelConfig,
    PipelineConfig,
    TrainingConfig,
)
from headrace.errors import ConfigError, DeadlineError, HeadraceError, UserError
from headrace.training.meeting import join_ranks
from waiting import until

RANKS = ["trainer-0", "trainer-1", "trainer-2"]
CONFIG = Config(
    model=ModelConfig(path="model"), task=GymTaskConfig(name="chain_sum"), training=TrainingConfig(ranks=len(RANKS))
)


class Controlling:
    """The controller's end: a hub that hands messages to a meeting."""

    def __init__(self, address: str) -> None:
        self.said: list[tuple[str, Message]] = []
        self.hub = Hub(address, self._heard, names=RANKS)
        self.meeting = Meeting(self.hub, RANKS)

    def _heard(self, peer: str, message: Message) -> None:
        self.said.append((peer, message))
        self.meeting.heard(peer, message)

    def points(self) -> list[MeetingPoint]:
        return [message for _, message in self.said if isinstance(message, MeetingPoint)]

    def requests(self) -> list[MeetingRequest]:
        return [message for _, message in self.said if isinstance(message, MeetingRequest)]

    def greetings(self, name: str) -> int:
        return sum(peer == name and isinstance(message, Hello) for peer, message in self.said)


@contextlib.asynccontextmanager
async def controlling(address: str) -> AsyncIterator[Controlling]:
    made = Controlling(address)
    made.hub.start()
    telling = asyncio.create_task(made.meeting.tell())
    try:
        yield made
    finally:
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)
        await made.hub.close()


@contextlib.contextmanager
def linked(name: str, address: str, run_dir: Path) -> Iterator[WorkerLink]:
    link = WorkerLink(name, address, run_dir, on_lost=lambda: None)
    link.start()
    try:
        yield link
    finally:
        link.close()


def one_rank(name: str, address: str, run_dir: Path, meet_at: str) -> None:
    """What a rank does in a process of its own, with a directory of its own."""
    torch.set_num_threads(1)
    run_dir.mkdir()
    with linked(name, address, run_dir) as link:
        ranks = join_ranks(link, CONFIG, "cpu", meet_at)
        assert ranks is not None
        [total] = ranks.sum_over_all([10.0**ranks.rank])
        (run_dir / "total").write_text(str(total))
        ranks.meet()
        ranks.leave()


async def test_ranks_of_other_directories_meet_and_compute_together(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/hub"
    async with controlling(address) as controller:
        # The last one says hello long after the first one waits.
        places = dict(zip(RANKS, ["127.0.0.2", "127.0.0.3", "127.0.0.3"], strict=True))
        processes = {
            name: PROCESSES.Process(target=one_rank, args=(name, address, tmp_path / name, at), daemon=True)
            for name, at in places.items()
        }
        for name in RANKS[:2]:
            await asyncio.to_thread(processes[name].start)
        await until(controller.points)
        assert [point.host for point in controller.points()] == ["127.0.0.2"]
        await asyncio.to_thread(processes[RANKS[2]].start)
        for process in processes.values():
            await asyncio.to_thread(process.join, 200)
        assert [process.exitcode for process in processes.values()] == [0, 0, 0]
    assert [float((tmp_path / name / "total").read_text()) for name in RANKS] == [111.0] * 3
    assert not any((tmp_path / name / "ranks.store").exists() for name in RANKS)


async def test_a_rank_is_told_the_point_of_the_newest_first_rank_when_it_asks(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/hub"

    async def told(link: WorkerLink) -> int | None:
        incoming = await asyncio.to_thread(link.next_message)
        assert incoming is None or isinstance(incoming.message, MeetingPoint)
        return None if incoming is None else incoming.message.port

    async def told_at_last(link: WorkerLink) -> int:
        async with asyncio.timeout(60):
            while (port := await told(link)) is None:
                pass
        return port

    async with controlling(address) as controller:
        with contextlib.ExitStack() as links:
            first, second, third = (links.enter_context(linked(name, address, tmp_path)) for name in RANKS)
            second.send(MeetingRequest())
            second.send(MeetingPoint(host="127.0.0.9", port=9))  # It is not the first.
            first.send(MeetingRequest())
            await until(lambda: len(controller.points()) == 1 and len(controller.requests()) == 2)
            assert [await told(link) for link in (first, second, third)] == [None, None, None]
            first.send(MeetingPoint(host="127.0.0.1", port=1))
            assert await told_at_last(second) == 1
            greetings = controller.greetings(RANKS[0])
            first.send(Hello(protocol=1))
            await until(lambda: controller.greetings(RANKS[0]) > greetings)
            third.send(MeetingRequest())
            first.send(MeetingPoint(host="127.0.0.1", port=2))
            assert await told_at_last(third) == 2
            second.send(MeetingRequest())
            assert await told_at_last(second) == 2
            assert [await told(link) for link in (first, second, third)] == [None, None, None]


async def test_a_rank_that_is_not_told_or_stopped_or_cannot_connect_says_so(tmp_path: Path) -> None:
    hasty = msgspec.structs.replace(
        CONFIG,
        pipeline=PipelineConfig(start_seconds=1.0, stall_seconds=1.0),
        delivery=DeliveryConfig(deadline=1.0),
    )
    address = f"ipc://{tmp_path}/hub"
    async with controlling(address) as controller:
        with linked(RANKS[1], address, tmp_path) as link:
            await until(lambda: controller.greetings(RANKS[1]) > 0)
            for message, config, error, line in (
                (None, hasty, DeadlineError, "trainer-1 was not told within 1 s where the first rank waits"),
                (Stop(), CONFIG, HeadraceError, "the run ended before the trainer's ranks had met"),
                (
                    MeetingPoint(host="127.0.0.2", port=9),
                    hasty,
                    UserError,
                    "does not reach the first rank at 127.0.0.2:9",
                ),
            ):
                if message is not None:
                    await controller.hub.send(RANKS[1], message)
                with pytest.raises(error, match=line):
                    await asyncio.to_thread(join_ranks, link, config, "cpu", "127.0.0.3")


def test_ranks_leave_a_host_only_on_a_trusted_network(tmp_path: Path) -> None:
    link = WorkerLink(RANKS[0], f"ipc://{tmp_path}/hub", tmp_path)
    with pytest.raises(
        ConfigError, match=r"^\[cluster\] trusted_network: trainer-0, .* would listen on 203\.0\.113\.1, "
    ):
        join_ranks(link, CONFIG, "cpu", "203.0.113.1")
    trusting = msgspec.structs.replace(CONFIG, cluster=ClusterConfig(trusted_network=True))
    with pytest.raises(UserError, match=r"^trainer-0 cannot listen on 203\.0\.113\.1 for the other ranks: "):
        join_ranks(link, trusting, "cpu", "203.0.113.1")
