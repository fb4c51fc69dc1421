"""Sets up the transport of a run from its configuration: chooses it, says where its files are, and cleans up.

A run cleans up before it starts and after it ends, so that nothing stays behind when a trainer is killed. Torch is not
loaded until a sender is made.
"""

from pathlib import Path

import msgspec

from headrace.config.declared import transport_facts
from headrace.config.schema import DeliveryConfig
from headrace.config.stores import connect, is_url
from headrace.delivery import transports
from headrace.delivery.transports.base import Sender, SenderSettings
from headrace.delivery.transports.segments import sweep
from headrace.delivery.transports.storage import SETTING, owner_of, sweep_storage
from headrace.delivery.transports.tcp_wire import KEYS, is_loopback, make_keys

SHARED_BASE = "shared_base.json"
"""The file of the run directory that says in which memory the frozen base lies that trainer and engines share."""
_SHARED_MEMORY = Path("/dev/shm")


class Choice(msgspec.Struct, frozen=True):
    """A transport, and why it was chosen."""

    transport: str
    why: str


def choose(
    config: DeliveryConfig, shared_memory: Path = _SHARED_MEMORY, *, trainer: str = "cpu", engines: str = "cpu"
) -> Choice:
    """Choose the transport of a run: the configured one, or with `auto` the fastest that reaches every engine.

    `trainer` and `engines` are the devices of their weights, as torch names them.
    """
    if config.transport != "auto":
        return Choice(config.transport, '[delivery] transport = "' + config.transport + '"')
    if trainer.startswith("cuda") and engines.startswith("cuda"):
        return Choice("cuda_ipc", "trainer and engines are on GPUs of one host")
    if shared_memory.is_dir():
        return Choice("shm", "trainer and engines are on one host")
    return Choice("tcp", f"one host, but without {shared_memory}")


def make_sender(
    config: DeliveryConfig,
    run_dir: Path,
    rank: int = 0,
    *,
    trainer: str = "cpu",
    engines: str = "cpu",
    receivers: int = 1,
    relays: bool = True,
    own_address: str = "",
    trusted_network: bool = False,
) -> Sender:
    """Make the sender of one rank of the trainer.

    `trainer` and `engines` are devices, as in `choose`. `receivers` is the number of engines. `relays` says whether
    engines may relay to each other what this sender sends. `own_address` is where other hosts reach this one, if the
    run has several; a `bind` beyond loopback in the configuration comes first. `trusted_network` is that of [cluster].
    """
    return transports.sender(
        choose(config, trainer=trainer, engines=engines).transport,
        SenderSettings(
            run_id=run_dir.name,
            directory=weights_directory(config, run_dir, rank),
            keep=config.keep_files,
            owner=owner_of(run_dir),
            bind=own_address if own_address and is_loopback(config.bind) else config.bind,
            keys=run_dir / KEYS,
            device=trainer,
            receivers=receivers,
            relays=relays,
            trusted_network=trusted_network,
        ),
    )


def weights_directory(config: DeliveryConfig, run_dir: Path, rank: int = 0) -> Path | str:
    """Return where the `file` transport writes: `weights/` in the run directory, or a folder in `[delivery] directory`.

    That folder has the name of the run. A directory has one writer, so every rank of the trainer has its own.
    """
    own = f"rank-{rank}" if rank else ""
    if config.directory and is_url(config.directory):
        return "/".join(filter(None, [config.directory.rstrip("/"), run_dir.name, own]))
    return (Path(config.directory) / run_dir.name if config.directory else run_dir / "weights") / own


def prepare(config: DeliveryConfig, run_dir: Path) -> None:
    """Clean up before the processes start, and make the keys of the run if the transport uses them.

    Raises `ConfigError` for a URL that no installed package can reach.
    """
    directory = weights_directory(config, run_dir)
    facts = transport_facts(choose(config).transport)
    if facts.uses_directory and is_url(directory):
        connect(str(directory), SETTING)
    clean(config, run_dir)
    if facts.uses_keys:
        make_keys(run_dir / KEYS)


def clean(config: DeliveryConfig, run_dir: Path) -> None:
    """Remove what dead trainers left behind: segments of this user, and files and keys of this run.

    A local directory is always swept. A store is asked only if the run will use it, because it may be out of reach. The
    devices are not known yet, but they matter only to `auto`, which never chooses a transport with a directory.
    """
    sweep()
    first = weights_directory(config, run_dir)
    if not is_url(first) or transport_facts(choose(config).transport).uses_directory:
        for directory in (*(first.glob("rank-*") if isinstance(first, Path) else ()), first):
            sweep_storage(directory, owner_of(run_dir))
    for file in (KEYS, SHARED_BASE):
        (run_dir / file).unlink(missing_ok=True)
