"""The episodes of one group, side by side: the group is complete when every one of them has ended, however it ended.

`run_group` starts its episodes in the order of their index and each submits its first request at once, so the order
in which engines see requests follows from the order of the calls alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from headrace.rollouts.base import AnyEpisode
from headrace.types import Group


async def prepare_group(episodes: Sequence[AnyEpisode]) -> None:
    """Prepare all episodes at the same time; after an error or a cancellation none of them is left open."""
    try:
        async with asyncio.TaskGroup() as tasks:
            for episode in episodes:
                tasks.create_task(episode.prepare(), name=f"prepare {episode.id}")
    except BaseException:
        await discard_group(episodes)
        raise


async def run_group(group: Group, episodes: Sequence[AnyEpisode]) -> Group:
    """The group with the rollouts of these prepared episodes, sorted by index.

    `cancel_group` ends it early with what there is. Cancelling the task that runs it aborts the requests too, but
    then, as for any task, there is no result; `Episode.partial` still holds the tokens. (A task cancelled before
    its first step never runs at all: `discard_group` closes the episodes of such a one.)
    """
    async with asyncio.TaskGroup() as tasks:
        running = [
            tasks.create_task(episode.run(), name=f"rollout {episode.id}")
            for episode in sorted(episodes, key=lambda episode: episode.index)
        ]
    return msgspec.structs.replace(group, rollouts=[task.result() for task in running])


async def cancel_group(episodes: Sequence[AnyEpisode], reason: str) -> None:
    """End these episodes now: `run_group` then returns their rollouts, aborted, with their partial tokens."""
    async with asyncio.TaskGroup() as tasks:
        for episode in episodes:
            tasks.create_task(episode.cancel(reason), name=f"cancel {episode.id}")


async def discard_group(episodes: Sequence[AnyEpisode]) -> None:
    """Close episodes that will not be run (any more). Idempotent."""
    for episode in episodes:
        await episode.discard()
