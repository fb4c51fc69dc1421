"""A base class of engines that run in another thread, process or server: their open requests, as streams of deltas.

    generate ──outbox──▶ _submit        deliver ──a queue per request──▶ generate

Requests that are made in one turn of the event loop are submitted together, so the batch that enters the engine does
not depend on the speed of the caller. A request id is open at most once. Its iterator ends with exactly one last delta
or with an error. Nothing is sent to an engine that is lost.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable

from headrace.engines.base import Delta, Request, failed_delta
from headrace.errors import DeadlineError


class StreamedEngine:
    """The open requests of one engine, each with a queue of deltas. It is used from one event loop only.

    A subclass sends requests on in `_submit` and `_withdraw`. The engine's deltas are passed to `deliver`. `lost` is
    called when the engine is gone.
    """

    def __init__(self, name: str, *, deadline: float | None = None) -> None:
        """`deadline` is the longest time between two deltas of a request in seconds; None waits until `lost`."""
        self.name = name
        self._token_deadline = deadline
        self._open: dict[str, asyncio.Queue[Delta]] = {}
        self._outbox: list[Request] = []
        self._death: str | None = None

    def _submit(self, requests: list[Request]) -> None:
        """Send these requests to the engine."""
        raise NotImplementedError

    def _withdraw(self, request_id: str) -> None:
        """Abort a request that nobody reads any more."""
        raise NotImplementedError

    async def generate(self, request: Request) -> AsyncIterator[Delta]:
        """See `Engine.generate`."""
        if self._death is not None or request.id in self._open:
            yield failed_delta(request.id, self._death or f"a request with id {request.id!r} is already running")
            return
        stream = self._open[request.id] = asyncio.Queue()
        finished = False
        try:
            self._outbox.append(request)
            if len(self._outbox) == 1:
                asyncio.get_running_loop().call_soon(self.flush)
            while not finished:
                try:
                    async with asyncio.timeout(self._token_deadline):
                        delta = await stream.get()
                except TimeoutError as error:
                    waited = f"{self.name} sent nothing for a request in {self._token_deadline:g} s"
                    raise DeadlineError(waited) from error
                finished = delta.finish is not None
                yield delta
        finally:
            del self._open[request.id]
            if not finished:
                self._outbox = [waiting for waiting in self._outbox if waiting.id != request.id]
                if self._death is None:
                    self._withdraw(request.id)

    def deliver(self, deltas: Iterable[Delta]) -> None:
        """Hand deltas to the requests that wait for them. Deltas of requests that were given up are dropped."""
        for delta in deltas:
            if stream := self._open.get(delta.id):
                stream.put_nowait(delta)

    def lost(self, reason: str) -> None:
        """Mark the engine as lost. Open requests fail after the deltas that were delivered, new requests at once."""
        self._death = reason
        self._outbox.clear()
        for request_id, stream in self._open.items():
            stream.put_nowait(failed_delta(request_id, reason))

    def back(self) -> None:
        """Accept requests again, because the engine is back."""
        self._death = None

    def flush(self) -> None:
        """Submit the waiting requests now, not at the end of this turn of the event loop."""
        requests, self._outbox = self._outbox, []
        if requests:
            self._submit(requests)
