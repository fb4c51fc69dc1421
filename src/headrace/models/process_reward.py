"""A process-reward model: it reads the tokens of many rollouts as they grow, and judges steps of them.

Every token is computed once. The keys and values of a rollout are kept until the rollout is forgotten, so the tokens of
a new step are one short pass, and all rollouts that have grown share that pass without padding. The values are those of
one pass of the Hugging Face model over the whole rollout, up to rounding.

The verdict on a step is the label of a token classifier at the last token of the step, or the next token of a causal
language model.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch

from headrace.config.memory import longest_sequence
from headrace.config.reward_model import RewardVerdict, reward_verdict
from headrace.models.attention import AttentionCall, attending, check_model
from headrace.models.loading import load_model
from headrace.types import Int32Array

CHUNK = 64
"""The room for keys and values of a rollout is a multiple of so many tokens, and is doubled when it is used up."""


@dataclass(frozen=True)
class Growth:
    """Tokens by which a rollout has grown, and the positions at which values are wanted."""

    rollout: str
    start: int
    """The number of tokens of the rollout before these. The model must hold as many."""
    token_ids: Int32Array
    wanted: Sequence[int]
    """Positions among the new tokens, ascending."""


@dataclass
class _Held:
    """The keys and values of one rollout, of each layer, [K, room, D]."""

    length: int = 0
    keys: dict[int, torch.Tensor] = field(default_factory=dict)
    values: dict[int, torch.Tensor] = field(default_factory=dict)


class ProcessRewardModel:
    """A loaded process-reward model and the keys and values of the rollouts that it reads."""

    def __init__(self, model: Any, verdict: RewardVerdict, max_length: int) -> None:
        self.model = model
        self._verdict = verdict
        self._max_length = max_length
        self._device = next(model.parameters()).device
        self._held: dict[str, _Held] = {}
        self.computed = 0
        """The number of tokens that passes have computed."""

    def held(self, rollout: str) -> int:
        """Return the number of tokens of this rollout whose keys and values are kept."""
        return self._held[rollout].length if rollout in self._held else 0

    @property
    def rollouts(self) -> int:
        """The number of rollouts whose keys and values are kept."""
        return len(self._held)

    def forget(self, rollout: str) -> None:
        """Free the keys and values of a rollout. Idempotent."""
        self._held.pop(rollout, None)

    def refusal(self, growth: Growth) -> str:
        """Return why these tokens cannot be read; empty if they can."""
        if growth.start != (held := self.held(growth.rollout)):
            return f"rollout {growth.rollout} continues at token {growth.start}, and {held} tokens of it are known"
        if growth.start + len(growth.token_ids) > self._max_length:
            return f"rollout {growth.rollout} is longer than the {self._max_length} tokens that the reward model reads"
        if not len(growth.token_ids):
            return f"rollout {growth.rollout} has no new tokens"
        vocabulary = self.model.get_input_embeddings().weight.shape[0]
        if growth.token_ids.min() < 0 or growth.token_ids.max() >= vocabulary:
            return f"rollout {growth.rollout} has a token id outside of the reward model's vocabulary of {vocabulary}"
        return ""

    @torch.inference_mode()
    def grow(self, growths: Sequence[Growth]) -> list[list[float]]:
        """Read new tokens of several rollouts in one pass. Return the values at the wanted positions, in [0, 1].

        No rollout may be in `growths` twice, and `refusal` must be empty for each.
        """
        ids = torch.cat([torch.from_numpy(growth.token_ids).long() for growth in growths])
        positions = torch.cat([torch.arange(g.start, g.start + len(g.token_ids)) for g in growths])
        counts = [len(growth.token_ids) for growth in growths]
        offsets = [sum(counts[:i]) for i in range(len(counts))]
        wanted = [o + at for o, growth in zip(offsets, growths, strict=True) for at in growth.wanted]
        rows = [self._held.setdefault(growth.rollout, _Held()) for growth in growths]
        with attending(_Growing(rows, counts)):
            values = self._values(ids[None].to(self._device), positions[None].to(self._device), wanted)
        for row, count in zip(rows, counts, strict=True):
            row.length += count
        self.computed += len(ids)
        found = iter(values)
        return [[next(found) for _ in growth.wanted] for growth in growths]

    def _values(self, ids: torch.Tensor, positions: torch.Tensor, wanted: list[int]) -> list[float]:
        """Return the probability of a good step at the wanted positions of this pass."""
        verdict = self._verdict
        arguments = {"input_ids": ids, "position_ids": positions, "use_cache": False}
        if verdict.causal:
            arguments["logits_to_keep"] = torch.tensor(wanted, device=self._device)
            logits = self.model(**arguments).logits[0].float()
        else:
            logits = self.model(**arguments).logits[0, wanted].float()
        if verdict.bad is not None:
            logits = logits[:, [verdict.bad, verdict.good]]
            chances = logits.softmax(-1)[:, 1]
        elif logits.shape[-1] == 1:
            chances = logits[:, 0].sigmoid()
        else:
            chances = logits.softmax(-1)[:, verdict.good]
        found: list[float] = chances.tolist()
        return found


class _Alike(NamedTuple):
    """Rollouts of one pass that were equally long and have grown by equally many tokens."""

    past: int
    """The length of each before the pass."""
    rows: list[int]
    """The numbers of the rollouts."""
    places: torch.Tensor
    """Where in the pass their new tokens stand, [rollouts, tokens]."""


class _Growing:
    """The attention of one pass: the new tokens of each rollout see that rollout's earlier tokens, and each other.

    Rollouts that were equally long and have grown by equally many tokens are computed together, in one operation
    instead of one for each rollout. Answers that begin together and have steps of one length stay equally long.
    """

    def __init__(self, rows: Sequence[_Held], counts: Sequence[int]) -> None:
        self._rows = list(zip(rows, counts, strict=True))
        alike = dict[tuple[int, int], list[int]]()
        for number, (row, count) in enumerate(self._rows):
            alike.setdefault((row.length, count), []).append(number)
        ends = list(accumulate(counts))
        self._alike = [
            _Alike(past, numbers, torch.tensor([range(ends[each] - count, ends[each]) for each in numbers]))
            for (past, count), numbers in alike.items()
        ]
        self._masks: dict[tuple[int, int, int | None], torch.Tensor] = {}

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Keep the new keys and values, and return the attention output, [1, T, H, Dv]."""
        query, key, value = call.query[0], call.key[0], call.value[0]
        found = query.new_empty(query.shape[1], query.shape[0], value.shape[-1])
        for alike in self._alike:
            rows = [self._rows[number][0] for number in alike.rows]
            places = alike.places.to(query.device)
            keys = _kept([row.keys for row in rows], call.layer, key[:, places], alike.past)
            values = _kept([row.values for row in rows], call.layer, value[:, places], alike.past)
            attended = self._attend(call, query[:, places].transpose(0, 1), keys, values, alike.past)
            found[places] = attended.transpose(1, 2)
        return found[None]

    def _attend(
        self, call: AttentionCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, past: int
    ) -> torch.Tensor:
        visible = self._visible(query.shape[2], past, call.window, query.device)
        grouped = query.shape[1] != key.shape[1]
        if call.softcap is None and call.sinks is None:
            return torch.nn.functional.scaled_dot_product_attention(
                query, key, value, attn_mask=visible, scale=call.scaling, enable_gqa=grouped
            )
        if grouped:
            key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
        scores = (query @ key.transpose(-1, -2)).float() * call.scaling
        if call.softcap is not None:
            scores = torch.tanh(scores / call.softcap) * call.softcap
        scores = scores.masked_fill(~visible, float("-inf"))
        if call.sinks is None:
            weights = scores.softmax(-1)
        else:
            sinks = call.sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
            weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        return weights.to(value.dtype) @ value

    def _visible(self, count: int, past: int, window: int | None, device: torch.device) -> torch.Tensor:
        """Return which of a rollout's tokens each of its new tokens sees, [count, past + count]."""
        shape = count, past, window
        if shape not in self._masks:
            distance = torch.arange(past, past + count)[:, None] - torch.arange(past + count)[None]
            visible = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
            self._masks[shape] = visible.to(device)
        return self._masks[shape]


def _kept(rooms: Sequence[dict[int, torch.Tensor]], layer: int, new: torch.Tensor, past: int) -> torch.Tensor:
    """Write new keys or values of N rollouts, [K, N, count, D], after the first `past` ones of each.

    Return all keys or values of these rollouts, [N, K, past + count, D].
    """
    end = past + new.shape[2]
    for number, own in enumerate(rooms):
        room = own.get(layer)
        if room is None or room.shape[1] < end:
            size = max(2 * past, -(-end // CHUNK) * CHUNK)
            larger = new.new_empty(new.shape[0], size, new.shape[3])
            if room is not None:
                larger[:, :past] = room[:, :past]
            room = own[layer] = larger
        room[:, past:end] = new[:, number]
    kept = [own[layer][:, :end] for own in rooms]
    return kept[0][None] if len(kept) == 1 else torch.stack(kept)


def load_process_reward_model(
    path: Path, *, good: str = "", bad: str = "", max_length: int = 0, dtype: str = "float32", device: str = "cpu"
) -> ProcessRewardModel:
    """Load a process-reward model. Raises `ModelError` of one line if it cannot be used.

    A token classifier is known by its architecture. See `reward_verdict` for `good` and `bad`. `max_length` is the
    longest rollout in tokens; 0 takes the model's own limit.
    """
    verdict = reward_verdict(path, good, bad, "[scorers] model")
    model = load_model(path, dtype=dtype, device=device, classifier=not verdict.causal)
    longest = longest_sequence(max_length, getattr(model.config.get_text_config(), "max_position_embeddings", 0))
    check_model(model, longest)
    return ProcessRewardModel(model, verdict, longest)
