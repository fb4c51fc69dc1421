"""How packed weights travel: `base` is the protocol, one file per transport, chosen by name with `sender`, `source`.

No torch is loaded until a transport is made.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from headrace.errors import DeliveryError

if TYPE_CHECKING:
    from headrace.delivery.transports.base import Sender, Source

NAMES = ("shm", "file", "tcp", "cuda_ipc", "nccl")
WITHOUT_GPU = ("shm", "file", "tcp", "nccl")
"""Those that run on a host without a GPU; `nccl` broadcasts with gloo there."""


def sender(
    name: str,
    run_id: str,
    *,
    directory: Path | str | None = None,
    keep: int = 2,
    owner: str = "",
    bind: str = "127.0.0.1",
    keys: Path | None = None,
    device: str = "cpu",
    receivers: int = 1,
    relays: bool = True,
    per_parameter: bool = False,
) -> Sender:
    """The trainer's end of the transport of this name.

    `run_id` marks what `shm` leaves on the machine; `directory` (a path, or a URL for fsspec), `keep` and `owner` (the
    run, as other hosts know it) are those of `file`, `bind` and `keys` (the file with the keys of the run) of `tcp`,
    `device` (where the trainer's weights are) of `cuda_ipc` and `nccl`, `receivers` (how many engines) of `tcp`, which
    lets many hand a version on unless `relays` is off, and of `nccl`, which sends buckets of the packed bytes or,
    `per_parameter`, tensor by tensor.
    """
    if name == "shm":
        from headrace.delivery.transports.shm import ShmSender

        return ShmSender(run_id)
    if name == "file":
        from headrace.delivery.transports.file import FileSender

        if directory is None:
            raise DeliveryError("the file transport needs a directory")
        return FileSender(directory, keep=keep, owner=owner or run_id)
    if name == "tcp":
        from headrace.delivery.transports.tcp import TcpSender

        return TcpSender(bind=bind, keys=keys, receivers=receivers if relays else 1)
    if name == "cuda_ipc":
        from headrace.delivery.transports.cuda_ipc import CudaIpcSender

        return CudaIpcSender(run_id, device=device)
    if name == "nccl":
        from headrace.delivery.transports.nccl import NcclSender

        return NcclSender(device=device, receivers=receivers, bind=bind, per_parameter=per_parameter)
    raise _unknown(name)


def source(name: str, *, keys: Path | None = None, device: str = "cpu") -> Source:
    """An engine's end of the transport of this name.

    `keys` is the file with the keys of the run, `device` is where the engine's weights are.
    """
    if name == "shm":
        from headrace.delivery.transports.shm import ShmSource

        return ShmSource()
    if name == "file":
        from headrace.delivery.transports.file import FileSource

        return FileSource()
    if name == "tcp":
        from headrace.delivery.transports.tcp_source import TcpSource

        return TcpSource(keys=keys)
    if name == "cuda_ipc":
        from headrace.delivery.transports.cuda_ipc import CudaIpcSource

        return CudaIpcSource(device=device)
    if name == "nccl":
        from headrace.delivery.transports.nccl_source import NcclSource

        return NcclSource(device=device)
    raise _unknown(name)


def _unknown(name: str) -> DeliveryError:
    return DeliveryError(f"there is no transport {name!r}: one of {', '.join(NAMES)}")
