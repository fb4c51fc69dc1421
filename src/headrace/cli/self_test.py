"""`headrace doctor --gpus`: a short real run on this machine for every transport that fits the placement.

The runs train a tiny random model, which is made here. Every figure is read from the journal of its run. A transport
has held if its run ended in order, every engine proved every version at the first offer, the weights changed, and the
ledgers balance.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import typer
from rich.console import Console

from headrace.bench.workload import run_config, write_model
from headrace.buffer.reader import open_readonly
from headrace.cluster.inventory import describe, place_run
from headrace.cluster.launchers.local import hosts_of
from headrace.config import Config, with_settings
from headrace.delivery.transports import NAMES
from headrace.errors import ConfigError, HeadraceError, PeerDied, UserError, one_line
from headrace.observe.progress import Progress, RunSnapshot
from headrace.observe.records import DeliveryRecord, VersionRecord
from headrace.pipeline.launch import start_run
from headrace.review.summary import summarize_journal
from headrace.run_dir import RunDir

if TYPE_CHECKING:
    from rich.status import Status

    from headrace.cluster.placement import Host, Place, Placement

VERSIONS = 4
PATIENCE = 60.0
"""Seconds that a version waits for slow engines, so that each of them has to prove each version."""
NO_GPU = "there is no GPU that a run may see here; headrace doctor --gpus --cpu makes the same test on CPUs"
NOT_TESTED = (
    "Not tested: several hosts; your own model and its memory; compiled layers "
    "(--set engine.compile=true --set training.compile=true)."
)

ROW = "{:<9}  {:<{width}}  {:<{width}}  {:>8}  {:>13}  {:>13}  {:>8}  {}"
HEADER = ("transport", "trainer", "engines", "versions", "slowest proof", "longest pause", "training", "result")


class RunResult(msgspec.Struct, kw_only=True):
    """The result of one run. A figure that its journal does not have is None."""

    transport: str
    trainer: str
    engines: str
    versions_proved: int = 0
    """The number of versions that every engine has proved."""
    versions: int = 0
    slowest_proof_seconds: float | None = None
    """The longest time from the publication of a version to the proof of an engine."""
    longest_pause_seconds: float | None = None
    """The longest time for which an engine stopped decoding for new weights, without the first ones."""
    train_seconds: float | None = None
    failure: str = ""
    """What failed, in one line. Empty if the transport has held."""

    def cells(self) -> Sequence[str]:
        """Return the row of the table."""
        pause = None if self.longest_pause_seconds is None else 1e3 * self.longest_pause_seconds
        return (
            *(self.transport, self.trainer, self.engines, f"{self.versions_proved} of {self.versions}"),
            *(_figure(self.slowest_proof_seconds, "s"), _figure(pause, "ms"), _figure(self.train_seconds, "s")),
            f"FAILED: {self.failure}" if self.failure else "held",
        )


def self_test(settings: Sequence[str], *, on_cpu: bool, as_json: bool) -> None:
    """Make the runs, print a line as each ends, and then the verdict. Raises `typer.Exit` with code 1 if one failed.

    `settings` are those of `--set`. They may name a single transport. With `as_json`, lines go to stderr.
    """
    directory = Path(tempfile.mkdtemp(prefix="headrace-doctor-"))
    tested: list[RunResult] = []
    try:
        write_model(directory / "model")
        config, hosts, placement = _placed(directory, settings, on_cpu)
        runs, refused = _by_transport(config, hosts)
        trainer, engines = (_devices(placement.of(role)) for role in ("trainer", "engine"))
        width = max(len("trainer"), len(trainer), len(engines))
        for name, where in describe(placement).items():
            typer.echo(f"{name:<11} {where}", err=as_json)
        typer.echo(ROW.format(*HEADER, width=width), err=as_json)
        for run in runs:
            tested.append(RunResult(transport=run.delivery.transport, trainer=trainer, engines=engines))
            _test(run, tested[-1])
            typer.echo(ROW.format(*tested[-1].cells(), width=width), err=as_json)
        for transport, why in refused.items():
            typer.echo(f"{transport:<9}  not run: {why}", err=as_json)
    finally:
        failed = [each.transport for each in tested if each.failure]
        if not failed:
            shutil.rmtree(directory)
    verdict = f"{len(tested) - len(failed)} of {len(tested)} transports held"
    verdict += f"; what is left of the other runs is in {directory}" if failed else ""
    if as_json:
        found = {"places": describe(placement), "runs": msgspec.to_builtins(tested), "not_run": refused}
        typer.echo(json.dumps(found | {"held": not failed, "verdict": verdict, "not_tested": NOT_TESTED}, indent=2))
    else:
        typer.echo(f"{verdict}\n{NOT_TESTED}")
    if failed:
        raise typer.Exit(1)


def _placed(directory: Path, settings: Sequence[str], on_cpu: bool) -> tuple[Config, Sequence[Host], Placement]:
    """Return the configuration of the runs with the numbers of workers, the host, and the placement there."""
    device = {"device": "cpu"} if on_cpu else {}
    base = run_config(
        directory,
        "doctor",
        versions=VERSIONS,
        depth=1,
        prompt=8,
        lengths="equal:8",
        groups=8,
        group_size=4,
        # Compiling layers would take longer than everything else.
        engine={"slots": 32, "compile": False, **device},
        training={"learning_rate": 1e-3, "compile": False, **device},
        delivery={"patience": PATIENCE},
        # The death of a worker is a finding, so it ends the run with its reason.
        pipeline={"restarts": 0},
    )
    config = with_settings(base, settings)
    hosts = hosts_of(config)
    if not on_cpu and not any(host.gpus for host in hosts):
        raise UserError(NO_GPU)
    config, placement = place_run(config, hosts)
    if len(placement.hosts) > 1:
        raise UserError(f"headrace doctor --gpus tests one host, and workers would be on {', '.join(placement.hosts)}")
    return config, hosts, placement


def _by_transport(config: Config, hosts: Sequence[Host]) -> tuple[list[Config], dict[str, str]]:
    """Return a configuration for each transport, and for each one that does not fit, why a run would be refused."""
    if config.delivery.transport != "auto":
        return [config], {}
    runs, refused = [], {}
    for name in NAMES:
        try:
            run = with_settings(config, [f"run.name=doctor-{name}", f"delivery.transport={name}"])
            runs.append(place_run(run, hosts)[0])
        except ConfigError as error:
            refused[name] = str(error)
    return runs, refused


def _test(config: Config, found: RunResult) -> None:
    """Make one run, and fill in what its journal says, or why it failed."""
    with Console(stderr=True).status(f"{found.transport}: starting") as status:
        try:
            if start_run(config, _Shown(status, found.transport)).outcome == "interrupted":
                raise KeyboardInterrupt
        except PeerDied as death:
            found.failure = one_line(": ".join([str(death), *death.last_lines.strip().splitlines()[-1:]]))
        except HeadraceError as error:
            found.failure = one_line(str(error))
    path = RunDir(Path(config.run.directory) / config.run.name).journal
    if not path.is_file():
        return  # The run ended before its first version.
    with open_readonly(path) as journal:
        versions, deliveries = journal.versions(), journal.deliveries()
        found.train_seconds = summarize_journal(journal)["train_seconds"]
        problems = journal.imbalances()
    engines = config.engine.at_start
    published = {version.id: version.published for version in versions}
    found.versions = len(versions)
    found.versions_proved = sum(count == engines for count in proofs(versions, deliveries).values())
    found.slowest_proof_seconds = max((each.time - published[each.version] for each in deliveries), default=None)
    found.longest_pause_seconds = max((each.swap_seconds for each in deliveries if each.version), default=None)
    found.failure = found.failure or failure_of(versions, deliveries, engines) or "".join(problems[:1])


def proofs(versions: Sequence[VersionRecord], deliveries: Sequence[DeliveryRecord]) -> dict[int, int]:
    """Return the number of engines that have proved each version."""
    return {
        version.id: len({each.engine for each in deliveries if each.version == version.id and each.proved})
        for version in versions
    }


def failure_of(versions: Sequence[VersionRecord], deliveries: Sequence[DeliveryRecord], engines: int) -> str:
    """Return what is wrong with the deliveries of a run to so many engines, in one line; empty if nothing is."""
    for each in deliveries:
        if not each.proved:
            return one_line(f"{each.engine} refused version {each.version}: {each.reason}")
    for version, count in proofs(versions, deliveries).items():
        if count < engines:
            return f"version {version} was proved by {count} of {engines} engines"
    return "" if len({version.digest for version in versions}) > 1 else "no version differs from the one before it"


class _Shown(Progress):
    """Shows the phase of a run beside a spinner."""

    def __init__(self, status: Status, transport: str) -> None:
        self._status = status
        self._transport = transport

    def update(self, snapshot: RunSnapshot) -> None:
        """Show what the run does now."""
        version = f"version {snapshot.version} of {snapshot.versions_total}"
        self._status.update(f"{self._transport}: {snapshot.phase}, {version}")


def _devices(places: Sequence[Place]) -> str:
    """Return the GPUs of these workers, in the order of the workers."""
    gpus = [gpu for place in places for gpu in place.gpus]
    return f"GPU {','.join(gpus)}" if gpus else "CPU"


def _figure(value: float | None, unit: str) -> str:
    return "none" if value is None else f"{value:.3g} {unit}"
