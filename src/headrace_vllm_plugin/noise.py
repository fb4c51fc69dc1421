"""The noise of a token is a function of (seed, position) alone, so a resumed answer goes on as if never interrupted.

vLLM's first model runner keeps one generator per request and restarts it with every request; before each draw this sets
it anew. (Its second runner hashes seed and position by itself.) A draw that the runner takes back, because the prompt
was not read to its end, needs no rewinding for the same reason. What `truncation` cuts is cut here too:
logits are tempered by now, and log-probabilities are taken from what this leaves.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from vllm.v1.sample.logits_processor.interface import LogitsProcessor

from headrace_vllm_plugin.truncation import truncate, wanted
from headrace_vllm_plugin.wire import Truncation

_MASK = (1 << 64) - 1


def noise_seed(seed: int, position: int) -> int:
    """A 63-bit seed under which neighbouring positions and seeds have nothing in common."""
    value = (seed * 0x9E3779B97F4A7C15 + position * 0xD1B54A32D192ED03 + 0x632BE59BD9B4E019) & _MASK
    for _ in range(2):
        value = ((value ^ value >> 32) * 0xD6E8FEB86659FD93) & _MASK
    return (value ^ value >> 32) & (1 << 63) - 1


class Reseeded(torch.Generator):
    """A CPU generator that is seeded before each draw.

    The runner rewinds a generator by its offset after a draw that it takes back, as it does whenever a prompt is read
    in several steps. Generators on a CPU have no offset: they would raise, and the server would end.
    """

    def get_offset(self) -> int:
        """There is one draw from each seed."""
        return 0

    def set_offset(self, offset: int) -> Reseeded:
        """Nothing to do: the next draw is seeded anew."""
        return self


class PositionNoise(LogitsProcessor):  # type: ignore[misc]
    """Until `attach` it does nothing: the driver attaches it before the first request.

    What a row wants is looked up with its request at each step, so it moves in the batch as its request does.
    """

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Refuse a truncation that makes no sense before it is in a batch with others."""
        wanted(sampling_params)

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._runner: Any = None

    def attach(self, runner: Any) -> None:
        """Take the generators from this model runner's batch."""
        self._runner = runner

    def is_argmax_invariant(self) -> bool:
        """Greedy rows draw nothing, and truncation leaves the best token."""
        return True

    def update_state(self, batch_update: Any) -> None:
        """Requests have joined the batch or left it: give those that draw on a CPU a generator that may be rewound."""
        if self._runner is not None and batch_update is not None:
            generators = self._runner.input_batch.generators
            for row, generator in generators.items():
                if generator.device.type == "cpu" and not isinstance(generator, Reseeded):
                    generators[row] = Reseeded(device="cpu")

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Seed every row's generator for the position that is drawn next, and cut what the row's request has cut."""
        if self._runner is not None:
            batch = self._runner.input_batch
            for row, generator in batch.generators.items():
                request = self._runner.requests[batch.req_ids[row]]
                position = request.num_prompt_tokens + len(request.output_token_ids)
                generator.manual_seed(noise_seed(request.sampling_params.seed, position))
            rows: dict[Truncation, list[int]] = defaultdict(list)
            for row, name in enumerate(batch.req_ids):
                rule = wanted(self._runner.requests[name].sampling_params)
                if rule is not None:
                    rows[rule].append(row)
            truncate(logits, rows)
        return logits


def attach(runner: Any) -> bool:
    """Attach the processor that this runner was started with; whether its noise follows positions now."""
    processors = getattr(getattr(runner, "input_batch", None), "logitsprocs", None)
    found = [one for one in getattr(processors, "all", ()) if isinstance(one, PositionNoise)]
    for processor in found:
        processor.attach(runner)
    return bool(found)
