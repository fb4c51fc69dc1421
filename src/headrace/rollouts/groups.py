"""The episodes of one group run side by side: each is run and then scored, and never waits for the others.

The group is complete when every episode has ended, however it ended. A group may close without its stragglers: they are
cancelled and end as aborted.

`run_group` starts the episodes in the order of their index, and each submits its first request at once. So the order in
which engines see requests depends only on the order of the calls.
"""

import asyncio
import math
from collections.abc import Sequence

import msgspec

from headrace.errors import one_line
from headrace.rollouts.base import AnyEpisode, Cancelled
from headrace.scoring.base import Ended, Stage
from headrace.types import Group, Rollout

STRAGGLER = "straggler"
"""The reason of a rollout that was cut off because its group closed without it."""


async def prepare_group(episodes: Sequence[AnyEpisode]) -> None:
    """Prepare all episodes at the same time. After an error or a cancellation, none of them is left open."""
    prepared = False
    try:
        async with asyncio.TaskGroup() as tasks:
            for episode in episodes:
                tasks.create_task(episode.prepare(), name=f"prepare {episode.id}")
        prepared = True
    finally:
        if not prepared:
            await asyncio.gather(*(episode.discard() for episode in episodes))


async def run_group(
    group: Group,
    episodes: Sequence[AnyEpisode],
    scoring: Stage,
    *,
    min_group: int | None = None,
    straggler_seconds: float = math.inf,
) -> Group:
    """Run and score these prepared episodes. Return the group with their rollouts, sorted by index.

    When `straggler_seconds` have passed and `min_group` episodes have ended without failing, the others are cancelled.

    `cancel_group` ends the group early and returns the tokens so far. Cancelling the task of this coroutine aborts the
    requests too, but returns nothing: `Episode.traces` still holds the tokens. If that task is cancelled before its
    first step, this code never runs: call `discard` to close each of its episodes.
    """
    async with asyncio.TaskGroup() as tasks:
        running = [
            tasks.create_task(run_episode(episode, scoring), name=f"rollout {episode.id}")
            for episode in sorted(episodes, key=lambda episode: episode.index)
        ]
        if min_group is not None and min_group < len(episodes):
            await _close_early(episodes, running, min_group, straggler_seconds)
    return msgspec.structs.replace(group, rollouts=[_with_short_reason(task.result()) for task in running])


def _with_short_reason(rollout: Rollout) -> Rollout:
    """Return the rollout with its reason as one short line: foreign code may have written the reason."""
    reason = one_line(rollout.reason)
    return rollout if reason == rollout.reason else msgspec.structs.replace(rollout, reason=reason)


async def run_episode(episode: AnyEpisode, scoring: Stage, *, heldout: bool = False) -> Rollout:
    """Run a prepared episode to its end, and score its rollout. `heldout` says that its prompt is a held-out one.

    An episode that is told to end while its rollout is being scored ends as aborted, without a score.
    """
    try:
        rollout = await episode.run()
        if rollout.ending not in ("finished", "truncated"):
            return rollout
        return await episode.interruptible(scoring.score(Ended(episode.prompt, rollout, episode.turns, heldout)))
    except Cancelled:
        return msgspec.structs.replace(
            rollout, ending="aborted", reward=None, reason=episode.cancelled or "", scores=[]
        )
    finally:
        scoring.forget(episode.id)


async def _close_early(
    episodes: Sequence[AnyEpisode], running: Sequence[asyncio.Task[Rollout]], min_group: int, seconds: float
) -> None:
    """Wait until all episodes have ended, or until enough have ended and the time is over; then cancel the others.

    Every wait here ends, because every episode ends.
    """
    _, pending = await asyncio.wait(running, timeout=seconds)
    while pending and sum(_ended_well(task) for task in running) < min_group:
        _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
    stragglers = [e for e in episodes if any(task.get_name() == f"rollout {e.id}" for task in pending)]
    await cancel_group(stragglers, STRAGGLER)


def _ended_well(task: asyncio.Task[Rollout]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None and task.result().ending != "failed"


async def cancel_group(episodes: Sequence[AnyEpisode], reason: str) -> None:
    """End these episodes now. `run_group` then returns their rollouts as aborted, with their partial tokens."""
    async with asyncio.TaskGroup() as tasks:
        for episode in episodes:
            tasks.create_task(episode.cancel(reason), name=f"cancel {episode.id}")
