"""Builds an embedded engine in a worker process, and serves it.

The engine runs in the main thread, and a second thread only passes messages. So a swap or an abort never waits for the
controller, and a slow controller never delays a decode step.
"""

import logging
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from headrace.channel.codec import Message
from headrace.channel.heartbeats import Stop
from headrace.channel.turns import FILE as TURNS
from headrace.channel.turns import EngineTurns
from headrace.channel.vital import vital_thread
from headrace.channel.worker_link import Incoming, WorkerLink
from headrace.config.hub import model_dir
from headrace.config.memory import EVERY_ENGINE, longest_sequence, share_beside_trainer
from headrace.config.schema import Config, LoraConfig
from headrace.config.staging import with_second_copy
from headrace.delivery.digest import digest_as
from headrace.delivery.receiver import BaseDigest
from headrace.delivery.shared_base import find_base
from headrace.delivery.transports.tcp_wire import KEYS
from headrace.engines.embedded.core import EngineCore
from headrace.engines.embedded.engine import EngineLoop
from headrace.engines.embedded.setup import give_way_to_decoding, make_host_runner, make_runner
from headrace.engines.serving import Submit, begin, send_deltas
from headrace.models.attention import check_model
from headrace.models.loading import choose_device, hold_weights, load_model, named_weights
from headrace.models.lora import Adapter, check_shareable, frozen_linears
from headrace.models.rounding import round_weights
from headrace.types import NO_VERSION

logger = logging.getLogger(__name__)


def _round_as_the_trainer(model: Any, config: Config, lora: LoraConfig) -> None:
    """Round the weights to the trainer's 4-bit values. They are rounded from float32, whatever dtype is served."""
    spared = tuple(lora.modules)
    sources = None
    if config.model.dtype != "float32":
        whole = load_model(model_dir(config.model), weights=config.model.weights, dtype="float32", seed=config.run.seed)
        sources = frozen_linears(whole, spared)
    round_weights(frozen_linears(model, spared), sources)


def _hold_shared_base(model: Any, config: Config, lora: LoraConfig, own: int, run_dir: Path) -> BaseDigest:
    """Let this model compute with the trainer's base instead of its own copy. Return the function that digests it."""
    check_shareable(model, lora)
    base = find_base(run_dir, named_weights(model), config.model.dtype, own, config.pipeline.start_seconds)
    hold_weights(model, base.weights)
    return base.digest


def build(link: WorkerLink, config: Config, version: int = NO_VERSION) -> EngineLoop:
    """Load the model, check it, prepare the engine and report to the link that it is ready.

    With a `version`, the engine serves the weights of the model's files as this version.
    """
    device = choose_device(config.engine.device, "engine")
    engine = with_second_copy(config)
    own = link.name.startswith("engine")
    shared = own and device == "cuda" and any(name.startswith("trainer") for name in link.neighbours)
    beside = 1 + sum(name.startswith("engine") for name in link.neighbours)
    if shared:
        total = torch.cuda.get_device_properties(0).total_memory
        engine = msgspec.structs.replace(engine, memory_fraction=share_beside_trainer(config, total, beside))
    elif beside > 1 and engine.memory_fraction is None:
        engine = msgspec.structs.replace(engine, memory_fraction=EVERY_ENGINE / beside)
    with link.spans.span("load"):
        model = load_model(
            model_dir(config.model),
            weights=config.model.weights,
            dtype=config.model.dtype,
            seed=config.run.seed,
            device=device,
        )
        base_digest: BaseDigest | None = None
        adapter = None
        if config.lora is not None:
            if config.lora.base == "nf4":
                _round_as_the_trainer(model, config, config.lora)
            base_digest = digest_as(named_weights(model), config.model.dtype)
            if config.lora.share_base:
                base_digest = _hold_shared_base(model, config, config.lora, base_digest, link.run_dir)
            adapter = Adapter(model, config.lora, config.lora.serve)
        max_length = longest_sequence(engine.max_length, getattr(model.config, "max_position_embeddings", 0))
        check_model(model, max_length)
    link.phase = "preparing"
    core = EngineCore(
        model,
        engine,
        name=link.name,
        max_length=max_length,
        version=version,
        adapter=adapter,
        base_digest=base_digest,
        spans=link.spans,
        keys=link.run_dir / KEYS,
        # With a shared base, `base_digest` is a function. Packed layers would be a second copy of the base.
        make_runner=partial(make_host_runner, pack=False) if callable(base_digest) else make_runner,
    )
    turns = EngineTurns(link.run_dir / TURNS) if shared and config.pipeline.one_gpu == "turns" else None
    loop = EngineLoop(core, partial(send_deltas, link), interrupt=engine.interrupt, turns=turns)
    give_way_to_decoding()
    logger.info("new weights are staged: %s (%s)", core.staging.staging, core.staging.why)
    link.ready(
        parameters=sum(p.numel() for p in model.parameters()),
        staging=core.staging.staging,
        staging_why=core.staging.why,
    )
    return loop


def serve(link: WorkerLink, config: Config, version: int = NO_VERSION) -> None:
    """Build the engine and serve it until the controller sends `Stop`. See `build`."""
    loop = build(link, config, version)
    vital_thread(pass_messages, link, loop, name="messages").start()
    loop.run()


def pass_messages(link: WorkerLink, loop: EngineLoop) -> None:
    """Pass the controller's messages to the engine, until the message is `Stop`."""
    while True:
        incoming = link.next_message()
        if incoming is None:
            continue
        match incoming.message:
            case Submit(requests=requests):
                loop.submit(requests)
            case Stop():
                link.phase = "stopping"
                loop.stop()
                return
            case question:
                future, wrap = begin(question, loop)
                if wrap is not None:
                    future.add_done_callback(partial(_answer, link, incoming, wrap))


def _answer(link: WorkerLink, incoming: Incoming, wrap: Callable[[Any], Message], future: Future[Any]) -> None:
    error = future.exception()
    if error is not None:
        link.fail(incoming, f"{type(error).__name__}: {error}")
    else:
        link.reply(incoming, wrap(future.result()))
