"""A mixture of experts on a vLLM server: every version is loaded, experts included, and proved."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from engine_subjects import MAX_LENGTH, Subject, TinyTrainer, save_tiny_mixture
from test_engine import ask, assert_recorded, complete_all, load

from conftest import KEY, SECONDS, attach, engine_config, served
from headrace.engines.vllm.server import VllmServer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    path = tmp_path_factory.mktemp("mixture")
    save_tiny_mixture(path / "model")
    config = engine_config()
    yield from served(
        VllmServer(model=path / "model", config=config, log=path / "vllm.log", key=KEY, max_length=MAX_LENGTH)
    )


async def test_versions_of_a_mixture_of_experts_are_served(mixture: VllmServer) -> None:
    engine = await attach(mixture.url, mixture.model, deadline=SECONDS)
    trainer = TinyTrainer(mixture.model)
    subject = Subject(engine, engine.load, engine.counters, trainer.publish, trainer.reference)
    try:
        for version in (1, 2, 3):
            await load(subject, version)
            requests = [ask(f"{version}/{seed}", seed=seed) for seed in range(4)]
            for request, completion in zip(requests, await complete_all(engine, requests), strict=True):
                assert set(completion.versions) == {version}
                assert_recorded(subject, request, completion)
    finally:
        await engine.close()
        trainer.close()
