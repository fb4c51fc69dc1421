"""The contract of engines, once more, on a real vLLM server: one for all tests, a new driver for each."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "contract"))
sys.path.insert(0, str(Path(__file__).parent.parent))

import engine_fixtures
import test_engine
from engine_fixtures import fresh, setting, subject
from engine_subjects import MAX_LENGTH, SLOTS, Factory, Setting, Subject, TinyTrainer, save_tiny_llama

from headrace.config.model_dir import model_facts
from headrace.config.schema import EngineConfig, LoraConfig
from headrace.engines.vllm.building import examine
from headrace.engines.vllm.client import VllmClient
from headrace.engines.vllm.engine import VllmEngine
from headrace.engines.vllm.server import VllmServer
from headrace.errors import UserError

__all__ = ["fresh", "setting", "subject"]

PYTHON = os.environ.get("HEADRACE_VLLM_PYTHON", ".venv-vllm/bin/python")
KEY = "key of the tests"
START_SECONDS = 600.0
SECONDS = 240.0
"""No other wait is longer than this: a machine may be slow, and servers share it."""
PREFILL_CHUNK = 64
"""Tokens of a step: longer prompts are read in several."""


def engine_config(**changes: object) -> EngineConfig:
    # Uncompiled, they start sooner.
    settings = {"arguments": ["--enforce-eager"], "prefill_chunk": PREFILL_CHUNK, **changes}
    return EngineConfig(kind="vllm", python=PYTHON, device="cpu", slots=SLOTS, **settings)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (test_engine, engine_fixtures):
        monkeypatch.setattr(module, "SECONDS", SECONDS)


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny-llama")
    # vLLM's attention on a CPU has no heads of fewer than 32; layers, so that a request still runs when a test acts.
    save_tiny_llama(path, layers=6, spread=0.2, head_dim=32, hidden=64)
    return path


@pytest.fixture(scope="session")
def server(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    log = tmp_path_factory.mktemp("vllm") / "vllm.log"
    yield from served(VllmServer(model=tiny_model_dir, config=engine_config(), log=log, key=KEY, max_length=MAX_LENGTH))


def served(server: VllmServer) -> Iterator[VllmServer]:
    server.start()
    try:
        asyncio.run(server.ready(START_SECONDS))
        yield server
    finally:
        asyncio.run(server.stop())


@pytest.fixture
def factory(server: VllmServer) -> Factory:
    @asynccontextmanager
    async def vllm(setting: Setting) -> AsyncIterator[Subject]:
        trainer = TinyTrainer(setting.model_dir)
        config = engine_config(interrupt=setting.interrupt)
        engine = await attach(server.url, setting.model_dir, config, deadline=SECONDS)
        try:
            yield Subject(engine, engine.load, engine.counters, trainer.publish, trainer.reference)
        finally:
            await engine.close()
            trainer.close()

    return vllm


async def refused(attempt: Awaitable[object]) -> str:
    with pytest.raises(UserError) as caught:
        await asyncio.wait_for(attempt, START_SECONDS)
    assert "\n" not in str(caught.value)
    return str(caught.value)


async def attach(
    url: str,
    model: Path,
    config: EngineConfig | None = None,
    *,
    key: str = KEY,
    max_length: int = MAX_LENGTH,
    deadline: float = 120.0,
    lora: LoraConfig | None = None,
) -> VllmEngine:
    """An engine on the server at this URL, which must serve the model of this directory."""
    config = config or engine_config()
    client = VllmClient(url, key, deadline=deadline, slots=config.slots)
    try:
        vocabulary = model_facts(model, "load").vocabulary
        facts = await examine(client, vocabulary=vocabulary, dtype="float32", max_length=max_length)
    except UserError:
        await client.close()
        raise
    return VllmEngine(
        client,
        facts,
        name="vllm",
        slots=config.slots,
        max_length=max_length,
        interrupt=config.interrupt,
        deadline=deadline,
        scaling=None if lora is None else lora.scaling,
    )
