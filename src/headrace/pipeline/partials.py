"""This module saves the tokens of running rollouts.

Each token is journalled once, a fraction of a second after its sampling. A run that dies loses no more than the tokens
of that time, and the resumed run continues from the saved tokens.
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
    """The record of how many tokens of each running rollout are in the journal."""

    def __init__(self, attempts: Attempts, recorder: Recorder) -> None:
        self._attempts = attempts
        self._recorder = recorder
        self._saved: dict[str, int] = {}
        """The number of tokens in the journal, by id of each running rollout."""
        self._resumed: set[str] = set()
        """The rollouts that continue from tokens of a previous process and have not discarded any of those tokens."""

    async def save_loop(self) -> None:
        """Journal the new tokens of all running rollouts, again and again, until cancelled."""
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
        """Record that these traces, by rollout, are in the journal since a previous process.

        An episode that cannot continue from its traces reports their tokens in `discarded`.
        """
        for rollout, traces in partial.items():
            self._saved[rollout] = sum(len(trace) for trace in traces)
            self._resumed.add(rollout)

    def _discarded(self, episode: AnyEpisode) -> None:
        """Record, once, that tokens of a previous process cannot be used: the rollout begins again."""
        if episode.discarded and episode.id in self._resumed:
            self._resumed.discard(episode.id)
            self._saved[episode.id] = 0
            self._recorder.discarded(episode.id, episode.discarded)

    def ended(self, episodes: Sequence[AnyEpisode]) -> None:
        """Forget these rollouts: they have ended and are journalled as a whole."""
        for episode in episodes:
            self._discarded(episode)
            self._saved.pop(episode.id, None)
            self._resumed.discard(episode.id)
