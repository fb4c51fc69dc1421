"""Broadcasts and trainer ranks between hosts, by gloo: delivered, joined late, cut in the middle, and healed."""

from __future__ import annotations

import json
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hosts import Host, Hosts

pytestmark = pytest.mark.cluster

SCRIPT = Path(__file__).with_name("group_ends.py")
NBYTES = 64 << 20
BUCKET_BYTES = 64 << 20
SMALL_BYTES = 16 << 10
"""Of buckets with which a broadcast takes seconds, so that it can be cut in its middle."""
SECONDS = 120.0
"""Longer than any deadline of the transport, on a machine that stands still now and then."""


class End:
    """A process of `group_ends.py` on a host."""

    def __init__(self, host: Host, *arguments: str) -> None:
        self.host = host
        self._process = host.start(
            [sys.executable, str(SCRIPT), *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def heard(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"{self.host.name} ended"
        return json.loads(line)

    def end(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        assert self._process.wait(SECONDS) == 0


class Trainer(End):
    """The sender of versions."""

    def __init__(self, host: Host, bucket: int = BUCKET_BYTES) -> None:
        super().__init__(host, "sender", host.address, str(bucket))
        assert self.heard() == {"phase": "sending"}

    def publish(self, version: int) -> str:
        self.tell(str(version))
        return str(self.heard()["location"])

    def release(self) -> None:
        self.tell("release")


def listening(host: Host) -> set[str]:
    """The addresses on which processes of a host listen."""
    rows = [line.split() for line in host.run(["cat", "/proc/net/tcp"]).stdout.splitlines()[1:]]
    rows += [line.split() for line in host.run(["cat", "/proc/net/tcp6"]).stdout.splitlines()[1:]]
    found = [row[1].partition(":")[0] for row in rows if row[3] == "0A"]
    return {socket.inet_ntoa(struct.pack("=I", int(each, 16))) if len(each) == 8 else each for each in found}


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[Host]]:
    with Hosts(3) as made:
        yield made


@pytest.fixture(scope="module")
def sources(hosts: list[Host]) -> Iterator[list[End]]:
    made = [End(host, "source") for host in hosts[1:]]
    assert [end.heard() for end in made] == [{"phase": "receiving"}] * 2
    yield made
    for end in made:
        end.end()


def load(sources: list[End], location: str, version: int) -> list[dict[str, Any]]:
    for each in sources:
        each.tell(f"{location} {version}")
    return [each.heard() for each in sources]


def load_again(end: End, location: str, version: int) -> dict[str, Any]:
    """Ask until the version is served, as the controller does. The trainer may still be ending a broken group."""
    for _ in range(5):
        [answer] = load([end], location, version)
        if "error" not in answer:
            break
    assert answer.get("holds"), answer
    return answer


def test_one_broadcast_serves_two_hosts_and_another_one_a_late_joiner(hosts: list[Host], sources: list[End]) -> None:
    trainer, late = Trainer(hosts[0]), End(hosts[2], "source")
    assert late.heard() == {"phase": "receiving"}
    for version in range(3):
        location, before = trainer.publish(version), hosts[0].sent_bytes
        answers = load(sources, location, version)
        assert [answer.get("holds") for answer in answers] == [True, True], answers
        left, seconds = (hosts[0].sent_bytes - before) / NBYTES, max(answer["seconds"] for answer in answers)
        print(f"\nto two hosts: {left:.2f} copies of {NBYTES >> 20} MiB left the trainer in {seconds:.2f} s")
        if version < 2:
            trainer.release()
    for host in hosts:
        assert listening(host) == {host.address}
    before = hosts[0].sent_bytes
    answer = load_again(late, location, 2)
    print(f"to a late joiner: {(hosts[0].sent_bytes - before) / NBYTES:.2f} copies in {answer['seconds']:.2f} s")
    trainer.release()
    for end in (late, trainer):
        end.end()


def test_a_link_that_is_cut_in_the_middle_costs_one_broadcast(hosts: list[Host], sources: list[End]) -> None:
    trainer = Trainer(hosts[0], SMALL_BYTES)
    for version in range(5):
        location, before = trainer.publish(version), hosts[0].sent_bytes
        for each in sources:
            each.tell(f"{location} {version}")
        deadline = time.monotonic() + SECONDS
        while hosts[0].sent_bytes < before + NBYTES / 4:
            assert time.monotonic() < deadline, "the broadcast did not begin"
            time.sleep(0.001)
        hosts[2].cut()
        answers = [each.heard() for each in sources]
        if all("error" in answer for answer in answers):
            break
        hosts[2].heal()  # On a machine that stood still, it was over before.
        trainer.release()
    left = (hosts[0].sent_bytes - before) / NBYTES
    for end, answer in zip(sources, answers, strict=True):
        assert "error" in answer, answer
        assert answer["seconds"] < SECONDS
        print(
            f"\ncut after {left:.2f} copies: {end.host.name} gave up after {answer['seconds']:.1f} s: {answer['error']}"
        )

    answer = load_again(sources[0], location, version)
    print(f"the host that is not cut off has the version {answer['seconds']:.2f} s after it asks again")
    assert "error" in load(sources[1:], location, version)[0]
    hosts[2].heal()
    answer = load_again(sources[1], location, version)
    print(f"the host that was cut off has it {answer['seconds']:.2f} s after it is healed and asks again")
    trainer.release()
    location = trainer.publish(version + 1)
    for end in sources:
        load_again(end, location, version + 1)
    trainer.release()
    trainer.end()


def test_ranks_of_two_hosts_meet_on_their_addresses(hosts: list[Host]) -> None:
    first = End(hosts[0], "rank", "0", hosts[0].address)
    second = End(hosts[1], "rank", "1", hosts[1].address, hosts[0].address, str(first.heard()["port"]))
    assert [end.heard() for end in (first, second)] == [{"total": 11.0}] * 2
    for host in hosts[:2]:
        assert listening(host) == {host.address}
    for end in (first, second):
        end.tell("leave")
    for end in (first, second):
        end.end()
