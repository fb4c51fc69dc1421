"""The engine role of a worker process, with a vLLM server behind it: messages on one side, a `VllmCore` on the other.

The server lives and dies with this process. A server that is lost ends it with one line and without a word to its
requests: whoever watches over this process starts it again, and what it had goes on elsewhere. No torch here.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from headrace.channel.beats import Stop
from headrace.channel.codec import Message
from headrace.channel.desk import Desk
from headrace.channel.spoke import Incoming
from headrace.config import Config
from headrace.config.model_dir import model_facts
from headrace.delivery.setup import choose
from headrace.delivery.transports.keys import KEYS
from headrace.engines.base import Delta
from headrace.engines.messages import Abort, Deltas, Fork, Load, Proved, Score, Scored, Submit
from headrace.engines.vllm.checks import KEY_VARIABLE, check_hosts, examine
from headrace.engines.vllm.client import VllmClient
from headrace.engines.vllm.core import VllmCore
from headrace.engines.vllm.pulse import Pulse, until_there
from headrace.engines.vllm.server import ServerPlan, VllmServer
from headrace.errors import HeadraceError, PeerDied, UserError
from headrace_vllm_plugin.wire import Facts

LONGEST_DEFAULT = 4096
IDLE_SECONDS = 0.2


def serve(desk: Desk, config: Config) -> None:
    """Start or attach to this rank's server, examine it, and serve until told to stop."""
    asyncio.run(_serve(desk, config))


async def _serve(desk: Desk, config: Config) -> None:
    rank = int(desk.name.rpartition("-")[2])
    model = model_facts(Path(config.model.path), config.model.weights)
    max_length = min(config.engine.max_length or LONGEST_DEFAULT, model.max_positions or LONGEST_DEFAULT)
    server: VllmServer | None = None
    try:
        if config.engine.urls:
            check_hosts(config.engine.urls, choose(config.delivery).transport)
            url, key = config.engine.urls[rank], os.environ.get(KEY_VARIABLE, "")
        else:
            key = secrets.token_urlsafe(32)
            server = _server(desk, config, rank, key, max_length)
            with desk.spans.span("load"):
                server.start()
                await server.ready(config.pipeline.start_seconds, lambda stage: setattr(desk, "phase", stage))
            url = server.url
        client = VllmClient(url, key, deadline=config.pipeline.stall_seconds)
        if server is None:
            desk.phase = f"waiting for {url}"
            # It was there once, and will be back; before a run has begun, what is not there is a mistake.
            begun = (desk.run_dir / "journal.db").is_file()
            await until_there(client, config.pipeline.start_seconds if begun else 0.0)
        desk.phase = "examining vLLM"
        facts = await examine(client, vocabulary=model.vocabulary, dtype=config.model.dtype, max_length=max_length)
        pulse = Pulse(client, server)
        core = _core(desk, config, client, facts, max_length, pulse)
        desk.ready(parameters=model.parameters)
        await _pass_messages(desk, core, pulse)
    finally:
        if server is not None:
            await server.stop()


def _server(desk: Desk, config: Config, rank: int, key: str, max_length: int) -> VllmServer:
    plan = ServerPlan(
        model=Path(config.model.path),
        config=config.engine,
        log=desk.run_dir / "logs" / f"vllm-{rank}.log",
        key=key,
        max_length=max_length,
        weights=config.model.weights,
        dtype=config.model.dtype,
        seed=config.run.seed,
        rank=rank,
    )
    return VllmServer(plan)


def _core(desk: Desk, config: Config, client: VllmClient, facts: Facts, max_length: int, pulse: Pulse) -> VllmCore:
    def emit(deltas: list[Delta]) -> None:
        desk.count_generated(sum(len(delta.token_ids) for delta in deltas))
        desk.spoke.send(Deltas(deltas=deltas))

    core = VllmCore(
        client,
        facts,
        name=desk.name,
        slots=min(config.engine.slots, facts.slots),
        max_length=max_length,
        interrupt=config.engine.interrupt,
        deadline=config.delivery.deadline,
        keys=str((desk.run_dir / KEYS).absolute()),
        spans=desk.spans,
        pulse=pulse,
        scaling=None if config.lora is None else config.lora.scaling,
    )
    core.emit = emit
    return core


def receive(
    desk: Desk, loop: asyncio.AbstractEventLoop, inbox: asyncio.Queue[Incoming], stopping: threading.Event
) -> None:
    """Put what arrives into the loop's inbox, until it is stopping or has ended."""
    while not stopping.is_set():
        incoming = desk.next_message()
        if incoming is None:
            continue
        try:
            loop.call_soon_threadsafe(inbox.put_nowait, incoming)
        except RuntimeError:
            return  # The loop is closed: the server is lost, and said so; nobody answers any more.


async def _pass_messages(desk: Desk, core: VllmCore, pulse: Pulse) -> None:
    """Until `Stop`: what takes time gets a task of its own, so that no message waits for another's answer.

    Raises `PeerDied` as soon as the server is lost.
    """
    loop = asyncio.get_running_loop()
    inbox: asyncio.Queue[Incoming] = asyncio.Queue()
    stopping = threading.Event()
    receiver = threading.Thread(target=receive, args=(desk, loop, inbox, stopping), name="messages", daemon=True)
    receiver.start()
    tasks: set[asyncio.Task[None]] = set()

    def spawn(work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    watching = asyncio.create_task(pulse.watch(), name="watch the server")
    try:
        while True:
            if watching.done():
                watching.result()
            try:
                async with asyncio.timeout(IDLE_SECONDS):
                    incoming = await inbox.get()
            except TimeoutError:
                continue
            match incoming.message:
                case Submit(requests=requests):
                    core.submit(requests)
                case Abort(ids=ids):
                    spawn(core.abort(ids))
                case Stop():
                    desk.phase = "stopping"
                    break
                case _:
                    spawn(_answer(desk, incoming, core, pulse))
    except PeerDied:
        await core.abandon()
        raise
    finally:
        stopping.set()
        watching.cancel()
        await core.close(f"{desk.name} was stopped")
        await asyncio.gather(*tasks, return_exceptions=True)


async def _answer(desk: Desk, incoming: Incoming, core: VllmCore, pulse: Pulse) -> None:
    reply: Message | None = None
    failure = ""
    try:
        reply = await _reply(incoming.message, core)
    except HeadraceError as error:
        failure = f"{type(error).__name__}: {error}"
    if failure or (isinstance(reply, Proved) and not reply.proof.accepted):
        try:
            await pulse.check()
        except PeerDied:
            return  # The end of this process is the answer: what failed did so for want of a server.
    if reply is not None:
        desk.spoke.reply(incoming, reply)
    else:
        desk.spoke.fail(incoming, failure)


async def _reply(message: Message, core: VllmCore) -> Message:
    match message:
        case Fork():
            raise UserError("vLLM cannot fork a running request")
        case Load(manifest=manifest):
            return Proved(proof=await core.load(manifest))
        case Score(token_ids=token_ids):
            return Scored(logprobs=await core.score(token_ids))
        case other:
            raise HeadraceError(f"an engine was sent a {type(other).__name__}")
