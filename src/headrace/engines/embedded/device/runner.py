"""The GPU's runner: it launches several steps at a time, and reads their tokens while later steps run.

The host touches a row only to admit it, to give it blocks and to forget it. All work goes through one stream, in order.
So the last work that used a row or a block is done before that row or block is used for something else.
"""

import time
from collections import deque
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from headrace.engines.embedded.base import Haste, Timings
from headrace.engines.embedded.device.graphs import TokenScores, make_recorder
from headrace.engines.embedded.device.pace import LAUNCHES, STEPS, Pace
from headrace.engines.embedded.device.prompts import MOST_TOKENS, PromptPasses
from headrace.engines.embedded.device.state import DeviceCache, DeviceState
from headrace.engines.embedded.device.step import DecodeStep, Variant, variant_of
from headrace.engines.embedded.kernels.rows import IDLE
from headrace.engines.embedded.scheduler import Chunk, StepPlan
from headrace.engines.embedded.sequence import Sampled, Sequence
from headrace.engines.embedded.transfer import Arriving, StreamMark
from headrace.models.experts import RoutingShape
from headrace.types import Float32Array, Int32Array

_WAITED = 2e-4
"""If the host waited longer than this for a launch to end, the next launch has just begun."""
_LOOK_SECONDS = 5e-5
"""How often the host looks for new weights when it waits for nothing else."""
GATHER = 32
"""The argument `gather` of the scheduler: the number of decoding sequences for each new one. Fewer new sequences wait
for others, because a pass over a few prompts takes about as long as a pass over many."""
SKIPS = 4
"""The largest number of passes over prompts in a row without a decode step, while a batch fills up."""


@dataclass
class _Launch:
    """Steps that were enqueued, and their records, which are being copied to the host."""

    entries: list[Sequence]
    steps: int
    decodes: bool
    """Whether the launch consists of decode steps only."""
    after: StreamMark | None
    """The end of the previous launch; None if the device was drained since."""
    begun: StreamMark
    records: Arriving
    kept: Arriving | None
    counts: Arriving | None
    routing: Arriving | None


class DeviceRunner:
    """A `Runner` for a GPU. Without a CUDA device it computes the same, step by step, in Triton's interpreter."""

    def __init__(
        self,
        model: Any,
        cache: DeviceCache,
        *,
        rows: int,
        max_length: int,
        capture: bool,
        routing: RoutingShape | None = None,
    ) -> None:
        self.prefill_chunk = MOST_TOKENS
        self.gather = GATHER
        self.overlaps = True
        self.timings = Timings()
        self._cache = cache
        device = next(model.parameters()).device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        if self._stream is not None:
            # The cache and the weights were written on another stream.
            self._stream.wait_stream(torch.cuda.current_stream(device))
        with self.active():
            self._state = DeviceState(max(rows, 2), -(-max_length // cache.block_size), STEPS, device)
            record = make_recorder(device, capture=capture)
            self._step = DecodeStep(model, self._state, cache, routing=routing, record=record)
            self._prompts = PromptPasses(self._step, record)
            self._scores = TokenScores(model, device, record)
        self._decoding: dict[str, Sequence] = {}
        self._variants: dict[str, Variant] = {}
        self._launches: deque[_Launch] = deque()
        self._ended: StreamMark | None = None
        """The end of the last launch; see `_Launch.after`."""
        self._skipped = 0
        self._pace = Pace()
        self._busy_since: float | None = None
        """When the host's turn began, plus the time it has waited since; None if nothing was in flight then."""

    @property
    def ahead(self) -> int:
        """See `Runner.ahead`."""
        return max(self._pace.steps, self._pace.cover)

    def hurry(self, haste: Haste) -> None:
        """See `Runner.hurry`."""
        self._pace.hurry(haste)

    @property
    def holds(self) -> bool:
        """See `Runner.holds`."""
        return self._pace.haste != "none" and (bool(self._launches) or self._pace.held)

    def active(self) -> AbstractContextManager[Any]:
        """Return a context with the engine's own stream. Graphs cannot be captured on the default stream."""
        return torch.cuda.stream(self._stream) if self._stream is not None else nullcontext()

    @property
    def busy(self) -> bool:
        """See `Runner.busy`."""
        return bool(self._launches)

    @torch.inference_mode()
    def run(self, plan: StepPlan, version: int) -> list[Sampled]:
        """See `Runner.run`. `version` must be the last installed one; the device itself tags tokens with it.

        Chunks that are left for a later plan are removed from this plan.
        """
        started = time.perf_counter()
        self._admit(plan)
        prefill = [c for c in plan.chunks if not c.decodes]
        launched = len(self._launches)
        # If at least as many sequences begin as decode, wait for them: a step now would run a nearly empty batch.
        beginning = len(prefill) + plan.upcoming
        filling = bool(prefill) and beginning >= len(self._decoding) and self._skipped < SKIPS
        self._skipped = self._skipped + 1 if filling else 0
        if filling:
            plan.chunks = prefill
        else:
            # Launch steps before prompts. Enqueuing prompts takes the host longer than a step, and the device needs
            # work meanwhile.
            self._decode(min(plan.ahead, self._pace.cover if prefill else self._pace.steps))
        if prefill:
            self._prefill(prefill)
        self.timings.host_seconds += time.perf_counter() - started
        return self._collect(idle=not prefill and len(self._launches) == launched)

    def collect(self) -> list[Sampled]:
        """See `Runner.collect`."""
        # Nothing was launched since the last call, so this turn must not be measured.
        self._busy_since = None
        if not self._launches:
            time.sleep(_LOOK_SECONDS)
        return self._collect(idle=True)

    @torch.inference_mode()
    def drain(self) -> list[Sampled]:
        """See `Runner.drain`."""
        self._busy_since = None
        sampled: list[Sampled] = []
        while self._launches:
            sampled += self._read(self._launches.popleft())
        self._ended = None
        return sampled

    def release(self, sequence: Sequence) -> None:
        """See `Runner.release`."""
        if sequence.row is not None:
            self._decoding.pop(sequence.id, None)
            self._variants.pop(sequence.id, None)
            self._state.release(sequence.row)
            sequence.row = None

    def installed(self, version: int) -> None:
        """See `Runner.installed`."""
        self._state.version.fill_(version)
        # The first token under these weights is awaited, so it must not wait for a launch of several steps.
        self._pace.single = True

    def clear(self, blocks: Seq[int]) -> None:
        """Do nothing, because the kernels never read a slot that was not written for their sequence."""

    @torch.inference_mode()
    def score(self, token_ids: Int32Array, *, again: bool = False) -> Arriving:
        """See `Runner.score`."""
        if again:
            self._scores.prepare(len(token_ids))
        return self._scores.begin(token_ids)

    @torch.inference_mode()
    def score_likeliest(self, token_ids: Int32Array, temperatures: Float32Array, k: int, vocabulary: int) -> Arriving:
        """See `Runner.score_likeliest`."""
        return self._scores.likeliest(token_ids, temperatures, k, vocabulary)

    def _admit(self, plan: StepPlan) -> None:
        if plan.copies:
            sources, targets = self._state.upload(np.array(plan.copies, np.int64)).unbind(1)
            self._cache.copy(sources, targets)
        # A sequence for which only the last token is missing in the cache needs no prefill: it decodes at once.
        new = [c for c in plan.chunks if c.sequence.row is None or (c.decodes and c.sequence.id not in self._decoding)]
        for sequence in (c.sequence for c in new if c.sequence.row is None):
            sequence.row = self._state.take()
            self._variants[sequence.id] = variant_of(sequence.sampling)
        if new:
            live = [c.decodes for c in new]
            self._state.set_rows([c.sequence for c in new], self._cache.block_size, live)
            self._decoding |= {c.sequence.id: c.sequence for c in new if c.decodes}
        fresh = {c.sequence.id for c in new}
        if grown := [s for s in plan.grown if s.row is not None and s.id not in fresh]:
            self._state.grow(grown, self._cache.block_size)

    def _prefill(self, chunks: list[Chunk]) -> None:
        """Compute chunks of prompts. Sequences that are complete get their next token and decode from now on."""
        started = time.perf_counter()
        begun = StreamMark(self._state.device)
        sampled = [c.sequence for c in chunks if c.samples]
        variant = self._variant(sampled)
        self._state.cursor.zero_()
        self._prompts.run(chunks, variant)
        if sampled:
            self._launched(sampled, 1, variant, begun, decodes=False)
            self._decoding |= {sequence.id: sequence for sequence in sampled}
        seconds = time.perf_counter() - started
        self._pace.enqueued_prompts(seconds)
        if self._busy_since is not None:
            # This time does not count as part of the turn, because the device had steps meanwhile.
            self._busy_since += seconds

    def _decode(self, steps: int) -> None:
        entries, longest = [], 0
        for sequence in self._decoding.values():
            left = sequence.limit - len(sequence.tokens) - sequence.in_flight
            if left > 0 and sequence.ending is None:
                entries.append(sequence)
                longest = max(longest, left)
        if not entries:
            return
        steps = min(steps, longest)
        bucket, variant = self._step.bucket(len(entries)), self._variant(entries)
        self._step.prepare(bucket, variant)
        begun = StreamMark(self._state.device)
        self._state.choose(entries, bucket)
        self._state.cursor.zero_()
        for _ in range(steps):
            self._step.run(bucket, variant)
        self._pace.single = False
        self._launched(entries, steps, variant, begun, decodes=True)

    def _variant(self, sequences: Seq[Sequence]) -> Variant:
        found = {self._variants[s.id] for s in sequences}
        return "recorded" if "recorded" in found else "filtered" if "filtered" in found else "plain"

    def _launched(
        self, entries: list[Sequence], steps: int, variant: Variant, begun: StreamMark, *, decodes: bool
    ) -> None:
        for sequence in entries:
            sequence.in_flight += steps
        count, step = len(entries), self._step

        def arriving(ring: torch.Tensor | None) -> Arriving | None:
            return Arriving(ring[:steps, :count]) if ring is not None else None

        recorded = variant == "recorded"
        self._launches.append(
            _Launch(
                entries,
                steps,
                decodes,
                self._ended,
                begun,
                Arriving(self._state.ring[:steps, :, :count]),
                arriving(step.kept_ring) if recorded else None,
                arriving(step.count_ring) if recorded else None,
                arriving(step.routing_ring),
            )
        )
        self._ended = self._launches[-1].records.mark

    def _collect(self, *, idle: bool) -> list[Sampled]:
        """Return results of finished launches. Wait for the oldest if the host is idle or too many are in flight."""
        started, waited = time.perf_counter(), 0.0
        if self._busy_since is not None:
            self._pace.turned(started - self._busy_since)
        sampled: list[Sampled] = []
        while self._launches and (len(self._launches) > LAUNCHES or idle or self._launches[0].records.ready()):
            asked = time.perf_counter()
            there = self._launches[0].records.wait(lambda: self._pace.haste == "now")
            waited += time.perf_counter() - asked
            if not there:
                break
            sampled += self._read(self._launches.popleft())
            idle = False
        if waited > _WAITED and len(self._launches) == 1 and self._launches[0].decodes:
            waited += self._linger(self._launches[0])
        self._busy_since = started + waited if self._launches else None
        return sampled

    def _linger(self, launch: _Launch) -> float:
        """Delay the next launch while this one runs, so that new weights can go first. Return the seconds waited."""
        began = time.perf_counter()
        until = began + self._pace.spare(launch.steps)
        launch.records.wait(lambda: self._pace.haste != "none" or time.perf_counter() >= until)
        return time.perf_counter() - began

    def _read(self, launch: _Launch) -> list[Sampled]:
        records = launch.records.result()
        started = time.perf_counter()
        seconds = launch.records.mark.seconds_since(launch.begun)
        if launch.decodes:
            self._pace.stepped(seconds / launch.steps)
        self.timings.steps += launch.steps
        self.timings.device_seconds += seconds
        if launch.after is not None:
            gap = launch.begun.seconds_since(launch.after)
            self.timings.longest_gap_seconds = max(self.timings.longest_gap_seconds, gap)
        tokens = records[:, 0].T
        ran = tokens != IDLE
        logprobs = np.ascontiguousarray(records[:, 1].T).view(np.float32)
        sound = bool(np.isfinite(logprobs).all())
        sampled = [
            Sampled(sequence, drawn, values, versions, sound)
            for sequence, drawn, values, versions in zip(
                launch.entries, tokens.tolist(), logprobs.tolist(), records[:, 2].T.tolist(), strict=True
            )
        ]
        if not ran.all():
            # An entry runs from the first step on, if at all, and stops once.
            for new, steps in zip(sampled, ran.sum(1).tolist(), strict=True):
                new.cut(steps)
        for sequence in launch.entries:
            sequence.in_flight -= launch.steps
        if launch.kept is not None or launch.routing is not None:
            for entry, new in enumerate(sampled):
                _add_records(launch, entry, new)
        self.timings.host_seconds += time.perf_counter() - started
        return [new for new in sampled if new.tokens]


def _add_records(launch: _Launch, entry: int, new: Sampled) -> None:
    count = len(new.tokens)
    if launch.kept is not None and launch.counts is not None and new.sequence.sampling.record_kept:
        ids, sizes = launch.kept.result(), launch.counts.result()
        new.kept = [ids[step, entry, : sizes[step, entry]].copy() for step in range(count)]
    if launch.routing is not None:
        # Copied, because a view would keep the records of the whole launch in memory as long as the sequence lives.
        new.routing = list(launch.routing.result()[:count, entry].copy())
