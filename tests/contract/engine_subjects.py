"""The engines under contract. To add one: write a factory like those below and name it in `FACTORIES`."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig

from headrace.channel.codec import Message
from headrace.channel.heartbeats import Ready, Stop
from headrace.channel.hub import Hub
from headrace.channel.worker_link import WorkerLink
from headrace.config import Config, make_config
from headrace.config.schema import EngineConfig
from headrace.delivery.base import Manifest, Proof
from headrace.delivery.publisher import Publisher
from headrace.delivery.transports.base import Sender
from headrace.delivery.transports.shm import ShmSender
from headrace.engines.base import Counters, Interrupt, Sampler
from headrace.engines.embedded.building import build, pass_messages
from headrace.engines.embedded.engine import EmbeddedEngine, EngineLoop
from headrace.engines.fake import FakeEngine
from headrace.engines.fake_policy import FakePolicy
from headrace.engines.pool import EnginePool
from headrace.engines.serving import Deltas, EventLoopServer, Opened, RemoteEngine
from headrace.models.loading import named_weights
from headrace.types import Float32Array, Int32Array

SLOTS = 4
VOCABULARY = 64
MAX_LENGTH = 4096
PUBLISH_SECONDS = 120.0


@dataclass
class Subject:
    """An engine and what a test needs to drive and to check it."""

    engine: Sampler
    load: Callable[[Manifest], Awaitable[Proof]]
    """Brings weights to the engine, or to every member of a pool."""
    counters: Callable[[], Counters]
    publish: Callable[[int], Awaitable[Manifest]]
    """Publishes weights for this version, different from those of every other version, and returns their manifest."""
    reference: Callable[[int, Int32Array], Float32Array]
    """Log-probabilities of tokens 1..n under a published version, computed without the engine."""
    slots: int = SLOTS
    """Sequences that the engine runs at a time, all members together."""
    vocabulary: int = VOCABULARY


@dataclass(frozen=True)
class Setting:
    """What a factory is asked for."""

    tmp_path: Path
    model_dir: Path
    interrupt: Interrupt


Factory = Callable[[Setting], AbstractAsyncContextManager[Subject]]


@asynccontextmanager
async def fake(setting: Setting) -> AsyncIterator[Subject]:
    policy = FakePolicy(VOCABULARY)
    engine = FakeEngine(policy=policy, slots=SLOTS, interrupt=setting.interrupt)
    try:
        yield Subject(engine, engine.load, engine.counters, _fake_publish(policy), _fake_reference(policy))
    finally:
        await engine.close()


@asynccontextmanager
async def pool_of_fakes(setting: Setting) -> AsyncIterator[Subject]:
    policy = FakePolicy(VOCABULARY)
    members = [
        FakeEngine(name=f"fake{i}", policy=policy, slots=SLOTS // 2, interrupt=setting.interrupt) for i in range(2)
    ]
    pool = EnginePool(members)

    async def load(manifest: Manifest) -> Proof:
        """Bring weights to every member and declare them, as a run does."""
        proofs = await asyncio.gather(*(member.load(manifest) for member in members))
        for proof in proofs:
            pool.loaded(proof)
        if any(proof.accepted for proof in proofs):
            pool.floor = manifest.version
        return next((proof for proof in proofs if not proof.accepted), proofs[0])

    def counters() -> Counters:
        each = [member.counters() for member in members]
        total = {
            name: sum(getattr(one, name) for one in each) for name in Counters.__struct_fields__ if name != "version"
        }
        served = [version for member in members if (version := pool.proved(member.name)) >= max(0, pool.floor)]
        return Counters(version=min(served, default=-1), **{**total, "waiting": total["waiting"] + pool.waiting})

    try:
        yield Subject(pool, load, counters, _fake_publish(policy), _fake_reference(policy))
    finally:
        await pool.close()


@asynccontextmanager
async def embedded(setting: Setting) -> AsyncIterator[Subject]:
    trainer = TinyTrainer(setting.model_dir)
    config = EngineConfig(slots=SLOTS, block_size=8, prefill_chunk=32, interrupt=setting.interrupt, kv="recompute")
    engine = EmbeddedEngine.from_path(setting.model_dir, config, max_length=MAX_LENGTH, name="embedded")
    try:
        yield Subject(engine, engine.load, engine.counters, trainer.publish, trainer.reference)
    finally:
        await engine.close()
        trainer.close()


@asynccontextmanager
async def over_the_wire(setting: Setting, serve: Callable[[WorkerLink, Config], None]) -> AsyncIterator[RemoteEngine]:
    """The engine role of a worker behind the real wire; its process is a thread here, to save a start for each test."""
    sockets = Path(tempfile.mkdtemp())
    engines: dict[str, RemoteEngine] = {}
    ready = asyncio.Event()

    def on_message(peer: str, message: Message) -> None:
        if isinstance(message, Ready):
            ready.set()
        elif isinstance(message, Deltas):
            engines[peer].deliver(message.deltas)

    hub = Hub(f"ipc://{sockets}/hub", on_message)
    hub.start()
    link = WorkerLink("engine-0", hub.address, setting.tmp_path)
    link.start()
    engine_config = {"slots": SLOTS, "block_size": 8, "prefill_chunk": 32, "interrupt": setting.interrupt}
    config = make_config(
        {
            "model": {"path": str(setting.model_dir)},
            "task": {"kind": "gym", "name": "unused"},
            "engine": {**engine_config, "max_length": MAX_LENGTH},
        }
    )
    worker = threading.Thread(target=serve, args=(link, config))
    worker.start()
    await asyncio.wait_for(ready.wait(), 30)
    engine = engines["engine-0"] = RemoteEngine(hub, "engine-0", load_deadline=20, token_deadline=20)
    try:
        yield engine
    finally:
        await engine.close()
        await hub.send("engine-0", Stop())
        await asyncio.to_thread(worker.join, 20)
        link.close()
        await hub.close()
        shutil.rmtree(sockets)


@asynccontextmanager
async def remote(setting: Setting) -> AsyncIterator[Subject]:
    """The embedded engine as a run has it."""
    loops: list[EngineLoop] = []
    built = threading.Event()

    def serve_loop(link: WorkerLink, config: Config) -> None:
        loop = build(link, config)
        loops.append(loop)
        built.set()  # It has said before that it is ready.
        threading.Thread(target=pass_messages, args=(link, loop), daemon=True).start()
        loop.run()

    trainer = TinyTrainer(setting.model_dir)
    try:
        async with over_the_wire(setting, serve_loop) as engine:
            await asyncio.wait_for(asyncio.to_thread(built.wait, 60), 90)
            yield Subject(engine, engine.load, loops[0].counters, trainer.publish, trainer.reference)
    finally:
        trainer.close()


@asynccontextmanager
async def event_loop(setting: Setting) -> AsyncIterator[Subject]:
    """An engine that is served by an event loop, as vLLM and engines of users are."""
    policy = FakePolicy(VOCABULARY)
    engines: list[FakeEngine] = []

    def serve(link: WorkerLink, config: Config) -> None:
        @asynccontextmanager
        async def opened() -> AsyncIterator[Opened]:
            # Its tokens take time: tests must see what runs and what waits, from another thread.
            made = FakeEngine(
                name=link.name, policy=policy, slots=SLOTS, interrupt=setting.interrupt, token_seconds=0.003
            )
            engines.append(made)
            link.ready()
            yield Opened(made)

        EventLoopServer(link, opened).run()

    async with over_the_wire(setting, serve) as engine:
        yield Subject(engine, engine.load, engines[0].counters, _fake_publish(policy), _fake_reference(policy))


FACTORIES: dict[str, Factory] = {
    "fake": fake,
    "pool": pool_of_fakes,
    "embedded": embedded,
    "remote": remote,
    "event loop": event_loop,
}


class TinyTrainer:
    """Publishes a random model's weights, new ones for each version, and scores with plain Hugging Face code."""

    def __init__(
        self, model_dir: Path, *, change: float = 0.05, sender: Sender | None = None, device: str = "cpu"
    ) -> None:
        """`change`: how far one version is from the next."""
        self._change = change
        self._device = device
        self.model: Any = AutoModelForCausalLM.from_pretrained(model_dir, attn_implementation="eager").eval().to(device)
        self._sender = sender or ShmSender(f"contract-{id(self):x}")
        self._publisher = Publisher(self._sender, "float32", 1e-3, np.arange(1, 13, dtype=np.int32))
        self._versions: dict[int, dict[str, torch.Tensor]] = {}

    async def publish(self, version: int) -> Manifest:
        noise = torch.Generator().manual_seed(version)
        with torch.no_grad():
            for weight in named_weights(self.model).values():
                weight.add_(self._change * torch.randn(weight.shape, generator=noise).to(self._device))
        weights = {name: weight.clone() for name, weight in named_weights(self.model).items()}
        for older in self._versions:
            self._publisher.acknowledged(older)
        self._versions[version] = weights
        future = self._publisher.publish(version, version - 1, version, weights, self._score)
        return await asyncio.wait_for(asyncio.wrap_future(future), PUBLISH_SECONDS)

    def reference(self, version: int, token_ids: Int32Array) -> Float32Array:
        with torch.no_grad():
            for name, weight in named_weights(self.model).items():
                weight.copy_(self._versions[version][name])
        return self._score(token_ids)

    def close(self) -> None:
        self._publisher.close()

    def _score(self, token_ids: Int32Array) -> Float32Array:
        ids = torch.from_numpy(np.asarray(token_ids, np.int64))[None].to(self._device)
        with torch.no_grad():
            logprobs = self.model(ids).logits.float().log_softmax(-1)[0, :-1]
        return np.asarray(logprobs.gather(1, ids[0, 1:, None])[:, 0].cpu().numpy(), np.float32)


def save_tiny_llama(path: Path, layers: int = 2, spread: float = 0.5, head_dim: int = 8, hidden: int = 16) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=head_dim,
        max_position_embeddings=MAX_LENGTH,
        initializer_range=spread,
    )
    LlamaForCausalLM(config).save_pretrained(path)


def save_tiny_mixture(path: Path) -> None:
    """A mixture of experts whose second layer is dense."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        mlp_only_layers=[1],
        max_position_embeddings=MAX_LENGTH,
        initializer_range=0.2,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(path)


def _fake_publish(policy: FakePolicy) -> Callable[[int], Awaitable[Manifest]]:
    async def publish(version: int) -> Manifest:
        return policy.manifest(version, parent=version - 1)

    return publish


def _fake_reference(policy: FakePolicy) -> Callable[[int, Int32Array], Float32Array]:
    return lambda version, token_ids: policy.score(token_ids, version)
