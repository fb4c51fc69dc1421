"""A real model: vLLM's log-probabilities are the trainer's, before and after an update in the middle of an answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_subjects import TinyTrainer
from test_engine import Completion, Stream, ask

from conftest import KEY, PYTHON, SECONDS, served
from headrace.config.schema import EngineConfig
from headrace.delivery.base import Manifest
from headrace.engines.base import Request
from headrace.engines.vllm.engine import VllmEngine
from headrace.engines.vllm.server import ServerPlan, VllmServer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

MODEL = Path("examples/smollm2/model")
MAX_LENGTH = 256
CONFIG = EngineConfig(kind="vllm", python=PYTHON, device="cpu", slots=4, block_size=32, arguments=["--enforce-eager"])
PROMPT = [504, 3575, 282, 253, 1165, 3365, 2152, 1165, 282, 260, 905, 28] * 4
"""Long enough that the prefix cache holds a block of it."""


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    log = tmp_path_factory.mktemp("smollm2") / "vllm.log"
    yield from served(ServerPlan(model=MODEL, config=CONFIG, log=log, key=KEY, max_length=MAX_LENGTH))


@pytest.fixture
async def engine(smollm2: VllmServer) -> AsyncIterator[VllmEngine]:
    engine = await VllmEngine.attach(smollm2.url, MODEL, CONFIG, key=KEY, max_length=MAX_LENGTH, deadline=SECONDS)
    yield engine
    await engine.close()


@pytest.fixture
def trainer() -> Iterator[TinyTrainer]:
    trainer = TinyTrainer(MODEL, change=1e-3)
    yield trainer
    trainer.close()


def recomputed(trainer: TinyTrainer, version: int, tokens: np.ndarray, temperature: float) -> np.ndarray:
    """Plain Hugging Face: log-probabilities of tokens 1..n, tempered."""
    trainer.reference(version, tokens[:2])  # Puts the version's weights in.
    ids = torch.from_numpy(tokens.astype(np.int64))[None]
    with torch.no_grad():
        logits = trainer._model(ids).logits.float()[0, :-1]
    return (logits / temperature).log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].numpy()


def assert_recomputed(trainer: TinyTrainer, request: Request, completion: Completion) -> None:
    whole = np.concatenate([request.token_ids, np.array(completion.token_ids, np.int32)])
    for version in sorted(set(completion.versions)):
        expected = recomputed(trainer, version, whole, request.sampling.temperature)[len(request.token_ids) - 1 :]
        mine = np.array(completion.versions) == version
        np.testing.assert_allclose(np.array(completion.logprobs)[mine], expected[mine], atol=1e-3)


async def proved(engine: VllmEngine, manifest: Manifest) -> None:
    proof = await asyncio.wait_for(engine.load(manifest), SECONDS)
    assert proof.accepted and proof.canary_error < 1e-3, proof.reason


async def test_log_probabilities_and_versions_over_an_update(engine: VllmEngine, trainer: TinyTrainer) -> None:
    await proved(engine, await trainer.publish(1))
    second = await trainer.publish(2)
    requests = [
        ask(f"{temperature}/{turn}", PROMPT, max_tokens=200, temperature=temperature, seed=turn)
        for temperature in (0.7, 1.0)
        for turn in range(2)
    ]
    streams = [Stream(engine, request) for request in requests]
    for stream in streams:
        await stream.until(lambda c: len(c.token_ids) >= 5)
    await proved(engine, second)
    before = [len(stream.completion.token_ids) for stream in streams]
    for request, stream in zip(requests, streams, strict=True):
        completion = await stream.end()
        assert completion.finish == "length" and len(completion.token_ids) == 200
        assert set(completion.versions) == {1, 2} and completion.versions == sorted(completion.versions)
        # What came before the proof is of the old version: none of it was drawn under weights without one.
        assert completion.versions[: before[streams.index(stream)]] == [1] * before[streams.index(stream)]
        assert_recomputed(trainer, request, completion)


async def test_the_prefix_cache_is_used_and_never_holds_old_weights(engine: VllmEngine, trainer: TinyTrainer) -> None:
    for version in (1, 2):
        await proved(engine, await trainer.publish(version))
        for turn in range(2):
            request = ask(f"{version}/{turn}", PROMPT, max_tokens=4, seed=turn)
            prefilled = (await engine.stats()).prefilled_tokens
            completion = await Stream(engine, request).end()
            assert_recomputed(trainer, request, completion)
            await asyncio.sleep(0.2)
            computed = (await engine.stats()).prefilled_tokens - prefilled
            assert computed == (len(PROMPT) if turn == 0 else len(PROMPT) - 32)
