"""What every transport keeps: bytes arrive as written, no version is mixed with another, nothing is left behind."""

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
import torch

from headrace.delivery import transports
from headrace.delivery.plan import PackingPlan, plan_weights
from headrace.delivery.transports.base import Sender, SenderSettings, Source
from headrace.delivery.transports.segments import segment_directories
from headrace.delivery.transports.storage import LOCK, MARKER
from headrace.errors import DeliveryError

RUN_ID = f"contract-{os.getpid()}"


def on_disk(directory: Path) -> list[str]:
    """What any transport has put on the machine."""
    segments = [path.name for place in segment_directories() for path in place.glob(f"headrace-{RUN_ID}-*")]
    stored = fsspec.filesystem("memory").find(f"/{RUN_ID}")
    files = [path.name for path in directory.glob("weights/*")] + [name.rsplit("/", 1)[1] for name in stored]
    return segments + [name for name in files if name not in (LOCK, MARKER)]


def listening() -> set[str]:
    """Ports that this process listens on."""
    inodes = set()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(str(link.readlink()).removeprefix("socket:[").removesuffix("]"))
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {row[1] for row in rows if row[3] == "0A" and row[9] in inodes}


@pytest.fixture(params=[*transports.WITHOUT_GPU, "file over file://", "file over memory://"])
def variant(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="session")
def once_per_process() -> None:
    """The event loop behind torch's stores opens a pipe with the first of them and keeps it."""
    torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def transport(variant: str) -> str:
    return variant.split()[0]


@pytest.fixture
def directory(variant: str, tmp_path: Path) -> Path | str:
    if variant.endswith("file://"):
        return f"file://{tmp_path}/weights"
    return f"memory://{RUN_ID}/weights" if variant.endswith("memory://") else tmp_path / "weights"


@pytest.fixture
def sender(transport: str, directory: Path | str, tmp_path: Path, once_per_process: None) -> Iterator[Sender]:
    threads, ports, descriptors = threading.active_count(), listening(), len(list(Path("/proc/self/fd").iterdir()))
    made = transports.sender(transport, SenderSettings(run_id=RUN_ID, directory=directory, keep=1))
    yield made
    made.close()
    made.close()
    assert on_disk(tmp_path) == []
    assert not (tmp_path / "weights").exists()
    assert threading.active_count() <= threads
    assert listening() == ports
    assert len(list(Path("/proc/self/fd").iterdir())) <= descriptors


@pytest.fixture
def source(transport: str, sender: Sender) -> Iterator[Source]:
    made = transports.source(transport)
    yield made
    made.close()
    made.close()


def write(sender: Sender, version: int, plan: PackingPlan, weights: dict[str, torch.Tensor]) -> str:
    location = sender.write(version, plan, weights)
    sender.finish(location)
    return location


def weights_of(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "embed": torch.randn(33, 7, generator=generator),
        "transposed": torch.randn(5, 9, generator=generator).t(),
        "half": torch.randn(11, generator=generator).to(torch.bfloat16),
        "scale": torch.randn((), generator=generator),
        "nothing": torch.empty(0, 3),
        "count": torch.tensor([seed, -seed], dtype=torch.int64),
        "mask": torch.tensor([True, False, True]),
    }


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        cast = tensor.to(dtype) if tensor.is_floating_point() else tensor
        assert found[name].dtype == cast.dtype
        assert torch.equal(found[name], cast), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bytes_arrive_as_written_cast_to_the_serving_dtype(sender: Sender, source: Source, dtype: str):
    weights = weights_of(1)
    plan = plan_weights(weights, dtype)
    sender.wait(1, 1.0)
    location = write(sender, 1, plan, weights)
    for tensor in weights.values():
        tensor.zero_()
    found = source.open(location, 1, plan.entries)
    source.verify(location, 1)
    assert_equal(found, weights_of(1), getattr(torch, dtype))
    assert_equal(sender.snapshot(location, plan), weights_of(1), getattr(torch, dtype))


def test_many_versions_pass_through_few_places(sender: Sender, source: Source, tmp_path: Path):
    plan = plan_weights(weights_of(0), "float32")
    for version in range(10):
        sender.wait(version, 1.0)
        location = write(sender, version, plan, weights_of(version))
        assert_equal(source.open(location, version, plan.entries), weights_of(version), torch.float32)
        source.verify(location, version)
        sender.release(location)
        assert len(on_disk(tmp_path)) <= 2


def test_two_versions_are_held_and_a_third_waits_for_a_release(sender: Sender, source: Source):
    plan = plan_weights(weights_of(0), "float32")
    first = write(sender, 1, plan, weights_of(1))
    second = write(sender, 2, plan, weights_of(2))
    assert first != second
    with pytest.raises(DeliveryError, match=r"version 3.*version 1 .*version 2 "):
        sender.write(3, plan, weights_of(3))
    started = time.monotonic()
    with pytest.raises(DeliveryError, match=r"version 3.*version 1 .*version 2 "):
        sender.wait(3, 0.2)
    assert 0.2 <= time.monotonic() - started < 30
    threading.Timer(0.2, sender.release, [first]).start()
    sender.wait(3, 10.0)
    third = write(sender, 3, plan, weights_of(3))
    assert_equal(source.open(second, 2, plan.entries), weights_of(2), torch.float32)
    assert_equal(source.open(third, 3, plan.entries), weights_of(3), torch.float32)


def test_a_place_that_is_used_again_while_it_is_read_is_noticed(sender: Sender, source: Source):
    plan = plan_weights(weights_of(0), "float32")
    location = write(sender, 1, plan, weights_of(1))
    source.open(location, 1, plan.entries)
    sender.release(location)
    again = write(sender, 2, plan, weights_of(2))
    with pytest.raises(DeliveryError):
        source.verify(location, 1)
    with pytest.raises(DeliveryError):
        source.open(location, 1, plan.entries)
    assert_equal(source.open(again, 2, plan.entries), weights_of(2), torch.float32)


def test_a_write_that_fails_frees_its_place(sender: Sender):
    plan = plan_weights(weights_of(0), "float32")
    for version in range(4):
        with pytest.raises(DeliveryError, match="embed has shape"):
            sender.write(version, plan, weights_of(0) | {"embed": torch.zeros(7, 33)})
    sender.wait(4, 0.0)


def test_release_is_idempotent_and_frees_one_place_only(sender: Sender):
    plan = plan_weights(weights_of(0), "float32")
    location = write(sender, 1, plan, weights_of(1))
    sender.write(2, plan, weights_of(2))
    sender.release(location)
    sender.release(location)
    sender.write(3, plan, weights_of(3))
    with pytest.raises(DeliveryError):
        sender.wait(4, 0.0)


def test_weights_may_change_their_size(sender: Sender, source: Source):
    for version, rows in enumerate([4, 4000, 4, 400]):
        weights = {"w": torch.full((rows, 3), float(version))}
        plan = plan_weights(weights, "float32")
        location = write(sender, version, plan, weights)
        assert_equal(source.open(location, version, plan.entries), weights, torch.float32)
        sender.release(location)


def test_a_location_that_is_gone_is_an_error(transport: str, sender: Sender, source: Source):
    plan = plan_weights(weights_of(0), "float32")
    opened = write(sender, 1, plan, weights_of(1))
    unopened = write(sender, 2, plan, weights_of(2))
    source.open(opened, 1, plan.entries)
    sender.close()
    for location, version in [(opened, 1), (unopened, 2)]:
        with pytest.raises(DeliveryError):
            source.open(location, version, plan.entries)
    with pytest.raises(DeliveryError, match="closed"):
        sender.wait(3, 1.0)


def test_close_wakes_who_waits(sender: Sender):
    plan = plan_weights(weights_of(0), "float32")
    sender.write(1, plan, weights_of(1))
    sender.write(2, plan, weights_of(2))
    timer = threading.Timer(0.1, sender.close)
    timer.start()
    with pytest.raises(DeliveryError, match="closed"):
        sender.wait(3, 10.0)
    timer.join()


def test_an_unknown_transport_is_named():
    with pytest.raises(DeliveryError, match="no transport 'pigeon'"):
        transports.source("pigeon")
    with pytest.raises(DeliveryError, match="no transport 'pigeon'"):
        transports.sender("pigeon", SenderSettings(run_id=RUN_ID))
