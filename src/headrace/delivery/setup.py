"""From the configuration to a transport: which one and why, where its files lie, what a run that died left of them.

A run sweeps before it starts and after it ends, so that a trainer that was killed leaves nothing. No torch is loaded
until a sender is made.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from headrace.config.schema import DeliveryConfig
from headrace.delivery import transports
from headrace.delivery.transports.files import sweep_directory
from headrace.delivery.transports.keys import KEYS, make_keys
from headrace.delivery.transports.segments import sweep
from headrace.delivery.transports.tcp_wire import is_loopback

if TYPE_CHECKING:
    from headrace.delivery.transports.base import Sender

_SHARED_MEMORY = Path("/dev/shm")


class Choice(msgspec.Struct, frozen=True):
    """A transport, and why it was taken."""

    transport: str
    why: str


def choose(config: DeliveryConfig, shared_memory: Path = _SHARED_MEMORY) -> Choice:
    """The transport of a run: as configured, or the fastest that reaches every engine."""
    if config.transport != "auto":
        return Choice(config.transport, '[delivery] transport = "' + config.transport + '"')
    if shared_memory.is_dir():
        return Choice("shm", "trainer and engines are on one host")
    return Choice("tcp", f"one host, but without {shared_memory}")


def make_sender(config: DeliveryConfig, run_dir: Path) -> Sender:
    """The trainer's end of the run's transport."""
    return transports.sender(
        choose(config).transport,
        run_dir.name,
        directory=weights_directory(config, run_dir),
        keep=config.keep_files,
        bind=config.bind,
        keys=run_dir / KEYS,
    )


def weights_directory(config: DeliveryConfig, run_dir: Path) -> Path:
    """Where the `file` transport writes: in the run directory, or in a folder of the run's name in a shared one."""
    return Path(config.directory) / run_dir.name if config.directory else run_dir / "weights"


def prepare(config: DeliveryConfig, run_dir: Path) -> None:
    """Before the processes start: sweep, and make the keys of the run where weights leave the host."""
    clean(config, run_dir)
    if choose(config).transport == "tcp" and not is_loopback(config.bind):
        make_keys(run_dir / KEYS)


def clean(config: DeliveryConfig, run_dir: Path) -> None:
    """Remove what trainers that are dead left: segments of this user, files and keys of this run."""
    sweep()
    sweep_directory(weights_directory(config, run_dir))
    (run_dir / KEYS).unlink(missing_ok=True)
