"""The tokens of rollouts that go on: every one is journalled once, within a moment of its sampling.

A run that dies loses no more than that moment; its next life goes on from what is here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from headrace.pipeline.attempts import Attempts
from headrace.pipeline.recording import Recorder
from headrace.rollouts.base import AnyEpisode
from headrace.types import Trace

SAVE_SECONDS = 0.2


class Partials:
    """How many tokens of each running rollout are in the journal."""

    def __init__(self, attempts: Attempts, recorder: Recorder) -> None:
        self._attempts = attempts
        self._recorder = recorder
        self._saved: dict[str, int] = {}
        """Rollout -> tokens, while it goes on."""
        self._resumed: set[str] = set()
        """Rollouts that go on from tokens of a previous process, as long as none of those were of no use."""

    async def save_loop(self) -> None:
        """Write down the new tokens of what is being sampled, until it is cancelled."""
        while True:
            await asyncio.sleep(SAVE_SECONDS)
            for episodes in self._attempts.running.values():
                for episode in episodes:
                    self._discarded(episode)
                    known = self._saved.get(episode.id, 0)
                    if (tokens := episode.since(known)) is not None:
                        self._recorder.sampled(episode.id, episode.index, tokens)
                        self._saved[episode.id] = known + len(tokens)

    def resumed(self, partial: Mapping[str, Sequence[Trace]]) -> None:
        """These traces, by rollout, are in the journal since a previous process.

        An episode that cannot go on from its traces says so by `discarded`.
        """
        for rollout, traces in partial.items():
            self._saved[rollout] = sum(len(trace) for trace in traces)
            self._resumed.add(rollout)

    def _discarded(self, episode: AnyEpisode) -> None:
        """Note that tokens of a previous process are of no use, once: the rollout begins again."""
        if episode.discarded and episode.id in self._resumed:
            self._resumed.discard(episode.id)
            self._saved[episode.id] = 0
            self._recorder.discarded(episode.id, episode.discarded)

    def ended(self, episodes: Sequence[AnyEpisode]) -> None:
        """These rollouts do not go on; they are journalled whole."""
        for episode in episodes:
            self._discarded(episode)
            self._saved.pop(episode.id, None)
            self._resumed.discard(episode.id)
