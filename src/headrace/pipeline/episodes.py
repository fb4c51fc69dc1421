"""This module makes episodes from prompts. Training and held-out prompts share one task, one chat format and one pool.

The seed of a rollout depends only on (run seed, group, index), so the same attempt samples the same noise wherever and
whenever it runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec

from headrace.engines.base import Sampling
from headrace.pipeline.parts import Parts
from headrace.rollouts.base import AnyEpisode, EpisodePlan, derive_seed
from headrace.rollouts.turns import Episode, Equipment
from headrace.tasks.base import Budgeted
from headrace.types import Group, Prompt, Trace

HELDOUT_PRIORITY = 1
"""Held-out requests come after training requests: an evaluation fills gaps and never delays training."""


class Episodes:
    """The maker of episodes, as the configuration describes them."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._config = parts.config
        self._equipment = Equipment(parts.pool, parts.chat, parts.scoring)
        self._stop_tokens = tuple(parts.chat.token_id(token) for token in parts.config.rollouts.stop)

    def of_group(self, group: Group, prefixes: Mapping[int, Trace] | None = None) -> list[AnyEpisode]:
        """Make the episodes of a group.

        An episode with a prefix, by index, continues from the tokens of an earlier attempt.
        """
        indices = range(self._config.rollouts.group_size)
        return [self._make(self._plan(group, index, prefix=(prefixes or {}).get(index))) for index in indices]

    def resumed(self, group: Group, members: Sequence[str], saved: Mapping[str, Sequence[Trace]]) -> list[AnyEpisode]:
        """Make the episodes that continue a group of a previous process. `saved` maps a rollout to its saved traces."""
        indices = {member: int(member.rpartition("/")[2]) for member in members}
        return [self._make(self._plan(group, index, saved=saved.get(member, ()))) for member, index in indices.items()]

    def heldout(self, prompt: Prompt, sample: int, version: int) -> AnyEpisode:
        """Make the episode for one answer to a held-out prompt."""
        name = f"heldout-{version}/{prompt.id}"
        return self._make(
            EpisodePlan(
                id=f"{name}/{sample}",
                index=sample,
                prompt=prompt,
                sampling=self._sampling(name, sample, self._config.evaluate.temperature),
                group=name,
                priority=HELDOUT_PRIORITY,
                max_turns=self._config.rollouts.max_turns,
            )
        )

    def _plan(
        self, group: Group, index: int, *, prefix: Trace | None = None, saved: Sequence[Trace] = ()
    ) -> EpisodePlan:
        rollouts = self._config.rollouts
        sampling = self._sampling(str(group.id), index, rollouts.temperature)
        return EpisodePlan(
            id=f"{group.id}/{index}",
            index=index,
            prompt=group.prompt,
            sampling=msgspec.structs.replace(sampling, record_kept=rollouts.truncates),
            group=str(group.id),
            max_turns=rollouts.max_turns,
            keep_routing=rollouts.keep_routing,
            prefix=prefix,
            saved=saved,
        )

    def _sampling(self, group: str, index: int, temperature: float) -> Sampling:
        rollouts = self._config.rollouts
        return Sampling(
            max_tokens=rollouts.max_tokens,
            temperature=temperature,
            top_k=rollouts.top_k,
            top_p=rollouts.top_p,
            min_p=rollouts.min_p,
            seed=derive_seed(self._config.run.seed, group, index),
            stop_token_ids=self._stop_tokens,
        )

    def _make(self, plan: EpisodePlan) -> AnyEpisode:
        if self._parts.agents is not None:
            return self._parts.agents(plan, self._parts.scoring)
        environment = self._parts.task.episode(plan.prompt)
        if isinstance(environment, Budgeted):
            own = min(environment.max_tokens, plan.sampling.max_tokens)
            plan = replace(plan, sampling=msgspec.structs.replace(plan.sampling, max_tokens=own))
        return Episode(plan, environment, self._equipment)
