"""The frozen weights under an adapter, held once in shared memory by the trainer and all engines of a host.

The trainer writes the base into a segment and announces the segment in the run directory. Every process, the trainer
too, then computes with the segment's bytes where they lie. Each process maps them copy-on-write, so that no process can
change what the others compute with. An engine digests the bytes again at every delivery. The segment lasts as long as
one process holds it, so a trainer or an engine that restarts finds the same base again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch

from headrace.delivery.digest import digest
from headrace.delivery.plan import PackingPlan, pack, plan_weights, unpack
from headrace.delivery.setup import SHARED_BASE as FILE
from headrace.delivery.transports.segments import HEADER_BYTES, MappedSegment, SharedSegment
from headrace.errors import DeliveryError

_VERSION = 0
"""A segment names the version that it holds, and a base has none."""
_POLL_SECONDS = 0.05
_ATTEMPTS = 3


class Announcement(msgspec.Struct, frozen=True, kw_only=True):
    """Where the base lies."""

    segment: str
    digest: int


class SharedBase:
    """The base, mapped into this process. `weights` are its tensors, which nobody may write to."""

    def __init__(self, segment: Path, plan: PackingPlan, wanted: int) -> None:
        """Map a segment and check its bytes. Raises `DeliveryError` if it is gone or holds other weights."""
        self._mapped = MappedSegment(segment)
        try:
            self._mapped.hold()
            # Checked after it is held: from now on nobody removes the segment.
            self._mapped.check(_VERSION, plan.nbytes)
            packed = torch.frombuffer(self._mapped.buffer, dtype=torch.uint8, offset=HEADER_BYTES)
            self.weights = unpack(packed, plan.entries)
            if (found := self.digest()) != wanted:
                raise DeliveryError(f"the shared base has digest {found:016x}, not {wanted:016x}")
        except DeliveryError:
            self._mapped.close()
            raise

    def digest(self) -> int:
        """Return the digest of the bytes as they are now."""
        return digest(self.weights.items())


def share_base(run_dir: Path, weights: Mapping[str, torch.Tensor], dtype: str, digest: int) -> SharedBase:
    """Return the shared base of this run. The trainer calls this: it writes the base, unless there is one already.

    `weights` are the trainer's own, in `dtype`, and `digest` is their digest.
    """
    plan = plan_weights(weights, dtype)
    if (announced := _announced(run_dir)) is not None and announced.digest == digest:
        try:
            return SharedBase(Path(announced.segment), plan, digest)
        except DeliveryError:
            pass  # Nobody held it any more, so it is written again.
    for attempt in range(1, _ATTEMPTS + 1):
        segment = SharedSegment.create(run_dir.name, plan.nbytes)
        segment.begin(_VERSION)
        pack(torch.frombuffer(segment.buffer, dtype=torch.uint8, offset=HEADER_BYTES), plan.entries, weights)
        segment.finish(_VERSION)
        segment.leave()
        try:
            base = SharedBase(segment.path, plan, digest)
        except DeliveryError:
            # Another run may sweep the segment in the moment in which nobody holds it.
            if attempt == _ATTEMPTS:
                raise
            continue
        break
    fresh = run_dir / f"{FILE}.new"
    fresh.write_bytes(msgspec.json.encode(Announcement(segment=str(segment.path), digest=digest)))
    fresh.replace(run_dir / FILE)
    return base


def find_base(
    run_dir: Path, weights: Mapping[str, torch.Tensor], dtype: str, digest: int, seconds: float
) -> SharedBase:
    """Return the shared base of this run. An engine calls this, and waits until the trainer has announced the base.

    `weights` and `digest` are those of the engine's own copy. Raises `DeliveryError` after `seconds`.
    """
    plan, deadline = plan_weights(weights, dtype), time.monotonic() + seconds
    while True:
        why = "the trainer has announced none"
        if (announced := _announced(run_dir)) is not None:
            try:
                return SharedBase(Path(announced.segment), plan, digest)
            except DeliveryError as error:
                why = str(error)
        if time.monotonic() > deadline:
            raise DeliveryError(f"there is no shared base after {seconds:g} s: {why}")
        time.sleep(_POLL_SECONDS)


def _announced(run_dir: Path) -> Announcement | None:
    try:
        return msgspec.json.decode((run_dir / FILE).read_bytes(), type=Announcement)
    except (FileNotFoundError, msgspec.DecodeError):
        return None
