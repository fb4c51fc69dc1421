"""The client of a vLLM server: token ids in, token ids out (`VllmClient`), and new weights (`Delivery`).

Answers are decoded into declared types. An answer that does not fit is an error and is never guessed. Every wait has a
deadline, and every failure is a `ChannelError`. Each request has its own connection. So a stream is given up by closing
its connection, and a request that must not be sent twice never uses a connection that the server has just closed.

A version is staged and digested beside the live weights, loaded, and proved. From the first byte that a load may write
until the proof, the server counts as having no version. Some live weights cannot be digested, because the server has
repacked them. For these the canary alone is the proof.
"""

from __future__ import annotations

import asyncio
import base64
import io
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar
from urllib.parse import urlsplit

import aiohttp
import msgspec
import numpy as np

from headrace.delivery.base import Manifest, Proof, Tolerance, canary_error, some_names
from headrace.errors import ChannelError, DeadlineError, HttpError, UserError
from headrace.types import NO_VERSION, Float32Array, Int16Array
from headrace_vllm_plugin.wire import FetchOrder, Live, StagingState

CONNECT_SECONDS = 10.0
POLL_SECONDS = 0.005
HEAD_START_SECONDS = 0.002
"""How long before other requests the canary is sent, so that the server draws for it first."""
STREAMS = 256
CONTROLS = 16
"""The number of connections beside the streams, so that a health check or an abort never waits for a stream to end."""

T = TypeVar("T")
_PREFIX = "generate-tokens-"
"""The prefix that vLLM adds to the ids of requests at this endpoint."""


class VersionSpan(msgspec.Struct):
    """A range of output tokens, `start .. end`, that were drawn under `version`."""

    version: str
    start: int
    end: int


class AnswerPiece(msgspec.Struct, kw_only=True):
    """Some tokens of an answer. The last piece has `finish`, and the versions of all tokens from the server."""

    token_ids: list[int]
    logprobs: list[float]
    finish: str | None = None
    spans: list[VersionSpan] | None = None
    kept: list[list[int]] | None = None
    """For each token, the tokens that truncation kept, if the server says so."""
    experts: Int16Array | None = None
    """[tokens of the whole answer, layers, k]: the experts that produced each token. Only the last piece has them."""


class _Logprob(msgspec.Struct):
    token_id: int
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_Logprob] | None = None


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    weight_versions: list[VersionSpan] | None = None
    sampling_mask: list[list[int]] | None = None
    routed_experts: str | None = None


class _Cached(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens_details: _Cached | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class VllmClient:
    """A client of one server, until `close`. It is made inside a running event loop. `key` is sent with every request.

    At most `slots` answers are streamed at a time. `deadline` is the longest time for an answer to a call, and between
    two tokens of a stream, in seconds.
    """

    def __init__(self, url: str, key: str = "", *, deadline: float = 120.0, slots: int = STREAMS) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(f"{url!r} is not the URL of a server, such as http://127.0.0.1:8000")
        self.url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=slots + CONTROLS, force_close=True),
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        self._deadline = deadline
        self._decoder = msgspec.json.Decoder(_Chunk)
        self.prefilled_tokens = 0
        """The number of prompt tokens of all answers that began, without those that the prefix cache held."""

    async def generate(
        self, request_id: str, token_ids: Sequence[int], params: dict[str, Any], *, salt: str
    ) -> AsyncIterator[AnswerPiece]:
        """Continue these tokens. `salt` keys the prefix cache. Closing the iterator also ends the server's request."""
        body = {
            "request_id": request_id,
            "token_ids": list(token_ids),
            "sampling_params": params,
            "cache_salt": salt,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        begun = False
        async for data in self.events("/inference/v1/generate", body, silence=self._deadline):
            chunk = self._decode(data)
            if not begun:
                begun = True
                self.prefilled_tokens += len(token_ids)
            if chunk.usage is not None and chunk.usage.prompt_tokens_details is not None:
                self.prefilled_tokens -= chunk.usage.prompt_tokens_details.cached_tokens or 0
            for choice in chunk.choices:
                yield _piece(choice)

    async def score(self, token_ids: Sequence[int]) -> Float32Array:
        """Return the untempered log-probabilities of tokens 1..n, computed without the prefix cache."""
        # The token that is drawn does not matter. A server that reports kept sets demands a `top_k`.
        params = {"max_tokens": 1, "top_k": 1, "prompt_logprobs": 0, "detokenize": False, "ignore_eos": True}
        body = {"token_ids": list(token_ids), "sampling_params": params}
        answer = await self.call("POST", "/inference/v1/generate", body, timeout=self._deadline)
        found = answer.get("prompt_logprobs") if isinstance(answer, dict) else None
        if not found or len(found) != len(token_ids):
            raise ChannelError(f"{self.url} did not score the {len(token_ids)} tokens")
        pairs = zip(found[1:], token_ids[1:], strict=True)
        return np.array([position[str(token)]["logprob"] for position, token in pairs], np.float32)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests. Their streams end with a last piece."""
        body = {"request_ids": [_PREFIX + request_id for request_id in request_ids]}
        await self._post("/inference/v1/abort_requests", body)

    async def pause(self, mode: str) -> None:
        """Pause the scheduler. Mode "abort" ends running requests, mode "wait" waits for them. The caches stay."""
        await self._post(f"/pause?mode={mode}&clear_cache=false")

    async def resume(self) -> None:
        """Resume the scheduler."""
        await self._post("/resume")

    async def load(self, version: int) -> list[Live]:
        """Load the staged version in every worker, and return how the live weights compare with it.

        The scheduler is paused. From this call on, the live weights are unproved.
        """
        live, _ = await asyncio.gather(
            self.rpc("headrace_load", Live, version=str(version)),
            self._post("/update_weight_version", {"new_version": str(version)}),
        )
        return live

    async def rpc(self, method: str, kind: type[T], **arguments: str) -> list[T]:
        """Call a method of `HeadraceWorker` in every worker of the server, and return their answers."""
        answer = await self._post("/collective_rpc", {"method": method, "kwargs": arguments})
        try:
            return msgspec.convert(answer["results"], list[kind])  # type: ignore[valid-type]
        except (msgspec.ValidationError, KeyError, TypeError) as error:
            raise ChannelError(f"{self.url}: {method} was answered with {answer!r:.200}: {error}") from error

    async def call(self, method: str, path: str, body: Any = None, *, timeout: float) -> Any:
        """Return the JSON of the answer, or its text if it is not JSON. A status of 400 or above raises `HttpError`."""
        try:
            async with asyncio.timeout(timeout), self._exchange(method, path, body) as answer:
                text = await answer.read()
        except TimeoutError as error:
            raise DeadlineError(f"{self.url}{path} did not answer in {timeout:g} s") from error
        try:
            return msgspec.json.decode(text)
        except msgspec.DecodeError:
            return text.decode(errors="replace")

    async def events(self, path: str, body: Any, *, silence: float) -> AsyncIterator[bytes]:
        """Yield the data of each event until `[DONE]`. At most `silence` seconds may pass between two parts."""
        rest = b""
        try:
            async with self._exchange("POST", path, body, silence) as answer:
                async for part in answer.content.iter_any():
                    *events, rest = (rest + part).split(b"\n\n")
                    for event in events:
                        data = event.removeprefix(b"data: ")
                        if data == b"[DONE]":
                            return
                        yield data
        except TimeoutError as error:
            raise DeadlineError(f"{self.url}{path} sent nothing in {silence:g} s") from error
        raise ChannelError(f"{self.url}{path} broke off in the middle of an answer")

    async def close(self) -> None:
        """Close all connections. Idempotent. A later request raises `ChannelError`."""
        await self._session.close()

    async def __aenter__(self) -> VllmClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _post(self, path: str, body: Any = None) -> Any:
        return await self.call("POST", path, body, timeout=self._deadline)

    def _decode(self, data: bytes) -> _Chunk:
        try:
            chunk = self._decoder.decode(data)
        except msgspec.DecodeError as error:
            raise ChannelError(f"{self.url} sent {data[:200]!r}: {error}") from error
        if chunk.error is not None:
            detail = chunk.error.get("message", chunk.error) if isinstance(chunk.error, dict) else chunk.error
            code = chunk.error.get("code") if isinstance(chunk.error, dict) else None
            raise HttpError(self.url, code if isinstance(code, int) else 500, " ".join(str(detail).split()))
        return chunk

    @asynccontextmanager
    async def _exchange(
        self, method: str, path: str, body: Any, silence: float | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request and yield its answer. `silence` is the longest time between two reads of its body."""
        if self._session.closed:
            raise ChannelError(f"{self.url}: the connection to it is closed")
        answer: aiohttp.ClientResponse | None = None
        content = None if body is None else msgspec.json.encode(body)
        kind = {} if body is None else {"Content-Type": "application/json"}
        try:
            answer = await self._session.request(
                method,
                self.url + path,
                data=content,
                headers=self._headers | kind,
                timeout=aiohttp.ClientTimeout(connect=CONNECT_SECONDS, sock_read=silence),
                allow_redirects=False,
            )
            if answer.status >= 400:
                raise HttpError(self.url + path, answer.status, _reason(await answer.read()))
            yield answer
        except aiohttp.ConnectionTimeoutError as error:
            raise ChannelError(f"{self.url} cannot be reached: no connection in time") from error
        except aiohttp.ClientConnectorError as error:
            raise ChannelError(f"{self.url} cannot be reached: {error.os_error}") from error
        except (aiohttp.ClientError, OSError) as error:
            if isinstance(error, TimeoutError):
                raise  # TimeoutError is an OSError too. It is handled by the caller that set the deadline.
            raise ChannelError(f"{self.url}{path} broke off: {error}") from error
        finally:
            if answer is not None:
                answer.close()


class Delivery:
    """The weights of one server. `stage` may run beside requests. Before `swap` the server's scheduler is paused."""

    def __init__(
        self, client: VllmClient, engine: str, *, deadline: float, keys: str = "", scaling: float | None = None
    ) -> None:
        """Set up deliveries to the server behind `client`. Nothing is sent yet.

        `engine` is the name in the proofs. `deadline` limits the staging of a version, in seconds. `keys` is the file
        with the keys of the run, for transports that encrypt. `scaling` is the LoRA scaling of the delivered adapters;
        None if full weights are delivered.
        """
        self._client = client
        self._scaling = scaling
        self._engine = engine
        self._deadline = deadline
        self._keys = keys
        self._proved = NO_VERSION
        self._plan: int | None = None
        self._tolerance = Tolerance()
        self._quarantined = False
        self._staged_digest = 0
        self._stage_seconds = 0.0

    @property
    def version(self) -> int:
        """The version that the live weights are proved to be; `NO_VERSION` before the first and in quarantine."""
        return NO_VERSION if self._quarantined else self._proved

    async def stage(self, manifest: Manifest) -> str:
        """Fetch a version and check its digest. Return why it is rejected, or an empty string."""
        version = manifest.version
        if version <= self._proved:
            return f"version {version} is out of order: version {self._proved} is live"
        wanted = "full" if self._scaling is None else "adapter"
        if manifest.kind != wanted:
            return f"version {version} is of kind {manifest.kind}, not {wanted}, which this engine does not take"
        if self._plan not in (None, manifest.plan_digest):
            return f"version {version} has other names or shapes than version {self._proved}"
        try:
            async with asyncio.timeout(self._deadline):
                return await self._fetch(manifest)
        except TimeoutError:
            return f"version {version} was not staged in {self._deadline:g} s"
        except ChannelError as error:
            return str(error)

    async def swap(self, manifest: Manifest, begin: Callable[[], None], settle: Callable[[], Awaitable[None]]) -> Proof:
        """Load the staged version, resume the server's scheduler, and prove the live weights.

        The caller has paused the scheduler before. `begin` is called once the canary is on its way: requests that it
        sends wait behind the canary until the scheduler resumes, and are drawn under weights that are not proved yet.
        `settle` is awaited before the scheduler resumes: afterwards nobody reads a stream of the old weights. If a call
        fails before the scheduler is resumed, it stays paused until the next swap. `swap` as a whole has no deadline;
        each of its calls has the deadline of the client.
        """
        started = time.monotonic()
        self._quarantined = True
        live: list[Live] = []
        error = float("inf")
        loading = asyncio.create_task(self._client.load(manifest.version))
        scoring = asyncio.create_task(self._client.score(manifest.canary.token_ids.tolist()))
        try:
            await asyncio.sleep(HEAD_START_SECONDS)
            begin()
            live = await loading
            await settle()
            await self._client.resume()
            error = canary_error(manifest.canary, await scoring)
            reason = _mismatch(manifest, live, error, self._tolerance.of(manifest.canary))
        except ChannelError as failure:
            reason = f"version {manifest.version} could not be loaded: {failure}"
        finally:
            loading.cancel()
            scoring.cancel()
            await asyncio.gather(loading, scoring, return_exceptions=True)
        self._quarantined = bool(reason)
        if not reason:
            self._proved = manifest.version
            self._tolerance.proved(manifest.canary, error)
            self._plan = manifest.plan_digest
        whole = [one for one in live if not one.hidden and not one.cut]
        return Proof(
            engine=self._engine,
            version=manifest.version,
            accepted=not reason,
            quarantined=bool(reason),
            reason=reason,
            staged_digest=self._staged_digest,
            live_digest=whole[0].digest if whole and self._scaling is None else 0,
            canary_error=error,
            stage_seconds=self._stage_seconds,
            swap_seconds=time.monotonic() - started,
        )

    async def _fetch(self, manifest: Manifest) -> str:
        """Wait until every worker has fetched the version. Return why a worker failed, or an empty string."""
        order = FetchOrder(
            version=manifest.version,
            transport=manifest.transport,
            location=manifest.location,
            entries=manifest.entries,
            plan_digest=manifest.plan_digest,
            digest=manifest.digest,
            parts=manifest.parts,
            keys=self._keys,
            scaling=self._scaling,
            base_digest=manifest.base_digest,
        )
        encoded = msgspec.json.encode(order).decode()
        begun = await self._client.rpc("headrace_stage", StagingState, order=encoded)
        if refused := [one.error for one in begun if one.error]:
            return refused[0]
        while True:
            workers = await self._client.rpc("headrace_staged", StagingState)
            failed = [one.error for one in workers if one.error]
            if failed or all(one.done for one in workers):
                self._staged_digest = workers[0].digest
                self._stage_seconds = max(one.seconds for one in workers)
                return failed[0] if failed else ""
            await asyncio.sleep(POLL_SECONDS)


def _piece(choice: _Choice) -> AnswerPiece:
    content = (choice.logprobs.content if choice.logprobs else None) or []
    token_ids = choice.token_ids or []
    if [one.token_id for one in content] != token_ids:
        raise ChannelError("a server sent tokens without their log-probabilities")
    if choice.sampling_mask is not None and len(choice.sampling_mask) != len(token_ids):
        raise ChannelError(f"a server sent {len(token_ids)} tokens with {len(choice.sampling_mask)} kept sets")
    return AnswerPiece(
        token_ids=token_ids,
        logprobs=[one.logprob for one in content],
        finish=choice.finish_reason,
        spans=choice.weight_versions,
        kept=choice.sampling_mask,
        experts=None if choice.routed_experts is None else _experts(choice.routed_experts),
    )


def _experts(encoded: str) -> Int16Array:
    try:
        found = np.load(io.BytesIO(base64.b64decode(encoded)), allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise ChannelError(f"a server sent experts that cannot be read: {error}") from error
    if found.ndim != 3:
        raise ChannelError(f"a server sent experts of shape {found.shape}, not [tokens, layers, k]")
    return np.asarray(found, np.int16)


def _reason(body: bytes) -> str:
    try:
        answer = msgspec.json.decode(body)
    except msgspec.DecodeError:
        answer = body.decode(errors="replace")
    for key in ("error", "detail", "message"):
        if isinstance(answer, dict) and key in answer:
            answer = answer[key]
    return " ".join(str(answer).split())[:500]


def _mismatch(manifest: Manifest, live: list[Live], error: float, tolerance: float) -> str:
    changed = [one.error for one in live if one.error]
    wrong = {name for one in live for name in one.wrong}
    missing = {name for one in live for name in one.missing}
    if changed:
        return f"version {manifest.version} changed while it was loaded: {changed[0]}"
    if wrong:
        return f"the live weights differ from what was staged: {some_names(wrong)}"
    if missing:
        return f"version {manifest.version} does not fill {some_names(missing)}"
    if error > tolerance:
        return f"the canary is off by {error:.3g} (tolerance {tolerance:.3g})"
    return ""
