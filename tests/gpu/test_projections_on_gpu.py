"""Fused projections in a captured and compiled engine: the tokens of `generate`, before and after new weights."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "integration"))

from tiny_models import make_model, plain, prompts, reference_greedy, reference_logprobs, request, run_out

from headrace.config.schema import EngineConfig
from headrace.engines.embedded.core import EngineCore
from headrace.engines.embedded.projections import ProjectionPart
from headrace.models.loading import named_weights

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_moe"])
def test_tokens_are_those_of_generate_under_old_and_new_weights(family: str) -> None:
    model, other = make_model(family).cuda(), make_model(family, seed=1).cuda()
    config = EngineConfig(slots=4, block_size=4, prefill_chunk=10, fuse_projections=True)
    references = [plain(model), plain(other)]
    core = EngineCore(model, config, name="gpu", max_length=64, version=0)
    assert any(isinstance(module, ProjectionPart) for module in model.modules())
    for version, reference in enumerate(references):
        if version:
            with torch.inference_mode():
                for name, weight in named_weights(model).items():
                    weight.copy_(named_weights(other)[name])
            core.scheduler.forget_prefixes()
            core.adopt(version)
        asked = [request(f"{version}/{i}", p, 18, temperature=0.0) for i, p in enumerate(prompts([3, 23, 9, 1]))]
        core.submit(asked)
        done = run_out(core)
        for r in asked:
            answer = done[r.id].token_ids
            assert answer.tolist() == reference_greedy(reference, r.token_ids, 18)
            table = reference_logprobs(reference, r.token_ids, answer)
            np.testing.assert_allclose(done[r.id].logprobs, table[np.arange(18), answer], atol=1e-4)
