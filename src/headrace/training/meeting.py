"""How the ranks of a trainer meet: at a file of the run directory, or at a store of the first rank.

Ranks on the controller's host share the run directory, and nothing that they open leaves loopback. Ranks on other hosts
share none. There the first rank takes a free port of its host's address, and the controller tells the others which one.
Every wait has a deadline.
"""

import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from headrace.channel.heartbeats import MeetingPoint, MeetingRequest, Stop
from headrace.channel.worker_link import WorkerLink
from headrace.config.schema import Config
from headrace.delivery.transports.collectives import LOOPBACK, check_address, listen
from headrace.errors import DeadlineError, HeadraceError, UserError
from headrace.training.ranks import Ranks, join
from headrace.training.remote import RENDEZVOUS


def join_ranks(link: WorkerLink, config: Config, device: str, meet_at: str = "") -> Ranks | None:
    """Join the trainer's ranks and return this process's place among them, or None if there is only one rank.

    `meet_at` is the address of this host at which the other ranks reach this one. If it is empty, the ranks share the
    run directory. Raises `ConfigError` if they would meet on a network that is not trusted.
    """
    training, pipeline = config.training, config.pipeline
    if training.processes == 1 and not training.offload:
        return None
    link.phase = "meeting the other ranks"
    rank, file = int(link.name.removeprefix("trainer-")), link.run_dir / RENDEZVOUS
    if training.processes == 1:
        file.unlink(missing_ok=True)  # The file of a previous process.
    timeout = max(pipeline.start_seconds, pipeline.stall_seconds, config.delivery.deadline)
    store: Path | TCPStore = file
    if meet_at:
        check_address(meet_at, config.cluster.trusted_network, f"{link.name}, one of several trainer ranks,")
        store = _find_store(link, timeout) if rank else _open_store(link, meet_at, timeout)
    return join(
        store,
        rank,
        training.processes,
        tensor_parallel=training.tensor_parallel,
        device=device,
        timeout=timeout,
        address=meet_at or LOOPBACK,
    )


def _open_store(link: WorkerLink, address: str, timeout: float) -> TCPStore:
    """Make the store at which the ranks meet, and say where it is."""
    try:
        store = listen(address, timeout)
    except OSError as error:
        raise UserError(f"{link.name} cannot listen on {address} for the other ranks: {error.strerror}") from error
    link.send(MeetingPoint(host=address, port=store.port))
    return store


def _find_store(link: WorkerLink, timeout: float) -> TCPStore:
    """Ask the controller where the first rank waits, and connect to its store."""
    point = _told(link, timeout)
    try:
        return TCPStore(
            point.host, point.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout)
        )
    except dist.DistError as error:
        raise UserError(f"{link.name} does not reach the first rank at {point.host}:{point.port}") from error


def _told(link: WorkerLink, timeout: float) -> MeetingPoint:
    link.send(MeetingRequest())
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        incoming = link.next_message()
        message = incoming.message if incoming is not None else None
        if isinstance(message, MeetingPoint):
            return message
        if isinstance(message, Stop):
            raise HeadraceError("the run ended before the trainer's ranks had met")
    raise DeadlineError(f"{link.name} was not told within {timeout:g} s where the first rank waits")
