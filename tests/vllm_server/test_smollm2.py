"""A real model: vLLM's log-probabilities are the trainer's, before and after an update in the middle of an answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_subjects import TinyTrainer
from test_engine import Completion, Stream, ask, eventually, idle

from conftest import KEY, PYTHON, SECONDS, attach, served
from headrace.config.schema import EngineConfig
from headrace.delivery.base import Manifest
from headrace.engines.base import Request
from headrace.engines.vllm.engine import VllmEngine
from headrace.engines.vllm.server import VllmServer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

MODEL = Path("examples/smollm2/model")
MAX_LENGTH = 256
CONFIG = EngineConfig(kind="vllm", python=PYTHON, device="cpu", slots=4, block_size=32, arguments=["--enforce-eager"])
TOKENS = 96
"""Of an answer: enough that the update, which takes seconds, comes in its middle."""
PROMPT = [504, 3575, 282, 253, 1165, 3365, 2152, 1165, 282, 260, 905, 28] * 4
"""Long enough that the prefix cache holds a block of it."""


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    log = tmp_path_factory.mktemp("smollm2") / "vllm.log"
    yield from served(VllmServer(model=MODEL, config=CONFIG, log=log, key=KEY, max_length=MAX_LENGTH))


@pytest.fixture
async def engine(smollm2: VllmServer) -> AsyncIterator[VllmEngine]:
    engine = await attach(smollm2.url, MODEL, CONFIG, max_length=MAX_LENGTH, deadline=SECONDS)
    yield engine
    await engine.close()


@pytest.fixture
def trainer() -> Iterator[TinyTrainer]:
    trainer = TinyTrainer(MODEL, change=1e-3)
    yield trainer
    trainer.close()


def assert_recomputed(trainer: TinyTrainer, answers: list[tuple[Request, Completion]]) -> None:
    """Against plain Hugging Face, tempered: each token under its own version, given all tokens before it."""
    for version in sorted({version for _, completion in answers for version in completion.versions}):
        trainer.reference(version, np.array([0, 0], np.int32))  # Puts the version's weights in.
        for request, completion in answers:
            prompt, mine = len(request.token_ids), np.array(completion.versions) == version
            last = prompt + int(np.flatnonzero(mine).max(initial=-1)) + 1
            ids = torch.from_numpy(np.array([*request.token_ids, *completion.token_ids][:last], np.int64))[None]
            with torch.no_grad():
                logits = trainer.model(ids).logits.float()[0, prompt - 1 : -1]
            logprobs = (logits / request.sampling.temperature).log_softmax(-1).gather(1, ids[0, prompt:, None])[:, 0]
            np.testing.assert_allclose(
                np.array(completion.logprobs)[mine], logprobs.numpy()[mine[: last - prompt]], atol=1e-3
            )


async def proved(engine: VllmEngine, manifest: Manifest) -> None:
    proof = await asyncio.wait_for(engine.load(manifest), SECONDS)
    assert proof.accepted and proof.canary_error < 1e-3, proof.reason


async def test_log_probabilities_and_versions_over_an_update(engine: VllmEngine, trainer: TinyTrainer) -> None:
    await proved(engine, await trainer.publish(1))
    second = await trainer.publish(2)
    requests = [
        ask(f"{temperature}/{turn}", PROMPT, max_tokens=TOKENS, temperature=temperature, seed=turn)
        for temperature in (0.7, 1.0)
        for turn in range(2)
    ]
    streams = [Stream(engine, request) for request in requests]
    for stream in streams:
        await stream.until(lambda c: len(c.token_ids) >= 5)
    await proved(engine, second)
    before = [len(stream.completion.token_ids) for stream in streams]
    answers = [(stream.request, await stream.end()) for stream in streams]
    print(f"tokens before the update: {[answer.versions.count(1) for _, answer in answers]} of {TOKENS}")
    for (_, completion), known in zip(answers, before, strict=True):
        assert completion.finish == "length" and len(completion.token_ids) == TOKENS
        assert set(completion.versions) == {1, 2} and completion.versions == sorted(completion.versions)
        # What came before the proof is of the old version: none of it was drawn under weights without one.
        assert completion.versions[:known] == [1] * known
    assert_recomputed(trainer, answers)


async def test_the_prefix_cache_is_used_and_never_holds_old_weights(engine: VllmEngine, trainer: TinyTrainer) -> None:
    for version in (1, 2):
        await proved(engine, await trainer.publish(version))
        for turn in range(2):
            request = ask(f"{version}/{turn}", PROMPT, max_tokens=4, seed=turn)
            prefilled = engine.counters().prefilled_tokens
            completion = await Stream(engine, request).end()
            assert_recomputed(trainer, [(request, completion)])
            # What the cache held is said at the very end of a stream, after the last token.
            computed = (await eventually(engine, idle)).prefilled_tokens - prefilled
            assert computed == (len(PROMPT) if turn == 0 else len(PROMPT) - 32)
