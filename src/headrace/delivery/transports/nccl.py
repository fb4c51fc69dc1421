"""The trainer's end of the `nccl` transport: one broadcast sends a packed version to all engines that asked for it.

A version is broadcast from its packed bytes, and only while it is complete and not released. A key-value store says
which write each place holds, and every engine checks the store before and after a broadcast.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Collection, Mapping
from datetime import timedelta

import msgspec
import torch
from torch._C._distributed_c10d import TCPStore
from torch.distributed import DistNetworkError

from headrace.delivery.plan import PackingPlan, unpack
from headrace.delivery.transports.base import Sender, SenderSettings, Source, SourceSettings
from headrace.delivery.transports.nccl_group import exact
from headrace.delivery.transports.nccl_sessions import POLL_SECONDS, BroadcastSessions, HeldSnapshot
from headrace.delivery.transports.nccl_source import NcclSource
from headrace.delivery.transports.nccl_wire import BUCKET_BYTES, HeldVersion, NcclLocation, held_key
from headrace.delivery.transports.places import LIMIT, SenderPlaces
from headrace.delivery.transports.tcp_wire import is_loopback
from headrace.errors import ConfigError, DeliveryError

HOST = "127.0.0.1"
"""The address to listen on. Broadcasts are neither encrypted nor authenticated, so they never leave this host."""
_IDLE_SECONDS = 0.1

logger = logging.getLogger(__name__)


class NcclSender:
    """The trainer's end: a store into which engines put their requests, and a thread that broadcasts."""

    name = "nccl"

    def __init__(
        self,
        *,
        device: torch.device | str = "cpu",
        receivers: int = 1,
        per_parameter: bool = False,
        bucket_bytes: int = BUCKET_BYTES,
        bind: str = HOST,
        joining: float = 0.5,
        patience: float = 10.0,
    ) -> None:
        """Create a sender; for weights on the CPU, gloo makes the same broadcasts.

        `receivers` is the number of engines. A broadcast begins when all of them have asked for the version or have it
        already, but at the latest `joining` seconds after the first request. `patience` is the longest wait for one
        step of a broadcast, in seconds.
        """
        if not is_loopback(bind):
            raise ConfigError(f'[delivery] bind: the "nccl" transport does not leave the host, so not on {bind}')
        self._device = exact(device)
        self._backend = "nccl" if self._device.type == "cuda" else "gloo"
        if self._backend == "gloo":
            logger.warning("the weights are on the CPU: the nccl transport broadcasts them with gloo")
        self._patience = patience
        self._places = SenderPlaces("snapshot")
        self._changed = threading.Condition()
        self._snapshots = [HeldSnapshot(self._device) for _ in range(LIMIT)]
        self._sequence = 0
        self._closed = False
        self._store: TCPStore | None = _store(patience)
        self._locations = [str(NcclLocation(self._backend, HOST, self._store.port, place)) for place in range(LIMIT)]
        for place in range(LIMIT):
            self._hold(place, HeldVersion())
        self._sessions = BroadcastSessions(
            self._snapshots,
            self._backend,
            (HOST, self._store.port),
            self._device,
            receivers=receivers,
            bucket_bytes=0 if per_parameter else bucket_bytes,
            joining=joining,
            patience=patience,
        )
        self._server = threading.Thread(target=self._serve, name="weights", daemon=True)
        self._server.start()

    def wait(self, version: int, timeout: float) -> None:
        """Wait for a free snapshot; see `Sender.wait`."""
        self._places.wait(version, timeout)

    def write(self, version: int, plan: PackingPlan, weights: Mapping[str, torch.Tensor]) -> str:
        """Copy the weights into a free snapshot; see `Sender.write`."""
        with self._places.filling(version, self._free, self.release) as location:
            place = self._locations.index(location)
            with self._changed:
                self._sequence += 1
                held = HeldVersion(version, self._sequence, plan.nbytes)
                self._hold(place, held)
            self._snapshots[place].fill(plan, weights)
        return location

    def finish(self, location: str) -> None:
        """Allow engines to request the version."""
        place = self._locations.index(location)
        with self._changed:
            if not self._places.holds(location):
                raise DeliveryError(f"snapshot {location} was released, or the transport is closed")
            self._hold(place, msgspec.structs.replace(self._snapshots[place].held, whole=True))
            self._changed.notify_all()

    def snapshot(self, location: str, plan: PackingPlan) -> dict[str, torch.Tensor]:
        """Return views of a snapshot that was written and not released."""
        if not self._places.holds(location):
            raise DeliveryError(f"snapshot {location} holds nothing")
        return unpack(self._snapshots[self._locations.index(location)].ready(), plan.entries)

    def release(self, location: str) -> None:
        """Stop broadcasting the snapshot and allow it to be overwritten."""
        place = self._locations.index(location)
        with self._changed:
            self._hold(place, msgspec.structs.replace(self._snapshots[place].held, whole=False))
        self._places.release(location)

    def close(self) -> None:
        """End the group, and release the port and the memory. A broadcast that is under way fails."""
        self._places.close()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._server.join(4 * self._patience)
        with self._changed:
            self._sessions.close()
            self._store = None
            self._snapshots[:] = [HeldSnapshot(self._device) for _ in range(LIMIT)]

    def _free(self, held: Collection[str]) -> str:
        return next(location for location in self._locations if location not in held)

    def _hold(self, place: int, held: HeldVersion) -> None:
        self._snapshots[place].held = held
        if self._store is not None:
            self._store.set(held_key(place), msgspec.json.encode(held).decode())

    def _serve(self) -> None:
        while self._armed():
            try:
                if not self._sessions.serve():
                    time.sleep(POLL_SECONDS)
            except DistNetworkError:
                logger.exception("the store of the nccl transport is gone: no more weights are broadcast")
                return
            except (DeliveryError, RuntimeError) as error:
                logger.warning("a broadcast of weights failed: %s", str(error).partition("\n")[0])
                time.sleep(POLL_SECONDS)

    def _armed(self) -> bool:
        """Wait until there is a version that engines may request; return False if the transport is closed."""
        with self._changed:
            while not self._closed:
                if any(snapshot.held.whole for snapshot in self._snapshots):
                    return True
                self._changed.wait(_IDLE_SECONDS)
            return False


def _store(patience: float) -> TCPStore:
    """Make the store for requests on a loopback port. A store that opens its own port would listen on every address."""
    listening = socket.create_server((HOST, 0))
    port = listening.getsockname()[1]
    return TCPStore(
        HOST,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=patience),
        master_listen_fd=listening.detach(),
    )


class Transport:
    """The `nccl` transport: a broadcast, by NCCL between GPUs and by gloo elsewhere."""

    on_device = True
    for_servers = False
    for_ranks = False

    def sender(self, settings: SenderSettings) -> Sender:
        """See `base.Transport.sender`."""
        return NcclSender(
            device=settings.device,
            receivers=settings.receivers,
            bind=settings.bind,
            per_parameter=settings.per_parameter,
        )

    def source(self, settings: SourceSettings) -> Source:
        """See `base.Transport.source`."""
        return NcclSource(device=settings.device)
