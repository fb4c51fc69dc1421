"""The embedded engine in a thread: `EngineLoop` runs commands between two steps, `EmbeddedEngine` is its asyncio side.

Commands run in the order in which they were given. Loads run one after the other: each version is staged in a side
thread while decoding continues, and is swapped in between two steps. When the loop ends, for whatever reason, every
open future has failed and every open request has received its last delta. Requests that are made in one turn of the
event loop enter the engine between the same two steps.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeVar

from headrace.channel.turns import EngineTurns
from headrace.config.schema import EngineConfig
from headrace.delivery.base import Manifest, Proof
from headrace.delivery.receiver import Staged
from headrace.engines.base import Delta, Interrupt, Request, failed_delta
from headrace.engines.embedded.core import EngineCore
from headrace.engines.streams import StreamedEngine
from headrace.errors import DeadlineError, DeliveryError, HeadraceError, UserError
from headrace.models.attention import check_model
from headrace.models.loading import choose_device, load_model
from headrace.types import NO_VERSION, Float32Array, Int32Array, TeacherScores

T = TypeVar("T")

_WAKE_SECONDS = 1.0
"""The longest sleep of an idle loop. Commands wake it at once."""
_TURN_SECONDS = 1e-3
"""How often an engine checks whether the trainer has given the GPU back."""


class EngineLoop:
    """Runs a core in the thread that calls `run`, and waits for commands or work. Any thread may call other methods."""

    def __init__(
        self,
        core: EngineCore,
        emit: Callable[[list[Delta]], None],
        interrupt: Interrupt = "never",
        turns: EngineTurns | None = None,
    ) -> None:
        """Prepare a loop. With `turns`, the engine shares a GPU with a trainer and steps only in its own turn."""
        self._core = core
        self._turns = turns
        self._emit = emit
        self._interrupt = interrupt
        self._changed = threading.Condition()
        self._commands: deque[Callable[[], None]] = deque()
        self._futures: set[Future[Any]] = set()
        self._loads: deque[tuple[Manifest, Future[Proof]]] = deque()
        self._loading: Future[Proof] | None = None
        self._awaited: Staged | None = None
        """Staged weights that are installed between two steps, once the requests that they wait for have ended."""
        self._stopping = False
        self._ended = False
        self._gone = self.reason = f"engine {core.name} has stopped"
        """`reason` says why `run` has ended, and names the error if there was one."""
        self.counters = core.counters
        self._stager = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"{core.name}-stage")

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests. All requests of one call enter between the same two steps."""
        requests = list(requests)
        if not self._post(lambda: self._core.submit(requests)):
            self._emit([failed_delta(request.id, self._gone) for request in requests])

    def abort(self, ids: Sequence[str] | None = None) -> Future[None]:
        """End these requests (all requests if None). The future is done when their last deltas were emitted."""
        return self._ask(lambda: self._deliver(self._core.abort(ids)))

    def load(self, manifest: Manifest) -> Future[Proof]:
        """Stage, swap and prove these weights. A rejected load resolves to a proof that is not accepted."""
        future: Future[Proof] = Future()
        with self._changed:
            if self._ended or self._stopping:
                future.set_exception(HeadraceError(self._gone))
                return future
            self._futures.add(future)
            self._loads.append((manifest, future))
        # Called here, not in the loop's thread, which may be in a step for as long as staging takes.
        self._next_load()
        return future

    def score(self, token_ids: Int32Array) -> Future[Float32Array]:
        """Score tokens 1..n given their prefix, under the live weights."""
        return self._ask(lambda: self._core.score(token_ids))

    def score_likeliest(
        self, token_ids: Int32Array, temperatures: Float32Array, k: int, vocabulary: int
    ) -> Future[TeacherScores]:
        """Score tokens 1..n under the live weights, which must be proved, with the k likeliest tokens."""
        return self._ask(lambda: self._core.score_likeliest(token_ids, temperatures, k, vocabulary))

    def fork(self, request_id: str, at: int, n: int) -> Future[list[Request]]:
        """Make `n` requests that continue a running request after its first `at` tokens."""
        return self._ask(lambda: self._core.fork(request_id, at, n))

    def stop(self) -> None:
        """Make `run` end before its next step. Running requests are aborted. Idempotent."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def run(self) -> None:
        """Serve until stopped. An internal error is raised after all open requests and futures have been answered."""
        try:
            while not self._stopping:
                self._obey()
                self._install_awaited()
                self._report_proof()
                if self._core.has_work and not self._stopping:
                    if self._our_turn():
                        self._deliver(self._core.step())
                else:
                    self._sleep()
        except BaseException as error:
            self.reason = f"engine {self._core.name} died of {type(error).__name__}: {error}"
            raise
        finally:
            self._end()

    def _obey(self) -> None:
        while True:
            with self._changed:
                if not self._commands or self._stopping:
                    return
                command = self._commands.popleft()
            command()

    def _our_turn(self) -> bool:
        """Return whether the engine may step now. If not, wait a short time, so that commands are still run."""
        turns = self._turns
        if turns is None:
            return True
        if turns.wanted:
            # No work of the engine may be in flight when the trainer has the GPU. Deltas are emitted later, because
            # that does not need the GPU.
            deltas = self._core.flush()
            turns.give()
            self._deliver(deltas)
        if turns.take():
            return True
        self._wait(_TURN_SECONDS)
        return False

    def _sleep(self) -> None:
        self._deliver(self._core.flush())
        if self._turns is not None:
            self._turns.give()
        self._wait(_WAKE_SECONDS)

    def _wait(self, seconds: float) -> None:
        spans = self._core.spans
        with spans.span("wait", busy=False) if spans is not None else nullcontext(), self._changed:
            self._changed.wait_for(lambda: self._commands or self._stopping, timeout=seconds)

    def _next_load(self) -> None:
        """Begin to stage the next version, unless a load is running: there is only one staging buffer."""
        with self._changed:
            if self._ended or self._loading or not self._loads:
                return
            manifest, self._loading = self._loads.popleft()
            staging = self._stager.submit(self._core.stage, manifest)
        staging.add_done_callback(lambda staged: self._post(lambda: self._await_rest(manifest, staged)))

    def _await_rest(self, manifest: Manifest, staging: Future[Staged]) -> None:
        """Let the staged weights be installed as soon as `interrupt` allows it."""
        try:
            self._awaited = staging.result(timeout=0)
        except DeliveryError as error:
            self._refused(manifest, error)
            return
        if self._interrupt == "abort":
            self._deliver(self._core.abort_started())
        elif self._interrupt in ("drain", "block"):
            self._core.hold(submitted=self._interrupt == "block")

    def _install_awaited(self) -> None:
        staged = self._awaited
        if staged is None or (self._interrupt in ("drain", "block") and not self._core.at_rest()):
            return
        self._awaited = None
        self._core.let_go()
        try:
            self._core.install(staged)
        except DeliveryError as error:
            self._refused(staged.manifest, error)

    def _refused(self, manifest: Manifest, error: DeliveryError) -> None:
        self._loaded(
            Proof(
                engine=self._core.name,
                version=manifest.version,
                accepted=False,
                quarantined=self._core.quarantined,
                reason=str(error),
            )
        )

    def _report_proof(self) -> None:
        """Report the proof of new weights. Wait for the proof only if there are no steps to make meanwhile."""
        proof = self._core.proof(wait=not self._core.has_work)
        if proof is not None:
            self._loaded(proof)

    def _loaded(self, proof: Proof) -> None:
        with self._changed:
            future, self._loading = self._loading, None
        assert future is not None
        self._answer(future, lambda: proof)
        self._next_load()

    def _deliver(self, deltas: list[Delta]) -> None:
        if deltas:
            self._emit(deltas)

    def _post(self, command: Callable[[], None], future: Future[Any] | None = None) -> bool:
        """Queue a command. Return False if the loop has ended or is stopping."""
        with self._changed:
            if self._ended or self._stopping:
                return False
            if future is not None:
                self._futures.add(future)
            self._commands.append(command)
            self._changed.notify_all()
            return True

    def _ask(self, command: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        if not self._post(lambda: self._answer(future, command), future):
            future.set_exception(HeadraceError(self._gone))
        return future

    def _answer(self, future: Future[Any], command: Callable[[], Any]) -> None:
        """Run a command and settle its future. A `UserError` goes to the caller alone and does not end the loop."""
        result, refusal = None, None
        try:
            result = command()
        except UserError as error:
            refusal = error
        with self._changed:
            self._futures.discard(future)
        # False if the caller cancelled the future: then nobody wants the result.
        if future.set_running_or_notify_cancel():
            if refusal is not None:
                future.set_exception(refusal)
            else:
                future.set_result(result)

    def _end(self) -> None:
        with self._changed:
            self._ended = True
            futures, self._futures = self._futures, set()
            self._commands.clear()
        self._stager.shutdown(wait=True, cancel_futures=True)
        if self._turns is not None:
            self._turns.close()
        try:
            try:
                deltas = self._core.abort()
            except (HeadraceError, RuntimeError):
                # The device no longer answers. Its tokens in flight are lost, but the known tokens are not.
                deltas = self._core.abandon()
            self._deliver(deltas)
            self._core.close()
        finally:
            for future in futures:
                if future.set_running_or_notify_cancel():
                    future.set_exception(HeadraceError(self.reason))


class EmbeddedEngine(StreamedEngine):
    """An `Engine` in this process. It must be made inside a running event loop, and used from that event loop only."""

    def __init__(self, core: EngineCore, config: EngineConfig, *, deadline: float = 120.0) -> None:
        """Start the thread of the engine. `deadline` limits every wait for the thread, in seconds."""
        # An engine without proved weights may be silent for any time, so a delta has no deadline.
        super().__init__(core.name)
        self._deadline = deadline
        self.counters = core.counters
        self._events = asyncio.get_running_loop()
        self._loop = EngineLoop(core, lambda deltas: self._hand_over(self.deliver, deltas), config.interrupt)
        self._thread = threading.Thread(target=self._serve, name=core.name, daemon=True)
        self._thread.start()

    @classmethod
    def from_path(
        cls,
        path: str | Path,
        config: EngineConfig,
        *,
        max_length: int,
        name: str = "engine",
        weights: str = "load",
        dtype: str = "float32",
        seed: int = 0,
        version: int = NO_VERSION,
    ) -> EmbeddedEngine:
        """Load the model in this directory, check it, and return an engine for it.

        With `version = 0`, the engine serves the weights of the directory as version 0. By default it samples nothing
        until weights come by `load`.
        """
        model = load_model(path, weights=weights, dtype=dtype, seed=seed, device=choose_device(config.device, "engine"))
        check_model(model, max_length)
        return cls(EngineCore(model, config, name=name, max_length=max_length, version=version), config)

    async def abort(self, ids: Sequence[str] | None = None) -> None:
        """See `Engine.abort`."""
        self.flush()
        await self._settled(self._loop.abort(ids), "an abort")

    async def load(self, manifest: Manifest) -> Proof:
        """See `Engine.load`."""
        return await self._settled(self._loop.load(manifest), f"version {manifest.version}")

    async def score(self, token_ids: Int32Array) -> Float32Array:
        """See `Engine.score`."""
        return await self._settled(self._loop.score(token_ids), "a score")

    async def fork(self, request_id: str, at: int, n: int) -> list[Request]:
        """See `Engine.fork`."""
        self.flush()
        return await self._settled(self._loop.fork(request_id, at, n), "a fork")

    async def close(self) -> None:
        """See `Engine.close`."""
        self.flush()
        self._loop.stop()
        await asyncio.to_thread(self._thread.join, self._deadline)
        if self._thread.is_alive():
            raise DeadlineError(f"engine {self.name} did not end its step in {self._deadline:g} s")

    def _submit(self, requests: list[Request]) -> None:
        self._loop.submit(requests)

    def _withdraw(self, request_id: str) -> None:
        self._loop.abort([request_id])

    def _serve(self) -> None:
        try:
            self._loop.run()
        finally:
            self._hand_over(self.lost, self._loop.reason)

    def _hand_over(self, take: Callable[[T], None], what: T) -> None:
        # When the event loop is closed, nobody reads the deltas.
        if not self._events.is_closed():
            self._events.call_soon_threadsafe(take, what)

    async def _settled(self, future: Future[T], what: str) -> T:
        try:
            async with asyncio.timeout(self._deadline):
                return await asyncio.wrap_future(future)
        except TimeoutError as error:
            raise DeadlineError(f"engine {self.name} did not answer {what} in {self._deadline:g} s") from error
