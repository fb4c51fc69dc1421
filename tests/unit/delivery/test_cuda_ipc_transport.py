"""What of `cuda_ipc` is there without a GPU: tickets, the death of an owner, and one line for who has none."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.delivery import transports
from headrace.delivery.transports.base import SenderSettings
from headrace.delivery.transports.cuda_ipc import TICKET_BYTES, Ticket, read_ticket, write_ticket
from headrace.delivery.transports.segments import MappedSegment, SharedSegment, sweep
from headrace.errors import ConfigError, DeliveryError

TICKET = Ticket(
    token="t" * 32,
    gpu="g" * 36,
    nbytes=1 << 40,
    memory=bytes(range(64)),
    event=bytes(range(64, 128)),
    others=["/" + "o" * 1024],
)
OWNER = """
import sys
from headrace.delivery.transports.segments import SharedSegment
segment = SharedSegment.create("ipc-test", 1024)
segment.begin(3)
segment.finish(3)
print(segment.path, flush=True)
sys.stdin.read()
"""


def test_a_ticket_is_read_as_it_was_written_whatever_version_comes():
    segment = SharedSegment.create(f"ipc-{os.getpid()}", TICKET_BYTES)
    mapped = MappedSegment(segment.path)
    with pytest.raises(DeliveryError, match="does not say how to map"):
        read_ticket(mapped)
    write_ticket(segment, TICKET)
    for version in (1, 2):
        segment.begin(version)
        with pytest.raises(DeliveryError, match="torn"):
            mapped.check(version)
        segment.finish(version)
        mapped.check(version)
        assert read_ticket(mapped) == TICKET
    assert not mapped.abandoned
    mapped.close()
    segment.remove()


def test_an_owner_that_is_killed_is_known_to_be_dead_and_its_segment_is_swept():
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    path = Path(owner.stdout.readline().strip())
    mapped = MappedSegment(path)
    mapped.check(3)
    assert not mapped.abandoned
    owner.send_signal(signal.SIGKILL)
    owner.communicate()
    assert mapped.abandoned
    mapped.check(3)
    assert path.name in sweep()
    assert not path.exists()
    mapped.close()


def test_without_a_gpu_it_says_so_in_one_line():
    with pytest.raises(ConfigError, match=r"\[delivery\] transport: .*trainer's weights on a GPU, not on cpu"):
        transports.sender("cuda_ipc", SenderSettings(run_id="run"))
    with pytest.raises(ConfigError, match=r"\[delivery\] transport: .*engine's weights on a GPU, not on cpu"):
        transports.source("cuda_ipc")
