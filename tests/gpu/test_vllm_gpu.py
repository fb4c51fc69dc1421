"""A vLLM server on the GPU: the contract of engines, and weights that travel inside the GPU.

HEADRACE_VLLM_PYTHON names the interpreter of an environment with vLLM's build for GPUs and Headrace's plugin. Server
and trainer share one GPU. Truncation with `min_p` and `top_p` together, forks, and kept sets of a server that was not
started for them are refused, each in one line.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import engine_fixtures
import numpy as np
import numpy.typing as npt
import pytest
import test_engine
import torch
from engine_subjects import (
    MAX_LENGTH,
    SLOTS,
    Factory,
    Setting,
    Subject,
    TinyTrainer,
    save_tiny_llama,
    save_tiny_mixture,
)
from test_engine import *  # noqa: F403
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from headrace.config.model_dir import model_facts
from headrace.config.schema import EngineConfig
from headrace.delivery.base import canary_sequence
from headrace.delivery.publisher import Publisher
from headrace.delivery.transports import sender
from headrace.delivery.transports.base import SenderSettings
from headrace.delivery.transports.cuda_ipc import CudaIpcSender
from headrace.engines.base import Delta, Request, Sampling
from headrace.engines.vllm.building import examine
from headrace.engines.vllm.client import VllmClient
from headrace.engines.vllm.engine import VllmEngine
from headrace.engines.vllm.memory import Budget
from headrace.engines.vllm.server import VllmServer
from headrace.errors import UserError
from headrace.models.loading import named_weights
from headrace.types import Float32Array, Int32Array

PYTHON = os.environ.get("HEADRACE_VLLM_PYTHON", "")
pytestmark = [
    pytest.mark.skipif(
        not torch.cuda.is_available() or not PYTHON, reason="needs a GPU and HEADRACE_VLLM_PYTHON with vLLM for GPUs"
    ),
    pytest.mark.timeout(900),
]

KEY = "key of the tests"
START_SECONDS = 400.0
SECONDS = 120.0
GIB = 1 << 30
ROWS, PROMPT, ANSWER = 32, 24, 64


def server_on_gpu(
    model: Path,
    log: Path,
    *,
    dtype: str,
    slots: int,
    max_length: int,
    kept: bool = False,
    record_experts: bool = False,
) -> VllmServer:
    config = EngineConfig(
        kind="vllm",
        python=PYTHON,
        device="cuda",
        slots=slots,
        # Uncompiled, a server starts sooner.
        arguments=["--enforce-eager"],
    )
    return VllmServer(
        model=model,
        config=config,
        log=log,
        key=KEY,
        max_length=max_length,
        dtype=dtype,
        record_kept=kept,
        record_experts=record_experts,
        budget=Budget(0.1, GIB),
    )


def served(server: VllmServer) -> Iterator[VllmServer]:
    server.start()
    try:
        asyncio.run(server.ready(START_SECONDS))
        yield server
    finally:
        asyncio.run(server.stop())


async def attached(server: VllmServer, interrupt: str = "never", *, record_experts: bool = False) -> VllmEngine:
    client = VllmClient(server.url, KEY, deadline=SECONDS, slots=server.config.slots)
    vocabulary = model_facts(server.model, "load").vocabulary
    facts = await examine(client, vocabulary=vocabulary, dtype=server.dtype, max_length=server.max_length)
    assert facts.device == "cuda" and facts.position_noise
    return VllmEngine(
        client,
        facts,
        name="vllm",
        slots=server.config.slots,
        max_length=server.max_length,
        interrupt=interrupt,  # type: ignore[arg-type]
        deadline=SECONDS,
        record_experts=record_experts,
    )


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (test_engine, engine_fixtures):
        monkeypatch.setattr(module, "SECONDS", SECONDS)


@pytest.fixture(scope="module")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny-llama")
    # Layers, so that a request of the contract suite still runs when a test acts on it.
    save_tiny_llama(path, layers=24, spread=0.2, head_dim=32, hidden=64)
    return path


@pytest.fixture(scope="module")
def server(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    log = tmp_path_factory.mktemp("vllm") / "vllm.log"
    with pytest.MonkeyPatch.context() as changed:
        # By default Triton multiplies float32 matrices in TF32. The contract asks for the exact products.
        changed.setenv("TRITON_F32_DEFAULT", "ieee")
        yield from served(server_on_gpu(tiny_model_dir, log, dtype="float32", slots=SLOTS, max_length=MAX_LENGTH))


@pytest.fixture
def factory(server: VllmServer) -> Factory:
    @asynccontextmanager
    async def vllm(setting: Setting) -> AsyncIterator[Subject]:
        weights = CudaIpcSender(f"vllm-{id(setting):x}", device="cuda")
        trainer = TinyTrainer(setting.model_dir, sender=weights, device="cuda")
        engine = await attached(server, setting.interrupt)
        try:
            yield Subject(engine, engine.load, engine.counters, trainer.publish, trainer.reference)
        finally:
            await engine.close()
            trainer.close()

    return vllm


async def test_truncated_draws_are_from_the_kept_tokens_and_name_them(subject: Subject) -> None:
    """Every rule alone; all rules together are refused, because vLLM's second model runner has another order."""
    kinds = {name: kind for name, kind in test_engine.TRUNCATIONS.items() if name != "all"}
    requests = [
        test_engine.ask(f"{name}/{seed}", max_tokens=2, seed=seed, **kind)
        for name, kind in kinds.items()
        for seed in range(4)
    ]
    for request, completion in zip(requests, await test_engine.complete_all(subject.engine, requests), strict=True):
        test_engine.assert_drawn(subject, request, completion, 1)
    every = test_engine.ask("all", **test_engine.TRUNCATIONS["all"])
    completion = await test_engine.complete(subject.engine, every)
    assert completion.finish == "failed" and "min_p together with top_p" in completion.error


async def test_recording_what_was_kept_changes_no_token(subject: Subject) -> None:
    """It is refused, in one line."""
    completion = await test_engine.complete(subject.engine, test_engine.ask("kept", record_kept=True))
    assert completion.finish == "failed" and "record_kept" in completion.error and "\n" not in completion.error


async def test_forks_continue_a_running_request_and_leave_it_alone(subject: Subject) -> None:
    """It is refused, in one line, and the running request goes on."""
    stream = test_engine.Stream(subject.engine, test_engine.ask("parent", max_tokens=40))
    await stream.begun()
    with pytest.raises(UserError, match=r"^vLLM cannot fork a running request: "):
        await subject.engine.fork("parent", 3, 1)
    assert len((await stream.end()).token_ids) == 40


async def test_what_cannot_be_forked_is_one_line_and_ends_nothing(subject: Subject) -> None:
    """Nothing can be."""
    with pytest.raises(UserError, match=r"^vLLM cannot fork a running request: "):
        await subject.engine.fork("nobody", 1, 1)


@pytest.mark.parametrize("transport", ["cuda_ipc", "shm", "tcp"])
async def test_the_live_weights_of_a_gpu_are_digested(
    server: VllmServer, tiny_model_dir: Path, tmp_path: Path, transport: str
) -> None:
    """On a GPU vLLM packs nothing away, so the digest of the live weights is that of the published ones."""
    settings = SenderSettings(run_id=f"vllm-digest-{transport}", directory=tmp_path, device="cuda")
    trainer = TinyTrainer(tiny_model_dir, sender=sender(transport, settings), device="cuda")
    engine = await attached(server)
    try:
        for version in (1, 2, 3):
            manifest = await trainer.publish(version)
            proof = await asyncio.wait_for(engine.load(manifest), SECONDS)
            print(f"{transport}: staged in {proof.stage_seconds:.4f} s, swapped in {proof.swap_seconds:.4f} s")
            assert proof.accepted, proof.reason
            assert proof.staged_digest == proof.live_digest == manifest.digest
    finally:
        await engine.close()
        trainer.close()


async def test_kept_sets_are_those_of_the_reference(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a server that was started for it reports them; it draws the same tokens as one that was not."""
    monkeypatch.setenv("TRITON_F32_DEFAULT", "ieee")
    log = tmp_path / "vllm.log"
    server = server_on_gpu(tiny_model_dir, log, dtype="float32", slots=SLOTS, max_length=MAX_LENGTH, kept=True)
    server.start()
    trainer = TinyTrainer(tiny_model_dir, sender=CudaIpcSender("vllm-kept", device="cuda"), device="cuda")
    try:
        await server.ready(START_SECONDS)
        engine = await attached(server)
        subject = Subject(engine, engine.load, engine.counters, trainer.publish, trainer.reference)
        await test_engine.load(subject, 1)
        requests = [
            test_engine.ask(f"{name}/{seed}", max_tokens=2, seed=seed, record_kept=True, **kind)
            for name, kind in test_engine.TRUNCATIONS.items()
            for seed in range(4)
            if name != "all"
        ]
        for request, completion in zip(requests, await test_engine.complete_all(engine, requests), strict=True):
            assert completion.finish == "length", completion.error
            test_engine.assert_drawn(subject, request, completion, 1)
        greedy = await test_engine.complete(engine, test_engine.ask("greedy", temperature=0.0, record_kept=True))
        assert greedy.kept == [[]] * 12
        await engine.close()
    finally:
        await server.stop()
        trainer.close()


@torch.inference_mode()
def chosen_experts(model: PreTrainedModel, row: Int32Array, answer: int) -> npt.NDArray[np.int64]:
    """[answer, layers with experts, k]: the experts of the passes that draw the last tokens of a row, sorted."""
    ids = torch.from_numpy(row.astype(np.int64))[None].cuda()
    scores = model(ids, output_router_logits=True).router_logits
    best = [each.topk(model.config.num_experts_per_tok).indices.sort().values for each in scores]
    return torch.stack(best, 1)[-answer - 1 : -1].cpu().numpy()


async def test_experts_are_those_of_the_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of tokens that were drawn before new weights came in the middle of an answer."""
    monkeypatch.setenv("TRITON_F32_DEFAULT", "ieee")
    path = tmp_path / "model"
    save_tiny_mixture(path)
    server = server_on_gpu(
        path, tmp_path / "vllm.log", dtype="float32", slots=SLOTS, max_length=MAX_LENGTH, record_experts=True
    )
    server.start()
    trainer = TinyTrainer(path, sender=CudaIpcSender("vllm-experts", device="cuda"), device="cuda")
    try:
        await server.ready(START_SECONDS)
        engine = await attached(server, record_experts=True)
        subject = Subject(engine, engine.load, engine.counters, trainer.publish, trainer.reference)
        await test_engine.load(subject, 1)
        requests = [test_engine.ask(str(seed), max_tokens=40, seed=seed) for seed in range(4)]
        reading = [asyncio.create_task(deltas_of(engine, request)) for request in requests]
        await test_engine.eventually(subject, lambda stats: stats.running == len(requests))
        await test_engine.load(subject, 2)
        answers = [await asyncio.wait_for(each, SECONDS) for each in reading]
        await engine.close()
        tokens = [np.concatenate([delta.token_ids for delta in answer]) for answer in answers]
        versions = [np.concatenate([delta.versions for delta in answer]) for answer in answers]
        routing = [
            np.concatenate([delta.routing for delta in answer if delta.routing is not None]) for answer in answers
        ]
        print(f"tokens of version 1: {[int((each == 1).sum()) for each in versions]}")
        rows = [np.concatenate([request.token_ids, ids]) for request, ids in zip(requests, tokens, strict=True)]
        for version in (1, 2):
            trainer.reference(version, rows[0])  # Puts the version's weights in.
            for row, experts, mine in zip(rows, routing, versions, strict=True):
                assert experts.shape == (40, 2, 2)
                assert (np.sort(experts, -1) == chosen_experts(trainer.model, row, 40))[mine == version].all()
    finally:
        await server.stop()
        trainer.close()


async def deltas_of(engine: VllmEngine, request: Request) -> list[Delta]:
    return [delta async for delta in engine.generate(request)]


def model_for_half_precision(tmp_path: Path) -> Path:
    """A trained model if it was fetched (`examples/smollm2/fetch.py`), else a random one."""
    path = Path("examples/smollm2/model")
    if path.is_dir():
        return path
    config = Qwen3Config(
        vocab_size=8192,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        initializer_range=0.05,
        max_position_embeddings=512,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@torch.inference_mode()
def scored(model: PreTrainedModel, rows: list[Int32Array], answer: int) -> Float32Array:
    """Log-probabilities of the last tokens of each row, by plain Hugging Face."""
    found = []
    for row in rows:
        ids = torch.from_numpy(row.astype(np.int64))[None].cuda()
        logprobs = model(ids).logits.float().log_softmax(-1)[0, -answer - 1 : -1]
        found.append(logprobs.gather(1, ids[0, -answer:, None])[:, 0].cpu().numpy())
    return np.concatenate(found)


async def test_log_probabilities_in_16_bits_are_as_good_as_plain_hugging_face(tmp_path: Path) -> None:
    """The error against float32 is at most 1.3 times that of the same model and rows in bfloat16."""
    path = model_for_half_precision(tmp_path)
    server = server_on_gpu(path, tmp_path / "vllm.log", dtype="bfloat16", slots=ROWS, max_length=256)
    server.start()
    half = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, attn_implementation="sdpa").cuda().eval()
    vocabulary = model_facts(path, "load").vocabulary
    # Not the first tokens of the vocabulary: some models never saw them in training, and then 16 bits are far off.
    canary = canary_sequence(vocabulary, 16)
    publisher = Publisher(CudaIpcSender("vllm-half", device="cuda"), "bfloat16", None, canary)
    try:
        await server.ready(START_SECONDS)
        engine = await attached(server)
        published = publisher.publish(1, 0, 1, named_weights(half), lambda ids: scored(half, [ids], len(ids) - 1))
        proof = await asyncio.wait_for(engine.load(await asyncio.wrap_future(published)), SECONDS)
        assert proof.accepted, proof.reason
        rng = np.random.default_rng(0)
        requests = [
            Request(
                id=str(i),
                token_ids=rng.integers(0, vocabulary, PROMPT).astype(np.int32),
                sampling=Sampling(max_tokens=ANSWER, seed=i),
            )
            for i in range(ROWS)
        ]
        answers = await test_engine.complete_all(engine, requests)
        await engine.close()
    finally:
        await server.stop()
        publisher.close()
    rows = [
        np.concatenate([request.token_ids, np.array(answer.token_ids, np.int32)])
        for request, answer in zip(requests, answers, strict=True)
    ]
    theirs = np.concatenate([answer.logprobs for answer in answers])
    plain = scored(half, rows, ANSWER)
    exact = scored(half.float(), rows, ANSWER)
    vllm_error, plain_error = float(np.abs(theirs - exact).mean()), float(np.abs(plain - exact).mean())
    print(f"{path}: mean error {vllm_error:.5f} (vLLM), {plain_error:.5f} (plain Hugging Face), against float32")
    assert vllm_error <= 1.3 * plain_error
