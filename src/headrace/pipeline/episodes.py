"""From a prompt to an episode that can be run, with one task, chat format and pool for training and held-out prompts.

A rollout's seed follows from (run seed, group, index) alone, so that the same attempt samples the same noise wherever
and whenever it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import msgspec

from headrace.engines.base import Sampling
from headrace.pipeline.parts import Parts
from headrace.rollouts.base import AnyEpisode, derive_seed
from headrace.rollouts.turns import Episode
from headrace.tasks.base import Budgeted
from headrace.types import Group, Prompt, Trace

HELDOUT_PRIORITY = 1
"""Behind training: an evaluation beside it fills gaps and never holds it up."""


class Episodes:
    """Makes episodes as the configuration says."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._config = parts.config
        self._stop_tokens = tuple(parts.chat.token_id(token) for token in parts.config.rollouts.stop)

    def of_group(self, group: Group, prefixes: Mapping[int, Trace] | None = None) -> list[AnyEpisode]:
        """The rollouts-to-be of a group; those with a prefix, by index, go on from an earlier attempt's tokens."""
        indices = range(self._config.rollouts.group_size)
        return [self._of_group(group, index, prefix=(prefixes or {}).get(index)) for index in indices]

    def resumed(
        self, group: Group, members: Sequence[str], saved: Mapping[str, Trace], on_discard: Callable[[str, int], None]
    ) -> list[AnyEpisode]:
        """The same, continued: by rollout, the tokens that it had. `on_discard` hears of those that are of no use."""
        made = []
        for member in members:
            index, trace = int(member.rpartition("/")[2]), saved.get(member)
            made.append(self._of_group(group, index, saved=trace, on_discard=partial(on_discard, member)))
            if self._parts.agents is not None and trace is not None:
                on_discard(member, trace.trained_tokens)
        return made

    def _of_group(
        self,
        group: Group,
        index: int,
        *,
        prefix: Trace | None = None,
        saved: Trace | None = None,
        on_discard: Callable[[int], None] = lambda tokens: None,
    ) -> AnyEpisode:
        return self._make(
            f"{group.id}/{index}",
            index,
            group.prompt,
            str(group.id),
            self._config.rollouts.temperature,
            0,
            record=True,
            prefix=prefix,
            saved=saved,
            on_discard=on_discard,
        )

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
        prefix: Trace | None = None,
        saved: Trace | None = None,
        on_discard: Callable[[int], None] = lambda tokens: None,
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
        environment = self._parts.task.episode(prompt)
        if isinstance(environment, Budgeted):
            own = min(environment.max_tokens, sampling.max_tokens)
            sampling = msgspec.structs.replace(sampling, max_tokens=own)
        return Episode(
            id=id,
            index=index,
            prompt=prompt,
            environment=environment,
            chat=self._parts.chat,
            engine=self._parts.pool,
            sampling=sampling,
            max_turns=rollouts.max_turns,
            keep_routing=record and rollouts.keep_routing,
            group=group,
            priority=priority,
            prefix=prefix,
            saved=saved,
            on_discard=on_discard,
        )
