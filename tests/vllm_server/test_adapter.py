"""Only an adapter travels: a real server's log-probabilities are those of plain peft, adapter after adapter."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_subjects import MAX_LENGTH
from test_engine import Stream, ask
from transformers import LlamaForCausalLM

from conftest import KEY, SECONDS, engine_config
from headrace.config.schema import LoraConfig
from headrace.delivery.digest import digest_as
from headrace.delivery.publisher import Publisher
from headrace.delivery.transports.shm import ShmSender
from headrace.engines.vllm.engine import VllmEngine
from headrace.engines.vllm.server import VllmServer
from headrace.models.loading import named_weights
from headrace.training.lora import TrainedAdapter
from headrace.types import Float32Array, Int32Array

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

LORA = LoraConfig(rank=4, alpha=6.0, modules=["model.norm"])


async def test_log_probabilities_are_those_of_the_trainer_with_its_adapter(
    server: VllmServer, tiny_model_dir: Path
) -> None:
    model = LlamaForCausalLM.from_pretrained(tiny_model_dir, attn_implementation="eager").eval()
    base = digest_as(named_weights(model), "float32")
    adapter = TrainedAdapter(model, LORA, base=tiny_model_dir)
    canary = np.arange(1, 13, dtype=np.int32)
    publisher = Publisher(ShmSender("vllm-adapter"), "float32", 1e-3, canary, send="adapter", base_digest=base)

    def score(token_ids: Int32Array) -> Float32Array:
        ids = torch.from_numpy(np.asarray(token_ids, np.int64))[None]
        with torch.no_grad():
            logprobs = model(ids).logits.float().log_softmax(-1)[0, :-1]
        return np.asarray(logprobs.gather(1, ids[0, 1:, None])[:, 0].numpy(), np.float32)

    engine = await VllmEngine.attach(
        server.url, tiny_model_dir, engine_config(), key=KEY, max_length=MAX_LENGTH, lora=LORA, deadline=SECONDS
    )
    try:
        for version in (1, 2):
            noise = torch.Generator().manual_seed(version)
            for tensor in adapter.weights().values():
                tensor.copy_(0.3 * torch.randn(tensor.shape, generator=noise))
            published = publisher.publish(version, version - 1, version, adapter.weights(), score)
            manifest = await asyncio.wait_for(asyncio.wrap_future(published), SECONDS)
            assert manifest.kind == "adapter" and all("lora_" in e.name or "norm" in e.name for e in manifest.entries)
            proof = await asyncio.wait_for(engine.load(manifest), SECONDS)
            publisher.acknowledged(version)
            assert proof.accepted and proof.canary_error < 1e-4, proof
            request = ask(f"adapter/{version}", [5, 9, 2, 7], max_tokens=24, seed=version)
            completion = await Stream(engine, request).end()
            assert completion.versions == [version] * 24
            whole = np.concatenate([request.token_ids, np.array(completion.token_ids, np.int32)])
            np.testing.assert_allclose(completion.logprobs, score(whole)[len(request.token_ids) - 1 :], atol=1e-4)
        # With the adapter switched off the trainer scores otherwise: what was compared is the adapter's doing.
        with adapter.disabled():
            assert np.abs(score(whole)[len(request.token_ids) - 1 :] - completion.logprobs).max() > 0.1
    finally:
        await engine.close()
        publisher.close()
