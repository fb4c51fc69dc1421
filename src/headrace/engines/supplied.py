"""Serves an engine that the user supplies: `[engine] kind = "module:attribute"` or `"file.py:attribute"` in the TOML.

The attribute is a factory. Headrace calls it with an `EngineContext`, in the event loop of the engine's process. The
factory returns an object with the methods of `Engine`. It may be a subclass of `PlainEngine`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from headrace.channel.worker_link import WorkerLink
from headrace.config import Config
from headrace.config.hub import model_dir
from headrace.config.memory import longest_sequence
from headrace.config.model_dir import model_facts
from headrace.delivery.base import Manifest, Proof
from headrace.delivery.transports.tcp_wire import KEYS
from headrace.engines.base import Request
from headrace.engines.serving import EventLoopServer, Opened
from headrace.errors import ConfigError, UserError
from headrace.reference import call_factory, import_function
from headrace.types import Float32Array, Int32Array

if TYPE_CHECKING:
    import torch

    from headrace.delivery.receiver import Receiver

METHODS = ("generate", "abort", "fork", "load", "score", "close")


class EngineContext(msgspec.Struct, frozen=True, kw_only=True):
    """The argument of a user's engine factory."""

    name: str
    """The engine's name in the run, such as `engine-0`. `Engine.name` and `Proof.engine` must be this name."""
    config: Config
    model_path: Path
    max_length: int
    """The length of the longest sequence that the engine must serve, in tokens, prompt included."""
    keys: Path
    """The file with the keys of the run, for transports that encrypt."""

    def load_model(self, device: str = "cpu") -> Any:
        """Load the model of the run: a Hugging Face causal LM in eval mode, with transformers' own sdpa attention."""
        from headrace.models.loading import load_model

        given = self.config.model
        model = load_model(
            self.model_path, weights=given.weights, dtype=given.dtype, seed=self.config.run.seed, device=device
        )
        model.set_attn_implementation("sdpa")
        return model

    def receiver(self, model: Any) -> Receiver:
        """Return a receiver for this model. `Receiver.load` fetches new weights, swaps them in and proves them."""
        from headrace.delivery.receiver import Receiver
        from headrace.models.loading import named_weights

        return Receiver(named_weights(model), self.name, keys=self.keys)


class PlainEngine:
    """A base class for engines that run a Hugging Face model: it loads new weights and scores sequences.

    A subclass implements `generate` and `abort`. A pass and a load each run within one turn of the event loop, so a
    pass never sees two versions of the weights.
    """

    def __init__(self, context: EngineContext) -> None:
        self.name = context.name
        self.model = context.load_model()
        self._receiver = context.receiver(self.model)

    @property
    def version(self) -> int:
        """The version that the live weights are proved to be. While it is -1, nothing may be sampled."""
        return self._receiver.version

    def logprobs(self, token_ids: Int32Array | list[int], temperature: float = 1.0) -> torch.Tensor:
        """Return the log-probabilities of all possible next tokens after each of these tokens ([n, vocabulary])."""
        import torch

        with torch.no_grad():
            logits = self.model(torch.tensor(token_ids, dtype=torch.long)[None]).logits[0].float()
        logprobs: torch.Tensor = (logits / temperature).log_softmax(-1)
        return logprobs

    async def load(self, manifest: Manifest) -> Proof:
        """See `Engine.load`."""
        return self._receiver.load(manifest, self._score)

    async def score(self, token_ids: Int32Array) -> Float32Array:
        """See `Engine.score`."""
        return self._score(token_ids)

    async def fork(self, request_id: str, at: int, n: int) -> list[Request]:
        """Raise `UserError`, because requests share nothing in this engine."""
        raise UserError(f"{type(self).__name__} cannot fork a running request: ask for a new one with its tokens")

    async def close(self) -> None:
        """See `Engine.close`."""
        self._receiver.close()

    def _score(self, token_ids: Int32Array) -> Float32Array:
        import torch

        next_ids = torch.tensor(token_ids, dtype=torch.long)[1:, None]
        scores: Float32Array = self.logprobs(token_ids)[:-1].gather(1, next_ids)[:, 0].cpu().numpy()
        return scores


def serve(link: WorkerLink, config: Config) -> None:
    """Serve the engine that `[engine] kind` names, until the controller sends `Stop`."""
    factory = import_function(config.engine.kind)
    EventLoopServer(link, lambda: _opened(factory, link, config)).run()


@asynccontextmanager
async def _opened(factory: Callable[[EngineContext], Any], link: WorkerLink, config: Config) -> AsyncIterator[Opened]:
    model = model_facts(model_dir(config.model), config.model.weights)
    context = EngineContext(
        name=link.name,
        config=config,
        model_path=model_dir(config.model),
        max_length=longest_sequence(config.engine.max_length, model.max_positions),
        keys=link.run_dir / KEYS,
    )
    kind = f"[engine] kind = {config.engine.kind!r}"
    engine = call_factory(kind, factory, context)
    missing = [name for name in METHODS if not callable(getattr(engine, name, None))]
    if missing:
        raise ConfigError(f"{kind}: {type(engine).__name__} has no method {missing[0]!r} (see headrace.engines.base)")
    link.ready(parameters=model.parameters)
    yield Opened(engine)
