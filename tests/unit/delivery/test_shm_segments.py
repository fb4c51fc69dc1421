import fcntl
import logging
import os
import re
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headrace.delivery.transports import segments
from headrace.delivery.transports.segments import HEADER_BYTES, MappedSegment, SharedSegment, sweep
from headrace.errors import DeliveryError

RUN_ID = "segments-test"


@pytest.fixture
def segment():
    made = SharedSegment.create(RUN_ID, 1000)
    yield made
    if made.path.exists():
        made.remove()


def held(segment: SharedSegment, version: int = 1) -> MappedSegment:
    segment.begin(version)
    segment.buffer[HEADER_BYTES:] = b"x" * 1000
    segment.finish(version)
    return MappedSegment(segment.path)


def test_names_and_modes(segment: SharedSegment):
    assert re.fullmatch(rf"headrace-{RUN_ID}-{os.getpid()}-\d+", segment.path.name)
    assert stat.S_IMODE(segment.path.stat().st_mode) == 0o600


def test_odd_run_ids_make_plain_names():
    made = SharedSegment.create("../../etc/pass wd", 10)
    assert made.path.name.startswith(f"headrace-.._.._etc_pass_wd-{os.getpid()}-")
    assert made.path.parent in segments.segment_directories()
    made.remove()


def test_a_name_that_exists_is_neither_reused_nor_overwritten(segment: SharedSegment):
    stem, _, number = segment.path.name.rpartition("-")
    left = segment.path.with_name(f"{stem}-{int(number) + 1}")
    left.write_text("left by a dead process that had this process id")
    other = SharedSegment.create(RUN_ID, 1000)
    assert other.path.name == f"{stem}-{int(number) + 2}"
    assert left.read_text() == "left by a dead process that had this process id"
    left.unlink()
    other.remove()


def test_a_reader_cannot_change_a_segment(segment: SharedSegment):
    mapped = held(segment)
    mapped.buffer[HEADER_BYTES] = ord("y")
    assert segment.buffer[HEADER_BYTES] == ord("x")
    mapped.close()


def test_a_half_written_segment_is_torn(segment: SharedSegment):
    mapped = held(segment)
    mapped.check(1)
    segment.begin(2)
    with pytest.raises(DeliveryError, match="holds version 2, not 1"):
        mapped.check(1)
    with pytest.raises(DeliveryError, match="torn: version 2 was not written to its end"):
        mapped.check(2)
    segment.finish(2)
    mapped.check(2)
    mapped.close()


def test_a_truncated_segment_is_an_error(segment: SharedSegment):
    mapped = held(segment)
    with pytest.raises(DeliveryError, match=r"truncated: 1064 of 1065 bytes"):
        mapped.check(1, 1001)
    os.truncate(segment.path, HEADER_BYTES + 999)
    with pytest.raises(DeliveryError, match=r"truncated: 1063 of 1064 bytes"):
        mapped.check(1)
    os.truncate(segment.path, 8)
    with pytest.raises(DeliveryError, match="not a segment"):
        mapped.check(1)
    mapped.close()
    os.truncate(segment.path, 0)
    with pytest.raises(DeliveryError, match="cannot be mapped"):
        MappedSegment(segment.path)


def test_missing_removed_and_foreign_files_are_errors(segment: SharedSegment, tmp_path: Path):
    with pytest.raises(DeliveryError, match="nowhere cannot be opened: No such file"):
        MappedSegment(tmp_path / "nowhere")
    (tmp_path / "foreign").write_bytes(b"a" * 100)
    foreign = MappedSegment(tmp_path / "foreign")
    with pytest.raises(DeliveryError, match="foreign is not a segment"):
        foreign.check(1)
    foreign.close()
    mapped = held(segment)
    segment.remove()
    assert mapped.removed
    with pytest.raises(DeliveryError, match="was removed"):
        mapped.check(1)
    mapped.close()


def test_a_full_directory_is_left_for_the_next_one_and_said(monkeypatch, tmp_path, caplog):
    roomy = tmp_path / "roomy"
    roomy.mkdir()
    monkeypatch.setattr(segments, "segment_directories", lambda: [tmp_path / "missing", roomy])
    with caplog.at_level(logging.WARNING):
        made = SharedSegment.create(RUN_ID, 10)
    assert made.path.parent == roomy
    assert f"{tmp_path / 'missing'}: No such file or directory" in caplog.text
    made.remove()
    with pytest.raises(DeliveryError, match=r"no room to publish 8796093022207 MiB"):
        SharedSegment.create(RUN_ID, 2**63 - 2**20)
    assert list(roomy.iterdir()) == []


def test_sweep_removes_what_the_dead_left_and_nothing_else(segment: SharedSegment):
    script = (
        "import sys; from headrace.delivery.transports.segments import SharedSegment\n"
        f"print(SharedSegment.create({RUN_ID!r}, 100).path, flush=True); sys.stdin.read()"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
    )
    assert owner.stdout is not None
    path = Path(owner.stdout.readline().strip())
    unrelated = path.with_name("headrace-notes")
    unrelated.write_text("mine")
    try:
        assert path.name not in sweep()
        assert path.exists()
        owner.kill()
        # Nobody waits for the owner: its pid lives on, and must not count as a life.
        deadline = time.monotonic() + 60
        while _state(owner.pid) != "Z" and time.monotonic() < deadline:
            time.sleep(0.01)
        assert _state(owner.pid) == "Z"
        assert path.exists()
        assert path.name in sweep()
        assert not path.exists()
        assert segment.path.exists()
        assert unrelated.exists()
    finally:
        unrelated.unlink()
        owner.kill()
        owner.communicate(timeout=60)


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_segment_that_is_swept_before_it_is_locked_is_made_again(monkeypatch, tmp_path):
    monkeypatch.setattr(segments, "segment_directories", lambda: [tmp_path])
    lock, swept = fcntl.flock, []

    def sweep_first(fd: int, operation: int) -> None:
        if not swept:
            swept.extend(path.name for path in tmp_path.iterdir())
            (tmp_path / swept[0]).unlink()
        lock(fd, operation)

    monkeypatch.setattr(segments.fcntl, "flock", sweep_first)
    made = SharedSegment.create(RUN_ID, 10)
    assert [path.name for path in tmp_path.iterdir()] == [made.path.name]
    assert swept and swept != [made.path.name]
    made.remove()


def test_sweep_spares_a_segment_whose_owner_has_another_pid_elsewhere(segment: SharedSegment):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait(60)
    elsewhere = SharedSegment(segment.path.with_name(f"headrace-{RUN_ID}-{dead.pid}-1"), 10)
    assert elsewhere.path.name not in sweep()
    elsewhere.remove()


def test_the_controller_sweeps_without_torch():
    script = (
        "import sys, headrace.delivery.base, headrace.delivery.transports.base\n"
        "from headrace.delivery.transports.segments import sweep; sweep(); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=30, check=False).returncode == 0
