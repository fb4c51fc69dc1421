"""The attempts (one group each): which attempt is next, which can no longer be trained, and how each one ends.

Every attempt that was started either reaches the window exactly once, as a complete group, or leaves it exactly once,
with a reason in the ledger.

    next ─▶ started ─▶ (sweep: too old, surplus) ─▶ ended ─▶ the window (◀─ taken up from a previous process)
      ▲                                               │
      └──────────── salvaged tokens, rewards ◀────────┘

Each token of a running rollout is journalled once, a fraction of a second after its sampling (`save`). A run that dies
loses no more than the tokens of that time, and the resumed run continues from the saved tokens.
"""

import asyncio
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from headrace.buffer.filters import Filter, filter_group, prefix_of
from headrace.buffer.window import Window
from headrace.errors import HeadraceError
from headrace.gateway.base import GATEWAY_DIED
from headrace.pipeline.recording import Recorder
from headrace.rollouts.base import TOO_LONG, AnyEpisode
from headrace.rollouts.groups import cancel_group
from headrace.tasks.source import Source
from headrace.types import NO_VERSION, Group, Prompt, Trace

FAILED_IN_A_ROW = 20
FILTERED_IN_A_ROW = 1000
STALE, SURPLUS, INTERRUPTED = "stale", "surplus", "interrupted"


class Attempt(NamedTuple):
    """The start of a group: its prompt, and the tokens that its rollouts continue from."""

    prompt: Prompt
    prefixes: Mapping[int, Trace] = {}
    """The tokens of an earlier attempt that each rollout continues from, by rollout index. They are not trained."""


class Attempts:
    """The groups between their admission and the time when they enter or leave the window."""

    def __init__(self, source: Source, window: Window, recorder: Recorder, filters: list[Filter]) -> None:
        self._source = source
        self._window = window
        self._recorder = recorder
        self._filters = filters
        self.running: dict[int, list[AnyEpisode]] = {}
        self._doomed: dict[int, str] = {}
        """The groups that were told to end, and why, by group id."""
        self._closed = ""
        """The reason why no group is wanted any more; empty while groups are wanted."""
        self._salvaged: deque[Attempt] = deque()
        self._failed_in_a_row = 0
        self._filtered_in_a_row = 0
        self._swept_version = -1
        self._tasks: asyncio.TaskGroup | None = None
        self._saved: dict[str, int] = {}
        """The number of tokens in the journal, by id of each running rollout."""
        self._resumed: set[str] = set()
        """The rollouts that continue from tokens of a previous process and have not discarded any of those tokens."""

    def run_in(self, tasks: asyncio.TaskGroup) -> None:
        """Set the task group in which groups are cancelled."""
        self._tasks = tasks

    def next(self, group_id: int) -> Attempt:
        """Return the next attempt. Salvaged attempts come before prompts that have not been tried yet."""
        return self._salvaged.popleft() if self._salvaged else Attempt(self._source.draw(group_id))

    def try_again(self, prompt: Prompt) -> None:
        """Let a prompt begin again, from its first token, before prompts that have not been tried yet."""
        self._salvaged.append(Attempt(prompt))

    def started(self, group: Group, episodes: list[AnyEpisode]) -> None:
        """Record that an attempt is under way. Traces of a previous process are in the journal already."""
        self.running[group.id] = episodes
        for episode in episodes:
            if episode.plan.saved:
                self._saved[episode.id] = sum(len(trace) for trace in episode.plan.saved)
                self._resumed.add(episode.id)

    def save(self) -> None:
        """Journal the new tokens of all running rollouts."""
        for episodes in self.running.values():
            for episode in episodes:
                self._note_discarded(episode)
                known = self._saved.get(episode.id, 0)
                if (tokens := episode.since(known)) is not None:
                    self._recorder.sampled(episode.id, episode.index, tokens)
                    self._saved[episode.id] = known + len(tokens)

    def _note_discarded(self, episode: AnyEpisode) -> None:
        """Record, once, that tokens of a previous process cannot be used: the rollout begins again."""
        if episode.discarded and episode.id in self._resumed:
            self._resumed.discard(episode.id)
            self._saved[episode.id] = 0
            self._recorder.discarded(episode.id, episode.discarded)

    def sweep(self) -> None:
        """End the groups that can no longer be trained: those over `max_lag`, and surplus groups of oversampling."""
        for group in self._window.stale():
            self._drop(group, STALE)
            if self._window.on_stale == "wait":
                # The group comes from a previous process that had another bound.
                self.try_again(group.prompt)
        ready = {group.id: group for group in self._window.ready_groups()}
        for group_id in self._window.surplus():
            if group_id in ready:
                self._drop(ready[group_id], SURPLUS)
            else:
                self._cancel(group_id, SURPLUS)
        if self._swept_version != self._window.trained_version:
            # Future tokens will be newer, so a running group can become late only when the trained version changes.
            self._swept_version = self._window.trained_version
            for group_id in [id for id, episodes in self.running.items() if self._late(episodes)]:
                self._cancel(group_id, STALE)

    def ended(self, group: Group) -> None:
        """Record and judge an attempt whose rollouts have all ended and are scored."""
        for episode in self.running.pop(group.id):
            self._note_discarded(episode)
            self._saved.pop(episode.id, None)
            self._resumed.discard(episode.id)
        self._recorder.rollouts_ended(group)
        self.settle(group)

    def close(self, reason: str) -> None:
        """Declare that no group is wanted any more: groups under way end as dropped. The first reason counts."""
        self._closed = self._closed or reason

    async def cancel_running(self) -> None:
        """End all attempts that are under way. Call `close` first."""
        for episodes in list(self.running.values()):
            await cancel_group(episodes, self._closed)

    def drop_ready(self) -> None:
        """Drop the complete groups that no batch will take. Call `close` first."""
        for group in self._window.ready_groups():
            self._drop(group, self._closed)

    def settle(self, group: Group) -> None:
        """Judge an attempt whose rollouts have all ended and are in the journal."""
        why = self._doomed.pop(group.id, "") or self._closed
        # A stale group that ended by itself, before the cancellation reached it, is judged like any other group.
        # A group that no batch needs is dropped even then.
        if why and (why != STALE or any(rollout.ending == "aborted" for rollout in group.rollouts)):
            if why == STALE and self._window.on_stale == "salvage":
                prefixes = {r.index: prefix for r in group.rollouts if (prefix := prefix_of(r)) is not None}
                self._salvaged.append(Attempt(group.prompt, prefixes))
            self._drop(group, why)
        else:
            self._judge(group)

    def _judge(self, group: Group) -> None:
        self._source.outcome(group.id, group.prompt.id, [r.reward for r in group.usable if r.reward is not None])
        filtered = filter_group(group, self._filters)
        if filtered.reason:
            self._window.filter(group.id)
            self._recorder.group_ended(group, "dropped", filtered.reason)
            self._filtered_in_a_row += 1
            if self._filtered_in_a_row >= max(FILTERED_IN_A_ROW, 10 * self._window.capacity):
                raise HeadraceError(
                    f"the last {self._filtered_in_a_row} groups were all filtered, the last one as {filtered.reason}: "
                    "there is nothing left to train on ([buffer] filter)"
                )
        elif len(filtered.group.usable) < min(2, len(group.rollouts)):
            self._fail(group)
        else:
            self._recorder.rollouts_left(filtered.removed)
            self._failed_in_a_row = self._filtered_in_a_row = 0
            self._window.complete(filtered.group)

    def _fail(self, group: Group) -> None:
        reason = next(rollout.reason for rollout in group.rollouts if rollout.ending in ("failed", "aborted"))
        self._window.fail(group.id)
        self._recorder.group_ended(group, "failed", reason)
        if reason.startswith(TOO_LONG):
            self._source.leave_out(group.prompt.id)
            return
        if any(rollout.reason.startswith(GATEWAY_DIED) for rollout in group.rollouts):
            return  # Supervision limits these deaths. One of them fails all groups that are under way.
        self._failed_in_a_row += 1
        # A failed group is replaced by another. If all groups fail, this would go on for ever.
        if self._failed_in_a_row >= max(FAILED_IN_A_ROW, 2 * self._window.capacity):
            raise HeadraceError(f"the last {self._failed_in_a_row} groups all failed, the last one because: {reason}")

    def _drop(self, group: Group, reason: str) -> None:
        self._window.drop(group.id)
        self._recorder.group_ended(group, "dropped", reason)

    def _late(self, episodes: list[AnyEpisode]) -> bool:
        if self._window.on_stale == "wait" or self._window.max_lag is None:
            return False
        found = {trace.oldest_version for episode in episodes for trace in episode.traces} - {NO_VERSION}
        return bool(found) and self._window.late(min(found))

    def _cancel(self, group_id: int, reason: str) -> None:
        if group_id not in self._doomed:
            self._doomed[group_id] = reason
            assert self._tasks is not None
            self._tasks.create_task(cancel_group(self.running[group_id], reason), name=f"cancel group {group_id}")
