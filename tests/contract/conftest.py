"""Fixtures of the contract suites: the engines come from `engine_subjects.py`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from engine_subjects import FACTORIES, Factory, Setting, Subject, save_tiny_llama


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny-llama")
    save_tiny_llama(path)
    return path


@pytest.fixture(params=sorted(FACTORIES))
def factory(request: pytest.FixtureRequest) -> Factory:
    return FACTORIES[request.param]


@pytest.fixture
def setting(tmp_path: Path, tiny_model_dir: Path) -> Setting:
    return Setting(tmp_path=tmp_path, model_dir=tiny_model_dir, interrupt="never")


@pytest.fixture
async def fresh(factory: Factory, setting: Setting) -> AsyncIterator[Subject]:
    """An engine that has not proved any weights yet."""
    async with factory(setting) as subject:
        yield subject


@pytest.fixture
async def subject(fresh: Subject) -> Subject:
    """An engine that serves version 1."""
    proof = await asyncio.wait_for(fresh.engine.load(await fresh.publish(1)), 20)
    assert proof.accepted, proof.reason
    return fresh
