"""A communicator of delivery's own, for one broadcast after another: no step of it outlasts its deadline.

It touches no default process group. Whatever may block in a library runs in a thread that is given up when it makes no
progress; the communicator and the memory that it was given are then of no more use to anybody.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from headrace.errors import DeliveryError

WINDOW = 2
"""Broadcasts under way at a time: the next is enqueued before the last is done."""
POLL_SECONDS = 0.0002
_GRACE_SECONDS = 1.0
_ABORT_SECONDS = 5.0
_SETTINGS = {
    "TORCH_NCCL_BLOCKING_WAIT": "1",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}
_environment = threading.Lock()

T = TypeVar("T")


class ProgressWatch:
    """When something last happened, and how long nothing may."""

    def __init__(self, patience: float, what: str) -> None:
        self._patience = patience
        self._what = what
        self._last = time.monotonic()

    def made(self) -> None:
        """Something happened."""
        self._last = time.monotonic()

    def left(self) -> float:
        """Seconds in which something must happen."""
        return self._last + self._patience - time.monotonic()

    def check(self, grace: float = 0.0) -> None:
        """Raise `DeliveryError` when nothing happened for too long."""
        if self.left() < -grace:
            raise DeliveryError(f"{self._what}: nothing happened for {self._patience:g} s")


def bounded(work: Callable[[], T], progress: ProgressWatch) -> T:
    """What `work` returns or raises; its thread is given up when there is no progress, and `DeliveryError` raised."""
    results: list[T] = []
    failures: list[Exception] = []
    done = threading.Event()

    def run() -> None:
        try:
            results.append(work())
        except (RuntimeError, ValueError, DeliveryError) as error:
            failures.append(error)
        finally:
            done.set()

    thread = threading.Thread(target=run, name="broadcast", daemon=True)
    thread.start()
    while not done.wait(max(0.0, progress.left() + _GRACE_SECONDS)):
        # `work` looks at the deadline too, unless it hangs in a library.
        progress.check(_GRACE_SECONDS)
    thread.join()
    if failures:
        raise failures[0]
    return results[0]


def connect(host: str, port: int, patience: float) -> TCPStore:
    """A line to the sender's store. Raises `DeliveryError` at once when nobody listens there."""
    try:
        # The store's own client would try again until its deadline.
        socket.create_connection((host, port), timeout=patience).close()
        return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=patience))
    except (OSError, dist.DistError) as error:
        raise DeliveryError(f"the sender at {host}:{port} is gone") from error


def exact(device: torch.device | str) -> torch.device:
    """The device, with its number: a GPU without one is another in another thread."""
    wanted = torch.device(device)
    return torch.device("cuda", torch.cuda.current_device()) if str(wanted) == "cuda" else wanted


class BroadcastGroup:
    """The members of a broadcast; rank 0 sends. Used by one thread at a time, and of no use after an exception."""

    def __init__(
        self,
        key: str,
        backend: str,
        address: tuple[str, int],
        rank: int,
        size: int,
        device: torch.device,
        patience: float,
    ) -> None:
        """Form it; all members must do so within `patience` seconds."""
        self.key = key
        self._device = device
        self._patience = patience
        progress = ProgressWatch(patience, f"forming a group of {size}")

        def form() -> Any:
            with on_device(device, None):
                # A line of its own: one that hangs holds up nobody else's.
                store = PrefixStore(key, connect(*address, patience))
                return _communicator(backend, store, rank, size, patience)

        self._communicator = bounded(form, progress)

    def broadcast(self, session: int, packed: torch.Tensor, pieces: Sequence[tuple[int, int]]) -> None:
        """Send the pieces of the packed bytes, or receive them in place: done on return.

        All members must name one session. On a GPU it is ordered after the work on the current stream.
        """
        progress = ProgressWatch(self._patience, f"broadcast {session}")
        stream = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None

        def run() -> None:
            with on_device(self._device, stream):
                self._greet(session, progress)
                under_way: deque[Any] = deque()
                for start, stop in pieces:
                    if len(under_way) == WINDOW:
                        _finish(under_way.popleft(), progress)
                    under_way.append(self._communicator.broadcast(packed[start:stop], 0))
                for work in under_way:
                    _finish(work, progress)

        bounded(run, progress)

    def abort(self) -> None:
        """End it, whatever the others do."""
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            with contextlib.suppress(DeliveryError, RuntimeError):
                bounded(communicator.abort, ProgressWatch(_ABORT_SECONDS, "ending a group"))

    def _greet(self, session: int, progress: ProgressWatch) -> None:
        """A broadcast of the session's number: connects all members before the bytes, and shows who is lost."""
        number = torch.tensor([session], dtype=torch.int64, device=self._device)
        _finish(self._communicator.broadcast(number, 0), progress)
        if (said := int(number.item())) != session:
            raise DeliveryError(f"the sender is at broadcast {said}, not {session}")


def _finish(work: Any, progress: ProgressWatch) -> None:
    while not work.is_completed():
        progress.check()
        time.sleep(POLL_SECONDS)
    work.wait()
    progress.made()


def _communicator(backend: str, store: Store, rank: int, size: int, patience: float) -> Any:
    api: Any = dist
    if backend == "gloo":
        options = api.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=patience)
        options._devices = [api.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        return api.ProcessGroupGloo(store, rank, size, options)
    options = api.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=patience)
    with _errors_are_raised():
        return api.ProcessGroupNCCL(store, rank, size, options)


@contextlib.contextmanager
def _errors_are_raised() -> Iterator[None]:
    """By default a communicator that loses a member ends the process; ours must not end a trainer or an engine.

    The settings are read when a communicator is made, so they are there for no longer than that.
    """
    with _environment:
        before = {name: os.environ.get(name) for name in _SETTINGS}
        os.environ.update(_SETTINGS)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


@contextlib.contextmanager
def on_device(device: torch.device, stream: torch.cuda.Stream | None) -> Iterator[None]:
    """The device and the stream of who asked: both belong to a thread."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device), torch.cuda.stream(stream):
        yield
