"""Makes the sampling noise of a token a function of (seed, position) alone.

A resumed answer then continues as if it had never been interrupted. vLLM's first model runner keeps one generator per
request and starts it anew with every request, so the processor here seeds the generator before each draw. (vLLM's
second runner hashes seed and position by itself.) For the same reason, a draw that the runner takes back, because the
prompt was not yet read to its end, needs no rewinding. The processor also applies `truncation`: at this point the
logits are already divided by the temperature, and log-probabilities are computed from the tokens that are left.
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
    """Return a 63-bit seed that is unrelated to the seeds of neighbouring positions and neighbouring seeds."""
    value = (seed * 0x9E3779B97F4A7C15 + position * 0xD1B54A32D192ED03 + 0x632BE59BD9B4E019) & _MASK
    for _ in range(2):
        value = ((value ^ value >> 32) * 0xD6E8FEB86659FD93) & _MASK
    return (value ^ value >> 32) & (1 << 63) - 1


class Reseeded(torch.Generator):
    """A CPU generator that is seeded before each draw.

    The runner takes a draw back whenever a prompt is read in several steps, and then rewinds the generator by its
    offset. CPU generators have no offset: a plain one would raise, and the server would end.
    """

    def get_offset(self) -> int:
        """Return 0, because there is one draw from each seed."""
        return 0

    def set_offset(self, offset: int) -> Reseeded:
        """Do nothing, because the generator is seeded again before the next draw."""
        return self


class PositionNoise(LogitsProcessor):  # type: ignore[misc]
    """A logits processor that seeds generators and truncates. It does nothing until `attach`.

    The driver attaches it before the first request. The settings of a row are looked up through its request at each
    step, so they stay right when the request moves to another row of the batch.
    """

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Refuse an invalid truncation before its request is in a batch with others."""
        wanted(sampling_params)

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._runner: Any = None

    def attach(self, runner: Any) -> None:
        """Use the requests and generators of this model runner from now on."""
        self._runner = runner

    def is_argmax_invariant(self) -> bool:
        """Return True: greedy rows draw nothing, and truncation keeps the best token."""
        return True

    def update_state(self, batch_update: Any) -> None:
        """After requests joined or left the batch, replace CPU generators by ones that may be rewound."""
        if self._runner is not None and batch_update is not None:
            generators = self._runner.input_batch.generators
            for row, generator in generators.items():
                if generator.device.type == "cpu" and not isinstance(generator, Reseeded):
                    generators[row] = Reseeded(device="cpu")

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Seed every row's generator for the position that is drawn next, and truncate as the row's request asks."""
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
    """Attach the processor that this runner was started with; return whether there is one."""
    processors = getattr(getattr(runner, "input_batch", None), "logitsprocs", None)
    found = [one for one in getattr(processors, "all", ()) if isinstance(one, PositionNoise)]
    for processor in found:
        processor.attach(runner)
    return bool(found)
