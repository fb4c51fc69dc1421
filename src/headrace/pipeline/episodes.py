"""From a prompt to an episode that can be run, with one task, chat format and pool for training and held-out prompts.

A rollout's seed follows from (run seed, group, index) alone, so that the same attempt samples the same noise wherever
and whenever it runs.
"""

from __future__ import annotations

from headrace.engines.base import Sampling
from headrace.pipeline.parts import Parts
from headrace.rollouts.base import AnyEpisode, derive_seed
from headrace.rollouts.turns import Episode
from headrace.types import Group, Prompt

HELDOUT_PRIORITY = 1
"""Behind training: an evaluation beside it fills gaps and never holds it up."""


class Episodes:
    """Makes episodes as the configuration says."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._config = parts.config
        self._stop_tokens = tuple(parts.chat.token_id(token) for token in parts.config.rollouts.stop)

    def of_group(self, group: Group) -> list[AnyEpisode]:
        """The rollouts-to-be of a group."""
        name = str(group.id)
        return [
            self._make(f"{name}/{index}", index, group.prompt, name, self._config.rollouts.temperature, 0, record=True)
            for index in range(self._config.rollouts.group_size)
        ]

    def heldout(self, prompt: Prompt, sample: int, version: int) -> AnyEpisode:
        """One answer to a held-out prompt."""
        name = f"heldout-{version}/{prompt.id}"
        return self._make(f"{name}/{sample}", sample, prompt, name, self._config.evaluate.temperature, HELDOUT_PRIORITY)

    def _make(
        self,
        id: str,
        index: int,
        prompt: Prompt,
        group: str,
        temperature: float,
        priority: int,
        *,
        record: bool = False,
    ) -> AnyEpisode:
        rollouts = self._config.rollouts
        sampling = Sampling(
            max_tokens=rollouts.max_tokens,
            temperature=temperature,
            top_k=rollouts.top_k,
            top_p=rollouts.top_p,
            min_p=rollouts.min_p,
            record_kept=record and rollouts.truncates,
            seed=derive_seed(self._config.run.seed, group, index),
            stop_token_ids=self._stop_tokens,
        )
        if self._parts.agents is not None:
            return self._parts.agents.episode(
                id=id, index=index, prompt=prompt, sampling=sampling, group=group, priority=priority
            )
        return Episode(
            id=id,
            index=index,
            prompt=prompt,
            environment=self._parts.task.episode(prompt),
            chat=self._parts.chat,
            engine=self._parts.pool,
            sampling=sampling,
            max_turns=rollouts.max_turns,
            group=group,
            priority=priority,
        )
