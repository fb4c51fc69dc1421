"""`headrace bench journal`: measures what the journal costs a run, and how long it takes to use a large one.

The cost is measured in one real run. Versions are divided into blocks, and the blocks into pairs: the journal is off in
one block of a pair and on in the other. Off means that events stay in memory: no row, no token and no partial answer is
written. The events are written after the block, in versions that are not counted, so the journal is complete at the
end, and its ledgers balance.

With `--rollouts`, the journal of a run that was killed after many rollouts is written instead, with the real writer,
and opened, resumed and queried.
"""

import math
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from headrace.bench.options import JournalBench, Say, Timed
from headrace.bench.workload import tiny_config, write_model
from headrace.buffer.journal import Event, Journal, Queued, open_readonly
from headrace.config import Config, make_config
from headrace.observe.progress import NoProgress
from headrace.observe.records import DeliveryRecord, StepRecord
from headrace.pipeline.batches import recorded_batches
from headrace.pipeline.inputs import check_inputs
from headrace.pipeline.run_session import RunSession
from headrace.review.summary import read_ledgers
from headrace.run_dir import RunDir
from headrace.types import NO_VERSION, Group, Prompt, Rollout, Trace, Version

WARM_VERSIONS = 4
"""The number of first versions that are not counted."""
SETTLE_VERSIONS = 2
"""The number of versions before every block that are not counted. In these versions, events of the block before are
written, both those kept in memory and those still queued."""
DEPTH = 2
PROMPT, ANSWER = 16, 32
STUDENT_T = (
    *(12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281),
    *(2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860),
)
"""Student's t for a confidence of 95%, by degrees of freedom from 1 on. The last value is used beyond."""
LIMIT = 0.05
"""The largest share of the rate that the journal may cost, at the upper end of the confidence interval."""
GROUP_SIZE, GROUPS = 8, 16
PROMPT_TOKENS, ANSWER_TOKENS = 16, 48
PROMPTS = 4096
LEFT_GROUPS = 2 * GROUPS
"""The groups in flight when the run died: half of them complete, a quarter being sampled, a quarter just begun."""
STEPS_AFTER_CHECKPOINT = 10
SHOWN = 20
WHERE = "reward >= 1 AND newest_version > oldest_version"


class Block(NamedTuple):
    """The optimizer steps first < step <= last, with the journal on or off."""

    on: bool
    first: int
    last: int


def plan_blocks(pairs: int, versions: int) -> list[Block]:
    """Return pairs of blocks of `versions` versions each.

    The order of on and off changes from pair to pair, so that a slow drift of the machine's speed cancels out.
    """
    blocks, step = [], WARM_VERSIONS
    for pair in range(pairs):
        for on in (False, True) if pair % 2 == 0 else (True, False):
            step += SETTLE_VERSIONS
            blocks.append(Block(on, step, step + versions))
            step += versions
    return blocks


class BlockJournal(Journal):
    """A journal that is off in some blocks, and records when each step ended."""

    def __init__(self, path: Path, blocks: Sequence[Block], *, keep_rollouts: bool = True) -> None:
        self._held: list[Queued] | None = None
        self._blocks = blocks
        self._ended: dict[int, tuple[float, int]] = {}
        super().__init__(path, keep_rollouts=keep_rollouts)

    def put(self, event: Event, done: Future[Any] | None = None, *, durable: bool = False) -> None:
        """Queue an event, or keep it in memory if the journal is off and no code waits for the event's result."""
        if self._held is None or (done is not None and not durable):
            super().put(event, done, durable=durable)
        else:
            self._held.append((event, done, durable))

    def let_go(self) -> None:
        """Write the kept events in order, and keep no new ones. Call this in the thread that calls `put`."""
        held, self._held = self._held or [], None
        for event, done, durable in held:
            super().put(event, done, durable=durable)

    def close(self) -> None:
        """Write all events, and close the journal."""
        self.let_go()
        super().close()

    def step(self, step: StepRecord, *facts: Any, **named: Any) -> Future[None]:
        """Record an optimizer step. If a block begins or ends with this step, switch the journal."""
        done = super().step(step, *facts, **named)
        self._ended[step.step] = (time.monotonic(), step.trained_tokens)
        for block in self._blocks:
            if step.step == block.first and not block.on and self._held is None:
                self._held = []
            if step.step == block.last:
                self.let_go()
        return done

    def rates(self) -> dict[str, list[float]]:
        """Return the consumed tokens per second of each block, in order, by `off` and `on`."""
        found: dict[str, list[float]] = {"off": [], "on": []}
        for block in self._blocks:
            tokens = sum(self._ended[step][1] for step in range(block.first + 1, block.last + 1))
            seconds = self._ended[block.last][0] - self._ended[block.first][0]
            found["on" if block.on else "off"].append(tokens / seconds)
        return found


def bench_journal(options: JournalBench, say: Say) -> dict[str, Any]:
    """Measure and return all figures. `say` gets a line before each part."""
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as scratch:
        if options.rollouts:
            return bench_size(Path(scratch), options.rollouts, say)
        return bench_overhead(Path(scratch), options.pairs, options.versions, say)


def bench_overhead(directory: Path, pairs: int, versions: int, say: Say) -> dict[str, Any]:
    """Make one run with this many pairs of blocks, of `versions` versions each, and return the figures."""
    blocks = plan_blocks(pairs, versions)
    total = blocks[-1].last + DEPTH + 1  # beside the last versions nothing is generated
    made: list[BlockJournal] = []

    def journal(path: Path, *, keep_rollouts: bool) -> Journal:
        made.append(BlockJournal(path, blocks, keep_rollouts=keep_rollouts))
        return made[-1]

    write_model(directory / "model")
    given: dict[str, Any] = {"prompt": PROMPT, "answer": ANSWER, "threads": 1, "versions": total, "depth": DEPTH}
    config = tiny_config(directory, "run", **given, observe={"keep_rollouts": True})
    say(f"{total} versions in {2 * pairs} blocks of {versions}")
    run_dir = RunDir.create(config)
    task, chat = check_inputs(config)
    RunSession(config, run_dir, NoProgress(), task, chat, journal=journal).execute()
    balanced = read_ledgers(run_dir.path)["balanced"]
    rates = made[0].rates()
    for pair, (off, on) in enumerate(zip(rates["off"], rates["on"], strict=True), start=1):
        say(f"pair {pair}: {off:.0f} tokens/s without, {on:.0f} with, loss {1 - on / off:+.1%}")
    measured = interval(rates["off"], rates["on"])
    return {"pairs": pairs, "versions": versions, **rates, **measured, "limit": LIMIT, "balanced": balanced}


def interval(off: Sequence[float], on: Sequence[float]) -> dict[str, float]:
    """Return the mean relative loss of the pairs, and the ends of its confidence interval by Student's t.

    `within_limit` says whether the upper end is at most `LIMIT`.
    """
    losses = [1 - with_it / without for without, with_it in zip(off, on, strict=True)]
    mean = statistics.fmean(losses)
    half = STUDENT_T[min(len(losses) - 1, len(STUDENT_T)) - 1] * statistics.stdev(losses) / math.sqrt(len(losses))
    found = {"loss_mean": mean, "loss_low": mean - half, "loss_high": mean + half}
    return found | {"within_limit": mean + half <= LIMIT}


def bench_size(directory: Path, rollouts: int, say: Say) -> dict[str, Any]:
    """Write a journal of this many rollouts, then time how long it takes to open, resume, count and query it."""
    path = directory / "journal.db"
    say(f"writing {rollouts:,} rollouts")
    with Timed() as writing:
        steps = write_run(path, rollouts)
    say(f"written in {writing.seconds:.0f} s; opening, resuming, counting, querying")
    opening, recovering, training, ledger, query = (Timed() for _ in range(5))
    with opening:
        journal = Journal(path)
    checkpoint = max(0, steps - STEPS_AFTER_CHECKPOINT)
    with journal:
        with recovering:
            found = journal.recover(step=checkpoint, outcomes=False)
        with training:
            again = sum(1 for _ in recorded_batches(_config(), path, checkpoint, found.resume_step))
    with ledger:
        ledgers = read_ledgers(directory)
    with query, open_readonly(path) as reader:
        matched, shown = reader.count_rollouts(WHERE), list(reader.rollout_records(WHERE, limit=SHOWN))
    parts = {"open": [opening], "recover": [recovering], "resume": [opening, recovering, training]}
    parts |= {"ledger": [ledger], "query": [query]}
    return {
        "rollouts": rollouts,
        "steps": steps,
        "written_seconds": writing.seconds,
        "database_bytes": path.stat().st_size,
        "segment_bytes": sum(file.stat().st_size for file in (directory / "segments").iterdir()),
        "steps_again": again,
        "groups_left": len(found.unfinished),
        "balanced": ledgers["balanced"],
        "counted": ledgers["rollouts"]["admitted"],
        "matched": matched,
        "shown": len(shown),
        "seconds": {name: sum(part.seconds for part in spent) for name, spent in parts.items()},
        "cpu_seconds": {name: sum(part.cpu_seconds for part in spent) for name, spent in parts.items()},
    }


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
                _sample(journal, group_id, version=max(0, step - 2))
            _train(journal, step, groups)
        first = steps * GROUPS
        for group_id in range(first, first + LEFT_GROUPS):
            done = group_id < first + LEFT_GROUPS // 2
            begun = group_id >= first + 3 * LEFT_GROUPS // 4
            _sample(journal, group_id, version=steps, part=1.0 if done else 0.0 if begun else 0.5)
    return steps


def _sample(journal: Journal, group_id: int, version: int, part: float = 1.0) -> None:
    """Admit a group, and record its answers up to this part."""
    ids = [f"{group_id}/{index}" for index in range(GROUP_SIZE)]
    journal.admitted(Group(id=group_id, prompt=Prompt(id=str(group_id % PROMPTS)), version=version), ids)
    for index, rollout_id in enumerate(ids if part else []):
        tokens = PROMPT_TOKENS + round(part * ANSWER_TOKENS)
        trained = np.arange(tokens) >= PROMPT_TOKENS
        versions = np.where(trained, version, NO_VERSION).astype(np.int32)
        # One answer in ten has tokens of two versions, and half of the answers are right.
        if part == 1 and (group_id + index) % 10 == 0:
            versions[-tokens // 4 :] += 1
        trace = Trace(
            token_ids=np.arange(tokens, dtype=np.int32),
            trained=trained,
            logprobs=np.where(trained, -0.5, 0.0).astype(np.float32),
            versions=versions,
        )
        if part < 1:
            journal.partial(Rollout(id=rollout_id, index=index, traces=[trace], ending="aborted"))
        else:
            reward = float(index % 2)
            journal.rollout_ended(Rollout(id=rollout_id, index=index, traces=[trace], ending="finished", reward=reward))


def _train(journal: Journal, step: int, groups: range) -> None:
    for group_id in groups:
        journal.group_ended(group_id, "trained", step=step)
    trained = len(groups) * GROUP_SIZE
    journal.step(
        StepRecord(
            step=step,
            version=step - 1,
            objective="policy",
            groups=len(groups),
            rollouts=trained,
            tokens=trained * (PROMPT_TOKENS + ANSWER_TOKENS),
            trained_tokens=trained * ANSWER_TOKENS,
        ),
        {1: trained * ANSWER_TOKENS},
    )
    journal.version(Version(id=step, parent=step - 1, step=step, digest=step))
    journal.delivery(DeliveryRecord(version=step, engine="engine-0", accepted=True, time=step / 2))
    for process in ("engine-0", "trainer-0"):
        journal.activity(process=process, started=step / 2, ended=step / 2 + 0.5, busy_seconds=0.4)


def _config() -> Config:
    return make_config(
        {
            "model": {"path": "-"},
            "task": {"kind": "gym", "name": "-"},
            "rollouts": {"group_size": GROUP_SIZE, "max_tokens": ANSWER_TOKENS},
            "buffer": {"groups": GROUPS},
        }
    )
