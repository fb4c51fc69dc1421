"""A link without a controller: a test gives it messages, and sees what a worker sends and answers."""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from headrace.channel.codec import Message
from headrace.channel.heartbeats import Stop
from headrace.channel.worker_link import Incoming
from headrace.delivery.base import Manifest, Proof
from headrace.engines.base import Delta, Request
from headrace.engines.serving import Abort, Deltas, Load, LoadProved, ScoreTokens, Submit, TokensScored
from headrace.errors import HeadraceError
from headrace.types import Float32Array, Int32Array


class StubLink:
    """What an engine's server uses of a `WorkerLink`."""

    def __init__(self, name: str, emit: Callable[[list[Delta]], object]) -> None:
        self.name = name
        self.phase = ""
        self.generated = 0
        self._emit = emit
        self._inbox: queue.Queue[Incoming] = queue.Queue()
        self._asked: list[Future[Any]] = [Future()]
        """The futures of the questions, by their request ids, which count from 1."""

    def submit(self, requests: list[Request]) -> None:
        self._inbox.put(Incoming(0, Submit(requests=requests)))

    def abort(self, ids: list[str]) -> None:
        self._inbox.put(Incoming(0, Abort(ids=ids)))

    def load(self, manifest: Manifest) -> Future[Proof]:
        return self._ask(Load(manifest=manifest))

    def score(self, token_ids: Int32Array) -> Future[Float32Array]:
        return self._ask(ScoreTokens(token_ids=token_ids))

    def stop(self) -> None:
        self._inbox.put(Incoming(0, Stop()))

    def next_message(self) -> Incoming | None:
        try:
            return self._inbox.get(timeout=0.05)
        except queue.Empty:
            return None

    def count_generated(self, tokens: int) -> None:
        self.generated += tokens

    def send(self, message: Message) -> None:
        assert isinstance(message, Deltas)
        self._emit(message.deltas)

    def reply(self, incoming: Incoming, message: Message) -> None:
        match message:
            case LoadProved(proof=proof):
                self._asked[incoming.request_id].set_result(proof)
            case TokensScored(logprobs=logprobs):
                self._asked[incoming.request_id].set_result(logprobs)
            case other:
                raise AssertionError(other)

    def fail(self, incoming: Incoming, text: str) -> None:
        self._asked[incoming.request_id].set_exception(HeadraceError(text))

    def _ask(self, message: Message) -> Future[Any]:
        self._asked.append(Future())
        self._inbox.put(Incoming(len(self._asked) - 1, message))
        return self._asked[-1]
