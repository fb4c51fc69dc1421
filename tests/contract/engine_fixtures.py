"""Fixtures that make engines under contract, whatever their factories."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from engine_subjects import Factory, Setting, Subject

SECONDS = 60.0
"""In which a first version must be served."""


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
    proof = await asyncio.wait_for(fresh.load(await fresh.publish(1)), SECONDS)
    assert proof.accepted, proof.reason
    return fresh
