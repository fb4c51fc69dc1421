"""Every reader of a run directory gives one line on damaged files, whatever bytes they have."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from recorded_runs import ConstantWeights, RunMaker, trace

from headrace.buffer.journal import Journal
from headrace.buffer.reader import open_readonly
from headrace.buffer.store import check_resumable
from headrace.errors import HeadraceError
from headrace.observe.metrics import reported_step
from headrace.observe.spans import RunClock, Timeline, TimeSpan, timeline_damage
from headrace.pipeline.waits import read_status
from headrace.review.audit import audit
from headrace.review.rollouts import changed_tokenizer, load_chat, shown
from headrace.review.summary import read_ledgers, write_report, write_summary

STATUS = b'{"time":1.0,"pid":1,"phase":"x","still":0.0,"limit":1.0,"waits":[],"processes":{}}'
STEP = b'{"time":1,"kind":"step","step":3,"objective":"policy"}\n'


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = RunMaker(tmp_path_factory.mktemp("runs") / "whole")
    for version in range(4):
        run.version(version)
    run.checkpoint(2)
    for step in range(1, 6):
        run.rollout(trace([(6, -1.0, 2), (7, -1.0, 2)]), step=step)
        run.step(step, step - 1)
    run.rollout(trace([(6, -1.0, 2)]), reason="stale")
    run.rollout(trace([(6, -1.0, 2)]))
    run.journal.meta("tokenizer", "0" * 64)
    path = run.close()
    timeline = Timeline(path / "timeline.json", RunClock(wall=1000.0, monotonic=0.0))
    timeline.add("engine-0", [TimeSpan("decode", float(at), at + 0.5) for at in range(9)])
    timeline.close()
    (path / "metrics.jsonl").write_bytes(STEP * 3)
    (path / "status.json").write_bytes(STATUS)
    return path


def damaged(data: bytes, chance: random.Random) -> bytes:
    at, size = chance.randrange(len(data)), chance.choice([1, 8, 100, 4096])
    noise = chance.randbytes(len(data[at : at + size]))
    return chance.choice([b"", data[:at], data[:at] + noise + data[at + size :], data[:at] + data[at + size :]])


def browse(run_dir: Path) -> None:
    with open_readonly(run_dir / "journal.db") as journal:
        chat = load_chat(run_dir)
        changed_tokenizer(journal, chat)
        list(shown(journal, journal.rollout_records(), chat))


def recover(run_dir: Path) -> None:
    check_resumable(run_dir / "journal.db")
    timeline_damage(run_dir / "timeline.json")
    reported_step(run_dir / "metrics.jsonl")
    with Journal(run_dir / "journal.db") as journal:
        journal.recover(step=2)


READERS: list[Callable[[Path], object]] = [
    write_summary, write_report, read_ledgers, browse, read_status,
    lambda path: audit(path, ConstantWeights, samples=64, seed=0, tolerance=1e-3), recover,
]  # fmt: skip


@pytest.mark.parametrize(
    "name", ["journal.db", "segments/000001.seg", "timeline.json", "metrics.jsonl", "status.json", "config.toml"]
)
def test_a_damaged_file_gives_one_line_in_every_reader(whole: Path, tmp_path: Path, name: str) -> None:
    chance = random.Random(name)
    for number in range(12 if name == "journal.db" else 4):
        run_dir = tmp_path / str(number)
        shutil.copytree(whole, run_dir)
        (run_dir / name).write_bytes(damaged((whole / name).read_bytes(), chance))
        for reader in READERS:
            try:
                reader(run_dir)
            except HeadraceError as error:
                assert "\n" not in str(error) and str(error)
        shutil.rmtree(run_dir)
