"""The contract of engines, once more, on the GPU: with and without captured steps and compiled layers."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "contract"))
sys.path.insert(0, str(Path(__file__).parent.parent))

from engine_fixtures import fresh, setting, subject
from engine_subjects import MAX_LENGTH, SLOTS, Factory, Setting, Subject, TinyTrainer, save_tiny_llama

from headrace.config.schema import EngineConfig
from headrace.engines.embedded.engine import EmbeddedEngine

__all__ = ["fresh", "setting", "subject"]

LAYERS = 40
"""Enough that a request of the contract suite still runs when a test acts on it."""


def on_gpu(*, graphs: bool, compile: bool) -> Factory:
    @asynccontextmanager
    async def embedded(setting: Setting) -> AsyncIterator[Subject]:
        trainer = TinyTrainer(setting.model_dir)
        config = EngineConfig(
            device="cuda",
            graphs=graphs,
            compile=compile,
            slots=SLOTS,
            block_size=8,
            prefill_chunk=32,
            interrupt=setting.interrupt,
            kv="recompute",
        )
        engine = EmbeddedEngine.from_path(setting.model_dir, config, max_length=MAX_LENGTH, name="embedded")
        try:
            yield Subject(engine, engine.load, engine.counters, trainer.publish, trainer.reference)
        finally:
            await engine.close()
            trainer.close()

    return embedded


FACTORIES = {
    "plain": on_gpu(graphs=False, compile=False),
    "graphs": on_gpu(graphs=True, compile=False),
    "compiled": on_gpu(graphs=False, compile=True),
    "graphs-compiled": on_gpu(graphs=True, compile=True),
}


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny-llama")
    save_tiny_llama(path, LAYERS, spread=0.2)
    return path


@pytest.fixture(params=sorted(FACTORIES))
def factory(request: pytest.FixtureRequest) -> Factory:
    return FACTORIES[request.param]
