"""Builds the engine of a worker process that drives one vLLM server, and checks that the server fits the run.

The vLLM server is a process that is started here (`VllmServer`) and ends with this process, or a server that runs
already at one of `[engine] urls`. The engine is wrapped in an `EventLoopServer`, which answers the controller's calls
in this process. Torch is not imported.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from headrace.channel.worker_link import WorkerLink
from headrace.config import Config
from headrace.config.memory import LONGEST_DEFAULT
from headrace.config.model_dir import model_facts
from headrace.delivery.setup import choose
from headrace.delivery.transports.tcp_wire import KEYS
from headrace.engines.event_loop import EventLoopServer, Opened
from headrace.engines.serving import Emit
from headrace.engines.vllm.checks import KEY_VARIABLE, check_hosts, examine
from headrace.engines.vllm.client import VllmClient
from headrace.engines.vllm.engine import VllmEngine
from headrace.engines.vllm.server import ServerHealth, ServerPlan, VllmServer, until_there


def build(link: WorkerLink, config: Config, emit: Emit) -> EventLoopServer:
    """Return the server that answers the controller's calls with this rank's vLLM engine.

    The vLLM server is started, or attached to, only when the returned server runs.
    """
    return EventLoopServer(link.name, lambda: _opened(link, config), emit)


@asynccontextmanager
async def _opened(link: WorkerLink, config: Config) -> AsyncIterator[Opened]:
    rank = int(link.name.rpartition("-")[2])  # The name of a worker process ends in its rank: engine-0.
    model = model_facts(Path(config.model.path), config.model.weights)
    max_length = min(config.engine.max_length or LONGEST_DEFAULT, model.max_positions or LONGEST_DEFAULT)
    server: VllmServer | None = None
    try:
        if config.engine.urls:
            check_hosts(config.engine.urls, choose(config.delivery).transport)
            url, key = config.engine.urls[rank], os.environ.get(KEY_VARIABLE, "")
        else:
            key = secrets.token_urlsafe(32)
            server = _server(link, config, rank, key, max_length)
            with link.spans.span("load"):
                server.start()
                await server.ready(config.pipeline.start_seconds, lambda stage: setattr(link, "phase", stage))
            url = server.url
        deadline, slots = config.pipeline.stall_seconds, config.engine.slots
        async with VllmClient(url, key, deadline=deadline, slots=slots) as client:
            if server is None:
                link.phase = f"waiting for {url}"
                # If the run has begun before, the server was there once, so wait for it to come back. If the run is
                # new, a missing server is a mistake.
                begun = (link.run_dir / "journal.db").is_file()
                await until_there(client, config.pipeline.start_seconds if begun else 0.0)
            link.phase = "examining vLLM"
            facts = await examine(client, vocabulary=model.vocabulary, dtype=config.model.dtype, max_length=max_length)
            engine = VllmEngine(
                client,
                facts,
                name=link.name,
                slots=slots,
                max_length=max_length,
                interrupt=config.engine.interrupt,
                deadline=config.delivery.deadline,
                keys=str((link.run_dir / KEYS).absolute()),
                spans=link.spans,
                scaling=None if config.lora is None else config.lora.scaling,
            )
            link.ready(parameters=model.parameters)
            yield Opened(engine, ServerHealth(client, None if server is None else server.check).check)
    finally:
        if server is not None:
            await server.stop()


def _server(link: WorkerLink, config: Config, rank: int, key: str, max_length: int) -> VllmServer:
    plan = ServerPlan(
        model=Path(config.model.path),
        config=config.engine,
        log=link.run_dir / "logs" / f"vllm-{rank}.log",
        key=key,
        max_length=max_length,
        weights=config.model.weights,
        dtype=config.model.dtype,
        seed=config.run.seed,
        rank=rank,
    )
    return VllmServer(plan)
