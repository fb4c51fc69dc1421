"""Brings a version into a vLLM server: the version is staged and digested beside the live weights, loaded, and proved.

From the first byte that a load may write until the proof, the server counts as having no version. Some live weights
cannot be digested, because the server has repacked them. For these the canary alone is the proof.
"""

from __future__ import annotations

import asyncio
import time

from headrace.delivery.base import Manifest, Proof
from headrace.delivery.canary import Tolerance, canary_error
from headrace.engines.vllm.client import VllmClient
from headrace.errors import ChannelError
from headrace.types import NO_VERSION
from headrace_vllm_plugin.wire import Live

POLL_SECONDS = 0.02


class Delivery:
    """The weights of one server. `stage` may run beside requests. During `swap` nothing else may run on the server."""

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
        if manifest.kind != wanted or manifest.parts:
            held = "in several places" if manifest.parts else f"of kind {manifest.kind}, not {wanted}"
            return f"version {version} is {held}, which this engine does not take"
        if self._plan not in (None, manifest.plan_digest):
            return f"version {version} has other names or shapes than version {self._proved}"
        try:
            async with asyncio.timeout(self._deadline):
                return await self._fetch(manifest)
        except TimeoutError:
            return f"version {version} was not staged in {self._deadline:g} s"
        except ChannelError as error:
            return str(error)

    async def swap(self, manifest: Manifest) -> Proof:
        """Load the staged version, resume the server's scheduler, and prove the live weights.

        The caller has paused the scheduler before. If a call fails before the scheduler is resumed, it stays paused
        until the next swap. `swap` as a whole has no deadline; each of its calls has the deadline of the client.
        """
        started = time.monotonic()
        self._quarantined = True
        live: list[Live] = []
        error = float("inf")
        try:
            await self._client.update(manifest.version)
            live = await self._client.live()
            await self._client.resume()
            scores = await self._client.score(manifest.canary.token_ids.tolist())
            error = canary_error(manifest.canary, scores)
            reason = _mismatch(manifest, live, error, self._tolerance.of(manifest.canary))
        except ChannelError as failure:
            reason = f"version {manifest.version} could not be loaded: {failure}"
        self._quarantined = bool(reason)
        if not reason:
            self._proved = manifest.version
            self._tolerance.proved(manifest.canary, error)
            self._plan = manifest.plan_digest
        whole = [one for one in live if not one.hidden]
        return Proof(
            engine=self._engine,
            version=manifest.version,
            accepted=not reason,
            quarantined=bool(reason),
            reason=reason,
            staged_digest=self._staged_digest,
            live_digest=whole[0].digest if whole else 0,
            canary_error=error,
            stage_seconds=self._stage_seconds,
            swap_seconds=time.monotonic() - started,
        )

    async def _fetch(self, manifest: Manifest) -> str:
        """Wait until every worker has fetched the version. Return why a worker failed, or an empty string."""
        if reason := await self._client.stage(manifest, self._keys, self._scaling):
            return reason
        while True:
            workers = await self._client.staged()
            failed = [one.error for one in workers if one.error]
            if failed or all(one.done for one in workers):
                self._staged_digest = workers[0].digest
                self._stage_seconds = max(one.seconds for one in workers)
                return failed[0] if failed else ""
            await asyncio.sleep(POLL_SECONDS)


def _mismatch(manifest: Manifest, live: list[Live], error: float, tolerance: float) -> str:
    wrong = sorted({name for one in live for name in one.wrong})
    missing = sorted({name for one in live for name in one.missing})
    if wrong:
        return f"the live weights differ from what was staged: {_some(wrong)}"
    if missing:
        return f"version {manifest.version} does not fill {_some(missing)}"
    if error > tolerance:
        return f"the canary is off by {error:.3g} (tolerance {tolerance:.3g})"
    return ""


def _some(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
