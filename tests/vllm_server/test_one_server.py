"""What one server of a tiny model can show: the contract of engines, adapters, and what a driver refuses of it.

Kept sets cannot be had on a CPU: they need vLLM's second model runner.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import numpy as np
import pytest
import test_engine
import torch
from engine_subjects import MAX_LENGTH, Subject
from test_engine import *  # noqa: F403
from transformers import LlamaForCausalLM

from conftest import KEY, PREFILL_CHUNK, SECONDS, attach, refused
from headrace.config.schema import LoraConfig
from headrace.delivery.digest import digest_as
from headrace.delivery.publisher import Publisher
from headrace.delivery.transports.shm import ShmSender
from headrace.engines.vllm.client import VllmClient
from headrace.engines.vllm.server import VllmServer
from headrace.errors import HttpError, UserError
from headrace.models.loading import named_weights
from headrace.training.lora import TrainedAdapter
from headrace.types import Float32Array, Int32Array
from headrace_vllm_plugin.wire import TRUNCATION

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

LORA = LoraConfig(rank=4, alpha=6.0, modules=["model.norm"])


async def test_truncated_draws_are_from_the_kept_tokens_and_name_them(subject: Subject) -> None:
    """All rules, but no kept sets."""
    requests = [
        test_engine.ask(f"{name}/{seed}", max_tokens=2, seed=seed, **kind)
        for name, kind in test_engine.TRUNCATIONS.items()
        for seed in range(4)
    ]
    for request, completion in zip(requests, await test_engine.complete_all(subject.engine, requests), strict=True):
        test_engine.assert_drawn(subject, request, completion, 1)


async def test_what_is_cut_follows_its_request_while_others_come_and_go(subject: Subject) -> None:
    """More requests than slots, of many lengths: rows of the batch are left, taken again and moved between draws."""
    rules: list[dict[str, object]] = [
        {"top_p": 0.7, "min_p": 0.3},
        {"temperature": 0.0, "top_p": 0.7, "min_p": 0.3},
        {"temperature": 1.4, "top_k": 6, "min_p": 0.5},
        {},
        {"temperature": 0.8, "top_k": 12, "top_p": 0.6, "min_p": 0.4},
    ]
    requests = [
        test_engine.ask(f"{i}", [i + 1, 2, 3], max_tokens=3 + 7 * i % 10, seed=i, **rules[i % len(rules)])
        for i in range(3 * subject.slots)
    ]
    otherwise = 0
    for request, completion in zip(requests, await test_engine.complete_all(subject.engine, requests), strict=True):
        sampling = request.sampling
        assert len(completion.token_ids) == sampling.max_tokens, completion.error
        if sampling.temperature == 0 or sampling.min_p == 0:
            test_engine.assert_recorded(subject, request, completion)
            continue
        before = [*request.token_ids.tolist(), *completion.token_ids[:-1]]
        resumed = msgspec.structs.replace(request, token_ids=np.array(before, np.int32))
        last = test_engine.Completion(completion.token_ids[-1:], completion.logprobs[-1:])
        test_engine.assert_drawn(subject, resumed, last, 1)
        p = test_engine.alternatives(subject, before, sampling.temperature)
        left = np.where(p >= sampling.min_p * p.max(), p, 0)
        theirs = test_engine.kept_by_definition(left, sampling)
        otherwise += theirs != test_engine.kept_by_definition(p, sampling)
    assert otherwise > 2, "in vLLM's own order other tokens would have been left"


async def test_a_truncation_that_makes_no_sense_fails_its_request_alone(server: VllmServer, subject: Subject) -> None:
    async with VllmClient(server.url, KEY) as client:
        for wrong in ({"top_p": 0.0}, {"min_p": "x"}, [1]):
            params = {"max_tokens": 1, "logprobs": 0, "detokenize": False, "extra_args": {TRUNCATION: wrong}}
            with pytest.raises(HttpError) as caught:
                await anext(client.generate("wrong", [1], params, salt="wrong"))
            assert caught.value.status == 400
    assert (await test_engine.complete(subject.engine, test_engine.ask("after"))).finish == "length"


async def test_recording_what_was_kept_changes_no_token(subject: Subject) -> None:
    """It is refused, in one line."""
    completion = await test_engine.complete(subject.engine, test_engine.ask("kept", record_kept=True))
    assert completion.finish == "failed" and "record_kept" in completion.error and "\n" not in completion.error


async def test_forks_continue_a_running_request_and_leave_it_alone(subject: Subject) -> None:
    """It is refused, in one line, and the running request goes on."""
    stream = test_engine.Stream(subject.engine, test_engine.ask("parent", max_tokens=40))
    await stream.begun()
    with pytest.raises(UserError, match=r"^vLLM cannot fork a running request: ") as caught:
        await subject.engine.fork("parent", 3, 1)
    assert "\n" not in str(caught.value)
    completion = await stream.end()
    assert (completion.finish, len(completion.token_ids)) == ("length", 40)


async def test_what_cannot_be_forked_is_one_line_and_ends_nothing(subject: Subject) -> None:
    """Nothing can be."""
    with pytest.raises(UserError, match=r"^vLLM cannot fork a running request: "):
        await subject.engine.fork("nobody", 1, 1)


async def test_prompts_that_are_read_in_several_steps_change_no_draw(subject: Subject) -> None:
    """Alone one takes several steps; together each step has the end of one and the beginning of another."""
    prompts = [[(7 * i + j) % 60 + 1 for i in range(PREFILL_CHUNK * 3 // 2 + j)] for j in range(subject.slots)]
    requests = [test_engine.ask(f"{i}", prompt, seed=i) for i, prompt in enumerate(prompts)]
    together = await test_engine.complete_all(subject.engine, requests)
    for request, completion in zip(requests, together, strict=True):
        assert completion.finish == "length", completion.error
        test_engine.assert_recorded(subject, request, completion)
    await test_engine.load(subject, 2)  # Under another version the prefix cache has none of them.
    alone = await test_engine.complete(subject.engine, requests[1])
    again = await test_engine.complete_all(subject.engine, requests)
    assert alone.finish == "length" and again[1].token_ids == alone.token_ids


async def test_log_probabilities_are_those_of_the_trainer_with_its_adapter(
    server: VllmServer, tiny_model_dir: Path
) -> None:
    """Only the adapter travels; what is served is what plain peft computes, adapter after adapter."""
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

    engine = await attach(server.url, tiny_model_dir, lora=LORA, deadline=SECONDS)
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
            request = test_engine.ask(f"adapter/{version}", [5, 9, 2, 7], max_tokens=24, seed=version)
            completion = await test_engine.Stream(engine, request).end()
            assert completion.versions == [version] * 24
            whole = np.concatenate([request.token_ids, np.array(completion.token_ids, np.int32)])
            np.testing.assert_allclose(completion.logprobs, score(whole)[len(request.token_ids) - 1 :], atol=1e-4)
        # With the adapter switched off the trainer scores otherwise: what was compared is the adapter's doing.
        with adapter.disabled():
            assert np.abs(score(whole)[len(request.token_ids) - 1 :] - completion.logprobs).max() > 0.1
    finally:
        await engine.close()
        publisher.close()


async def test_a_wrong_key(server: VllmServer, tiny_model_dir: Path) -> None:
    for key in ("", "another"):
        assert "does not take our key: put its --api-key into VLLM_API_KEY" in await refused(
            attach(server.url, tiny_model_dir, key=key)
        )


async def test_another_model(server: VllmServer) -> None:
    line = await refused(attach(server.url, Path("examples/smollm2/model")))
    assert "serves another model than [model] path" in line and "vocabulary of 64, not 49152" in line


async def test_longer_sequences_than_the_server_takes(server: VllmServer, tiny_model_dir: Path) -> None:
    attempt = attach(server.url, tiny_model_dir, max_length=2 * MAX_LENGTH)
    assert f"start it with --max-model-len {2 * MAX_LENGTH}" in await refused(attempt)
