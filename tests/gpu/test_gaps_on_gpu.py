"""Between which launches the device is said to have stood still."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from headrace.config.schema import EngineConfig
from headrace.engines.base import Request, Sampling
from headrace.engines.embedded.core import EngineCore
from headrace.engines.embedded.setup import make_device_runner
from headrace.models.attention import ATTENTION

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SECONDS = 0.25


def test_a_wait_for_weights_is_a_gap_and_one_for_requests_is_none() -> None:
    shape = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    model = LlamaForCausalLM._from_config(LlamaConfig(**shape, **heads), attn_implementation=ATTENTION).eval().cuda()
    config = EngineConfig(device="cuda", slots=4, compile=False)
    runner, pool = make_device_runner(model, config, 512)
    core = EngineCore(model, config, name="e", max_length=512, version=1, make_runner=lambda *_: (runner, pool))

    def submit(name: str) -> None:
        sampling = Sampling(max_tokens=400, seed=1)
        core.submit([Request(id=name, token_ids=np.array([3, 4], np.int32), sampling=sampling)])

    submit("a")
    for _ in range(8):
        core.step()
    runner.hurry("now")
    while runner.busy:
        core.step()
    core.timings.reset()
    time.sleep(SECONDS)
    runner.hurry("none")
    for _ in range(8):
        core.step()
    assert SECONDS < core.timings.longest_gap_seconds < 2 * SECONDS
    core.abort()
    core.timings.reset()
    time.sleep(SECONDS)
    submit("b")
    for _ in range(8):
        core.step()
    assert core.timings.steps > 0
    assert core.timings.longest_gap_seconds < SECONDS
    core.close()
