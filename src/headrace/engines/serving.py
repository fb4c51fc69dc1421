"""An engine in a worker process: the messages, the controller's end (`RemoteEngine`), and a worker's end.

At the worker's end, `EventLoopServer` answers the messages for any asyncio engine, and `embedded.building` for the
embedded engine. If an engine depends on something outside of its process and that is lost, the process ends, and open
requests and questions get no answer. The supervisor then restarts the process, and the requests are resumed on other
engines.

`EventLoopServer` has an event loop, with one task for each message of the controller:

    Submit ─▶ a task per request: engine.generate ─▶ outbox ─(10 ms)─▶ the controller
    Fork, Load, ScoreTokens ─▶ a task each ─▶ its reply

vLLM servers and engines of users are served in this way. If the engine loses something that it depends on, `run` raises
`PeerDied` after it has sent the tokens that were drawn.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

import msgspec

from headrace.channel.codec import Message, encode
from headrace.channel.heartbeats import Stop
from headrace.channel.hub import Hub
from headrace.channel.worker_link import Incoming, WorkerLink
from headrace.delivery.base import Manifest, Proof
from headrace.engines.base import Delta, Engine, Request, closing_deltas, failed_delta
from headrace.engines.streams import StreamedEngine
from headrace.errors import ChannelError, HeadraceError, PeerDied, one_line
from headrace.types import Float32Array, Int32Array, TeacherScores

FLUSH_SECONDS = 0.01
"""Deltas that arrive within this time are emitted together."""
WATCH_SECONDS = 1.0
"""The time between two checks whether the engine is lost."""
CLOSE_SECONDS = 10.0
"""How long open requests and calls may take to end after the engine was closed; then they are cancelled."""


class Submit(Message):
    """Requests that enter the engine between the same two steps, in this order."""

    requests: list[Request]


class Deltas(Message):
    """New tokens of any number of requests."""

    deltas: list[Delta]


class Abort(Message):
    """End these requests, or all requests if `ids` is None."""

    ids: list[str] | None


class Fork(Message):
    """Make `n` requests that continue a running request after its first `at` tokens. The answer is `Forked`."""

    request_id: str
    at: int
    n: int


class Forked(Message):
    """The new requests, which the controller may submit."""

    requests: list[Request]


class Load(Message):
    """Fetch, swap in and prove these weights. The answer is `LoadProved`."""

    manifest: Manifest


class LoadProved(Message):
    """The outcome of a `Load`, accepted or rejected."""

    proof: Proof


class ScoreTokens(Message):
    """Score a sequence under the live weights. The answer is `TokensScored`."""

    token_ids: Int32Array


class TokensScored(Message):
    """The log-probabilities of tokens 1..n of a sequence."""

    logprobs: Float32Array


class ScoreLikeliest(Message):
    """Score a sequence as a teacher does. The answer is `LikeliestScored`. Only embedded engines answer it."""

    token_ids: Int32Array
    temperatures: Float32Array
    """The temperature at which each token was sampled."""
    k: int
    vocabulary: int
    """The likeliest tokens are chosen among the first so many tokens."""


class LikeliestScored(Message):
    """The scores of a sequence, with the proved version that gave them."""

    scores: TeacherScores


def send_deltas(link: WorkerLink, deltas: list[Delta]) -> None:
    """Send new tokens of any number of requests from a worker to the controller."""
    link.count_generated(sum(len(delta.token_ids) for delta in deltas))
    try:
        link.send(Deltas(deltas=deltas))
    except ChannelError:
        link.send(
            Deltas(deltas=[failed_delta(delta.id, why) if (why := unsendable(delta)) else delta for delta in deltas])
        )


def unsendable(part: msgspec.Struct) -> str:
    """Return why a part of a message cannot be encoded; empty if it can."""
    try:
        encode(part)
    except ChannelError as error:
        return one_line(str(error))
    return ""


def begin(message: Message, engine: Any) -> tuple[Any, Callable[[Any], Message] | None]:
    """Begin what a message asks of an engine that has the methods `abort`, `fork`, `load` and `score`.

    Returns the call's pending result (a future or a coroutine), and the function that makes the reply of it, if the
    message gets a reply.
    """
    match message:
        case Abort(ids=ids):
            return engine.abort(ids), None
        case Fork(request_id=request_id, at=at, n=n):
            return engine.fork(request_id, at, n), lambda requests: Forked(requests=requests)
        case Load(manifest=manifest):
            return engine.load(manifest), lambda proof: LoadProved(proof=proof)
        case ScoreTokens(token_ids=token_ids):
            return engine.score(token_ids), lambda logprobs: TokensScored(logprobs=logprobs)
        case ScoreLikeliest(token_ids=token_ids, temperatures=heat, k=k, vocabulary=vocabulary):
            scored = engine.score_likeliest(token_ids, heat, k, vocabulary)
            return scored, lambda scores: LikeliestScored(scores=scores)
    raise HeadraceError(f"an engine was sent a {type(message).__name__}")


class RemoteEngine(StreamedEngine):
    """The controller's handle of an engine in another process: an `Engine` that is reached through a hub.

    Requests that are made in one turn of the event loop are sent as one message. At depth 0, the engine's whole
    schedule therefore follows from that one message.
    """

    def __init__(self, hub: Hub, name: str, *, load_deadline: float, token_deadline: float) -> None:
        super().__init__(name, deadline=token_deadline)
        self._hub = hub
        self._deadline = token_deadline
        self._load_deadline = load_deadline
        self._sending: set[asyncio.Task[None]] = set()

    async def abort(self, ids: Sequence[str] | None = None) -> None:
        """See `Engine.abort`."""
        await self._submitted()
        with contextlib.suppress(PeerDied):  # A dead process runs no requests.
            await self._hub.send(self.name, Abort(ids=None if ids is None else list(ids)))

    async def fork(self, request_id: str, at: int, n: int) -> list[Request]:
        """See `Engine.fork`."""
        await self._submitted()
        fork = Fork(request_id=request_id, at=at, n=n)
        return (await self._hub.request(self.name, fork, Forked, timeout=self._deadline)).requests

    async def load(self, manifest: Manifest) -> Proof:
        """See `Engine.load`."""
        load = Load(manifest=manifest)
        return (await self._hub.request(self.name, load, LoadProved, timeout=self._load_deadline)).proof

    async def score(self, token_ids: Int32Array) -> Float32Array:
        """See `Engine.score`."""
        score = ScoreTokens(token_ids=token_ids)
        return (await self._hub.request(self.name, score, TokensScored, timeout=self._deadline)).logprobs

    async def close(self) -> None:
        """End open requests as failed. The process itself is not touched: it belongs to its launcher."""
        self.lost("the engine was closed")
        await asyncio.gather(*self._sending, return_exceptions=True)

    async def _submitted(self) -> None:
        """Wait until earlier requests are sent. An abort that arrived before its request would do nothing."""
        self.flush()
        await asyncio.gather(*self._sending)

    def _submit(self, requests: list[Request]) -> None:
        self._spawn(self._send(requests))

    async def _send(self, requests: list[Request]) -> None:
        try:
            await self._hub.send(self.name, Submit(requests=requests))
        except PeerDied:
            raise
        except ChannelError:
            # A value of one request cannot be encoded. That request fails, and those beside it are sent.
            problems = {request.id: unsendable(request) for request in requests}
            self.deliver(failed_delta(id, why) for id, why in problems.items() if why)
            await self._hub.send(self.name, Submit(requests=[one for one in requests if not problems[one.id]]))

    def _withdraw(self, request_id: str) -> None:
        self._spawn(self._hub.send(self.name, Abort(ids=[request_id])))

    def _spawn(self, sending: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(self._sent(sending), name=f"{self.name} send")
        self._hub.watch(task)
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def _sent(self, sending: Coroutine[Any, Any, None]) -> None:
        # If the engine's process has died, the send fails, and `lost` will end the request. It must not end here
        # already: the pool does not know of the death yet, so it could not resume the request on another engine.
        with contextlib.suppress(PeerDied):
            await sending


@dataclass(frozen=True)
class Opened:
    """An engine that is ready to serve."""

    engine: Engine
    check: Callable[[], Awaitable[None]] | None = None
    """Raises `PeerDied` if something that the engine depends on, such as a server process, is lost.

    A failure is reported to the caller only after a check that found nothing lost.
    """


class EventLoopServer:
    """Runs an asyncio `Engine` and answers the controller's messages to it."""

    def __init__(self, link: WorkerLink, open_engine: Callable[[], AbstractAsyncContextManager[Opened]]) -> None:
        """Prepare a server. `open_engine` is entered inside the event loop, and left after the engine was closed."""
        self._link = link
        self._open = open_engine
        self._ended = False
        self._gone = f"engine {link.name} has stopped"
        self._lost = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._unanswered: dict[int, Incoming] = {}
        self._outbox: list[Delta] = []

    def run(self) -> None:
        """Serve until the controller sends `Stop`. Every open request then has received its last delta.

        Raises `PeerDied` if the engine is lost, and any error of a task that is not a `HeadraceError`.
        """
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        async with self._open() as opened:
            self._engine, self._check_engine = opened.engine, opened.check
            try:
                await self._until_stopped()
            except PeerDied:
                self._lost = True
                raise
            except BaseException as error:
                self._gone = f"engine {self._link.name} died of {type(error).__name__}: {error}"
                raise
            finally:
                await self._end()

    async def _until_stopped(self) -> None:
        """Return when told to stop. Raise the error of a task, and `PeerDied` as soon as the engine is lost."""
        ends: list[asyncio.Future[Any]] = [asyncio.ensure_future(self._obey()), self._failure]
        if self._check_engine is not None:
            ends.append(asyncio.ensure_future(self._watch(self._check_engine)))
        try:
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for end in done:
                end.result()
        finally:
            for end in ends:
                end.cancel()

    async def _obey(self) -> None:
        """Begin what the controller's messages ask for, until the message is `Stop`."""
        while True:
            incoming = await asyncio.to_thread(self._link.next_message)
            if incoming is None:
                continue
            match incoming.message:
                case Submit(requests=requests):
                    for request in requests:
                        self._spawn(self._read(request))
                case Stop():
                    self._link.phase = "stopping"
                    return
                case _:
                    self._spawn(self._answer(incoming))

    async def _end(self) -> None:
        self._ended = True
        await asyncio.sleep(0)  # Tasks that have just been made begin first.
        await self._engine.close()
        if self._tasks:
            _, late = await asyncio.wait(set(self._tasks), timeout=CLOSE_SECONDS)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        self._flush()
        for incoming in () if self._lost else self._unanswered.values():
            self._link.fail(incoming, f"HeadraceError: {self._gone}")

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._failure.done():
            self._failure.set_exception(error)

    async def _answer(self, incoming: Incoming) -> None:
        """Do what a message asks for, and answer it. If the engine is lost, this process ends without an answer."""
        self._unanswered[incoming.request_id] = incoming
        failure: HeadraceError | None = None
        try:
            pending, wrap = begin(incoming.message, self._engine)
            result = await pending
        except PeerDied:
            raise
        except HeadraceError as error:
            failure = error
        if failure is not None or (isinstance(result, Proof) and not result.accepted):
            await self._check()
        self._unanswered.pop(incoming.request_id, None)
        if self._lost:
            return
        if failure is not None:
            self._link.fail(incoming, f"{type(failure).__name__}: {failure}")
        elif wrap is not None:
            self._link.reply(incoming, wrap(result))

    async def _read(self, request: Request) -> None:
        """Hand out the deltas of a request. Exactly one of them is the last delta."""
        last = failed_delta(request.id, f"engine {self._link.name} gave request {request.id} no last delta")
        try:
            async with closing_deltas(self._engine.generate(request)) as deltas:
                async for delta in deltas:
                    if delta.finish is not None:
                        last = delta
                        break
                    self._hand_out(delta)
        except PeerDied:
            raise
        except HeadraceError as error:
            last = failed_delta(request.id, f"{type(error).__name__}: {error}")
        if last.finish == "failed":
            await self._check()
        self._hand_out(last)

    async def _check(self) -> None:
        """Raise `PeerDied` if the engine is lost, because a failure may have that cause."""
        if self._check_engine is not None and not self._ended:
            await self._check_engine()

    async def _watch(self, check: Callable[[], Awaitable[None]]) -> None:
        while True:
            await check()
            await asyncio.sleep(WATCH_SECONDS)

    def _hand_out(self, delta: Delta) -> None:
        if self._lost and delta.finish in ("failed", "aborted"):
            delta = msgspec.structs.replace(delta, finish=None, error="")
            if not len(delta.token_ids):
                return
        self._outbox.append(delta)
        if len(self._outbox) == 1:
            asyncio.get_running_loop().call_later(FLUSH_SECONDS, self._flush)

    def _flush(self) -> None:
        deltas, self._outbox = self._outbox, []
        if deltas:
            send_deltas(self._link, deltas)
