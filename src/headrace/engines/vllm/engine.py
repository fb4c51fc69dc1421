"""Makes an `Engine` of a vLLM server. It is driven from this process's event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from pathlib import Path
from typing import Any

from headrace.config.model_dir import model_facts
from headrace.config.schema import EngineConfig, LoraConfig
from headrace.delivery.base import Manifest, Proof
from headrace.engines.base import Delta, Request
from headrace.engines.counters import Counters
from headrace.engines.streams import DeltaStreams
from headrace.engines.vllm.checks import examine
from headrace.engines.vllm.client import VllmClient
from headrace.engines.vllm.core import VllmCore
from headrace.errors import HeadraceError, UserError
from headrace.types import Float32Array, Int32Array


class VllmEngine:
    """An `Engine` on a vLLM server. It is made inside a running event loop, and used from that event loop only."""

    def __init__(self, core: VllmCore) -> None:
        self.name = core.name
        self._core = core
        self._streams = DeltaStreams(core.name, core.submit, lambda request_id: self._spawn(core.abort([request_id])))
        self._tasks: set[asyncio.Task[None]] = set()
        core.emit = self._streams.deliver

    @classmethod
    async def attach(
        cls,
        url: str,
        model: str | Path,
        config: EngineConfig,
        *,
        key: str = "",
        max_length: int,
        name: str = "vllm",
        weights: str = "load",
        dtype: str = "float32",
        deadline: float = 120.0,
        lora: LoraConfig | None = None,
    ) -> VllmEngine:
        """Examine the server at this URL and return an engine on it.

        `model` is the directory that the server must be serving. With `lora`, adapters of that kind are delivered.
        """
        vocabulary = model_facts(Path(model), weights).vocabulary
        client = VllmClient(url, key, deadline=deadline, slots=config.slots)
        try:
            facts = await examine(client, vocabulary=vocabulary, dtype=dtype, max_length=max_length)
        except HeadraceError:
            await client.close()
            raise
        core = VllmCore(
            client,
            facts,
            name=name,
            slots=min(config.slots, facts.slots),
            max_length=max_length,
            interrupt=config.interrupt,
            deadline=deadline,
            scaling=None if lora is None else lora.scaling,
        )
        return cls(core)

    def generate(self, request: Request) -> AsyncIterator[Delta]:
        """See `Engine.generate`."""
        return self._streams.generate(request)

    async def abort(self, ids: Sequence[str] | None = None) -> None:
        """See `Engine.abort`."""
        self._streams.flush()
        await self._core.abort(ids)

    async def fork(self, request_id: str, at: int, n: int) -> list[Request]:
        """Raise `UserError`, because vLLM cannot fork a request."""
        raise UserError(
            "vLLM cannot fork a running request: ask for a new one with its tokens as the prompt, which the server's"
            " prefix cache shares"
        )

    async def load(self, manifest: Manifest) -> Proof:
        """See `Engine.load`."""
        return await self._core.load(manifest)

    async def score(self, token_ids: Int32Array) -> Float32Array:
        """See `Engine.score`."""
        return await self._core.score(token_ids)

    def counters(self) -> Counters:
        """Return the counters and the occupancy of the engine, at some moment near the call."""
        return self._core.counters()

    async def close(self) -> None:
        """See `Engine.close`."""
        reason = f"engine {self.name} was closed"
        await self._core.close(reason)
        self._streams.lost(reason)
        await asyncio.gather(*self._tasks)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name=f"{self.name} abort")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
