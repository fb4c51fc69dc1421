"""Writes a journal of many rollouts with the real writer, and measures how long it takes to open, resume and query it.

The journal is that of an ordinary run that died. It holds steps of one batch each, versions, deliveries, activity of
processes, and groups that were complete, being sampled, or just begun when the run died.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from headrace.buffer.journal import Journal, open_readonly
from headrace.config import Config, make_config
from headrace.pipeline.batches import recorded_batches
from headrace.review.summary import read_ledgers
from headrace.types import NO_VERSION, Group, Prompt, Rollout, Trace, Version

GROUP_SIZE, GROUPS = 8, 16
PROMPT_TOKENS, ANSWER_TOKENS = 16, 48
PROMPTS = 4096
LEFT_GROUPS = 2 * GROUPS
"""The number of groups in flight when the run died: half of them complete, a quarter being sampled, a quarter just
begun."""
STEPS_AFTER_CHECKPOINT = 10
SHOWN = 20
WHERE = "reward >= 1 AND newest_version > oldest_version"


def bench_size(directory: Path, rollouts: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Write a journal of this many rollouts, then time how long it takes to open, resume, count and query it."""
    path = directory / "journal.db"
    say(f"writing {rollouts:,} rollouts")
    started = time.monotonic()
    steps = write_run(path, rollouts)
    written = time.monotonic() - started
    say(f"written in {written:.0f} s; opening, resuming, counting, querying")
    timed: dict[str, Spent] = {}
    with _timed(timed, "open"):
        journal = Journal(path)
    checkpoint = max(0, steps - STEPS_AFTER_CHECKPOINT)
    with journal:
        with _timed(timed, "recover"):
            found = journal.recover(step=checkpoint, outcomes=False)
        with _timed(timed, "train_again"):
            again = sum(1 for _ in recorded_batches(_config(), path, checkpoint, found.resume_step))
    parts = [timed["open"], timed["recover"], timed.pop("train_again")]
    timed["resume"] = Spent(sum(part.seconds for part in parts), sum(part.cpu_seconds for part in parts))
    with _timed(timed, "ledger"):
        ledgers = read_ledgers(directory)
    with _timed(timed, "query"), open_readonly(path) as reader:
        matched, shown = reader.count_rollouts(WHERE), list(reader.rollout_records(WHERE, limit=SHOWN))
    return {
        "rollouts": rollouts,
        "steps": steps,
        "written_seconds": written,
        "database_bytes": path.stat().st_size,
        "segment_bytes": sum(file.stat().st_size for file in (directory / "segments").iterdir()),
        "steps_again": again,
        "groups_left": len(found.unfinished),
        "balanced": ledgers["balanced"],
        "counted": ledgers["rollouts"]["admitted"],
        "matched": matched,
        "shown": len(shown),
        "seconds": {name: spent.seconds for name, spent in timed.items()},
        "cpu_seconds": {name: spent.cpu_seconds for name, spent in timed.items()},
    }


class Spent(NamedTuple):
    """The time that something took: by the clock, and of a core. The latter hardly depends on other work."""

    seconds: float
    cpu_seconds: float


@contextmanager
def _timed(into: dict[str, Spent], name: str) -> Iterator[None]:
    started, cpu = time.monotonic(), time.process_time()
    yield
    into[name] = Spent(time.monotonic() - started, time.process_time() - cpu)


def write_run(path: Path, rollouts: int) -> int:
    """Write the journal of a run that died after it had trained this many rollouts, and return its number of steps.

    The number of rollouts is rounded down to whole batches.
    """
    steps = max(1, rollouts // (GROUPS * GROUP_SIZE))
    with Journal(path) as journal:
        journal.meta("name", "many rollouts")
        journal.version(Version(id=0, parent=NO_VERSION, step=0, digest=0))
        for step in range(1, steps + 1):
            groups = range((step - 1) * GROUPS, step * GROUPS)
            for group_id in groups:
                _admit(journal, group_id, version=max(0, step - 2))
                _complete(journal, group_id, version=max(0, step - 2))
            _train(journal, step, groups)
        _leave(journal, steps)
    return steps


def _admit(journal: Journal, group_id: int, version: int) -> None:
    prompt = Prompt(id=str(group_id % PROMPTS))
    journal.admitted(
        Group(id=group_id, prompt=prompt, version=version), [f"{group_id}/{index}" for index in range(GROUP_SIZE)]
    )


def _complete(journal: Journal, group_id: int, version: int) -> None:
    for index in range(GROUP_SIZE):
        # One answer in ten has tokens of two versions, and half of the answers are right.
        later = (group_id + index) % 10 == 0
        journal.rollout_ended(
            Rollout(
                id=f"{group_id}/{index}",
                index=index,
                traces=[_trace(version, later=later)],
                ending="finished",
                reward=float(index % 2),
            )
        )


def _trace(version: int, *, later: bool, tokens: int = PROMPT_TOKENS + ANSWER_TOKENS) -> Trace:
    trained = np.arange(tokens) >= PROMPT_TOKENS
    versions = np.where(trained, version, NO_VERSION).astype(np.int32)
    if later:
        versions[-tokens // 4 :] += 1
    return Trace(
        token_ids=np.arange(tokens, dtype=np.int32),
        trained=trained,
        logprobs=np.where(trained, -0.5, 0.0).astype(np.float32),
        versions=versions,
    )


def _train(journal: Journal, step: int, groups: range) -> None:
    for group_id in groups:
        journal.group_ended(group_id, "trained", step=step)
    trained = len(groups) * GROUP_SIZE
    journal.step(
        step=step,
        version=step - 1,
        objective="policy",
        groups=len(groups),
        rollouts=trained,
        tokens=trained * (PROMPT_TOKENS + ANSWER_TOKENS),
        trained_tokens=trained * ANSWER_TOKENS,
        lag_histogram={1: trained * ANSWER_TOKENS},
    )
    journal.version(Version(id=step, parent=step - 1, step=step, digest=step))
    journal.delivery(version=step, engine="engine-0", accepted=True)
    for process in ("engine-0", "trainer-0"):
        journal.activity(process=process, started=step / 2, ended=step / 2 + 0.5, busy_seconds=0.4)


def _leave(journal: Journal, steps: int) -> None:
    first = steps * GROUPS
    for group_id in range(first, first + LEFT_GROUPS):
        _admit(journal, group_id, version=steps)
        if group_id < first + LEFT_GROUPS // 2:
            _complete(journal, group_id, version=steps)
        elif group_id < first + 3 * LEFT_GROUPS // 4:
            for index in range(GROUP_SIZE):
                part = _trace(steps, later=False, tokens=PROMPT_TOKENS + ANSWER_TOKENS // 2)
                journal.partial(Rollout(id=f"{group_id}/{index}", index=index, traces=[part], ending="aborted"))


def _config() -> Config:
    """Return the configuration with which the batches of these steps are made."""
    return make_config(
        {
            "model": {"path": "-"},
            "task": {"kind": "gym", "name": "-"},
            "rollouts": {"group_size": GROUP_SIZE, "max_tokens": ANSWER_TOKENS},
            "buffer": {"groups": GROUPS},
        }
    )


def lines(found: dict[str, Any]) -> list[str]:
    """Return the figures as lines of text."""
    database, segments = (found[key] / 2**20 for key in ("database_bytes", "segment_bytes"))

    def row(name: str, what: str) -> str:
        return f"{name:<8}{found['seconds'][name]:7.2f} s, {found['cpu_seconds'][name]:5.2f} s of a core   {what}"

    return [
        f"{found['counted']:,} rollouts in {found['steps']:,} steps: journal.db {database:.0f} MiB, "
        f"segments {segments:.0f} MiB, written in {found['written_seconds']:.0f} s",
        row("open", ""),
        row("resume", f"(open, reopen the books, read {found['steps_again']} batches again)"),
        row("ledger", f"({'balanced' if found['balanced'] else 'NOT balanced'})"),
        row("query", f"({found['matched']:,} match, {found['shown']} read)"),
    ]
