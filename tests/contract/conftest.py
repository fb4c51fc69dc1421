"""Fixtures of the contract suites: the engines come from `engine_subjects.py`."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_fixtures import fresh, setting, subject
from engine_subjects import FACTORIES, Factory, save_tiny_llama

__all__ = ["fresh", "setting", "subject"]


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny-llama")
    save_tiny_llama(path)
    return path


@pytest.fixture(params=sorted(FACTORIES))
def factory(request: pytest.FixtureRequest) -> Factory:
    return FACTORIES[request.param]
