"""A server of two workers: each takes its own slices of a version. A version is proved if both of them prove it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_subjects import MAX_LENGTH, Subject, TinyTrainer
from test_engine import Stream, ask, assert_recorded

from conftest import KEY, SECONDS, attach, engine_config, served
from headrace.delivery.transports import sender
from headrace.delivery.transports.base import SenderSettings
from headrace.engines.vllm.client import VllmClient
from headrace.engines.vllm.server import VllmServer
from headrace_vllm_plugin.wire import Facts, StagingState

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]

CONFIG = engine_config(gpus_per_engine=2)


@pytest.fixture(scope="module")
def two_workers(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    log = tmp_path_factory.mktemp("vllm-tp") / "vllm.log"
    yield from served(VllmServer(model=tiny_model_dir, config=CONFIG, log=log, key=KEY, max_length=MAX_LENGTH))


@pytest.mark.parametrize("transport", ["shm", "tcp", "nccl"])
async def test_two_workers_prove_versions(
    two_workers: VllmServer, tiny_model_dir: Path, tmp_path: Path, transport: str
) -> None:
    """Log-probabilities are the trainer's: wrong slices in either worker would change them."""
    settings = SenderSettings(run_id=f"tensor-{transport}", directory=tmp_path, receivers=2)
    trainer = TinyTrainer(tiny_model_dir, sender=sender(transport, settings))
    engine = await attach(two_workers.url, tiny_model_dir, CONFIG, deadline=SECONDS)
    subject = Subject(engine, engine.load, engine.counters, trainer.publish, trainer.reference)
    try:
        async with VllmClient(two_workers.url, KEY, deadline=SECONDS) as client:
            assert [one.workers for one in await client.rpc("headrace_hello", Facts)] == [2, 2]
        for version in (1, 2):
            manifest = await trainer.publish(version)
            proof = await asyncio.wait_for(engine.load(manifest), SECONDS)
            assert proof.accepted and proof.canary_error < 1e-4, proof
            assert proof.staged_digest == manifest.digest
            async with VllmClient(two_workers.url, KEY, deadline=SECONDS) as client:
                staged = await client.rpc("headrace_staged", StagingState)
            assert [(one.version, one.digest, one.error) for one in staged] == [(version, manifest.digest, "")] * 2
            request = ask(f"{transport}/{version}", [5, 9, 2, 7], max_tokens=24, seed=version)
            completion = await Stream(engine, request).end()
            assert completion.versions == [version] * 24
            assert_recorded(subject, request, completion)
    finally:
        await engine.close()
        trainer.close()
