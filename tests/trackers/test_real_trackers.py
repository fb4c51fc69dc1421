"""A run with all built-in trackers, each in its offline mode, and what their own readers find of it afterwards.

Run by `make trackers`, in an environment that has the real packages.
"""

from __future__ import annotations

import json
import math
import os
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headrace.observe.metrics import read_metrics
from headrace.observe.trackers import feed
from headrace.observe.trackers.base import NAMES, numbers_of
from headrace.observe.trackers.feed import Trackers

pytestmark = pytest.mark.trackers
ROOT = Path(__file__).parents[2]
SETTINGS = (
    "run.name=tracked",
    "run.versions=3",
    "warm_start.steps=2",
    "warm_start.batch=8",
    "rollouts.group_size=4",
    "rollouts.max_tokens=12",
    "buffer.groups=4",
    "engine.slots=16",
    "evaluate.prompts=4",
    "evaluate.every=0",
    "observe.display=plain",
    "observe.trackers=['wandb', 'tensorboard', 'mlflow', 'trackio']",
    "observe.tracker_options.wandb.mode=offline",
)
Curves = dict[str, list[tuple[int, float]]]
"""Name -> the points of the curve, (step, value), in order."""


def headrace(*arguments: str) -> str:
    # MLflow's file store must be asked for; wandb must not find an account of the machine.
    environment = {**os.environ, "MLFLOW_ALLOW_FILE_STORE": "true", "WANDB_API_KEY": ""}
    command = [sys.executable, "-m", "headrace", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that was resumed once."""
    folder = tmp_path_factory.mktemp("tracked")
    uri = f"file:{folder}/mlruns"
    chosen = [
        *SETTINGS,
        f"run.directory={folder}",
        f"observe.tracker_options.mlflow.uri={uri}",
        f"observe.tracker_options.trackio.directory={folder / 'trackio'}",
    ]
    words = [word for setting in chosen for word in ("--set", setting)]
    said = headrace("train", "examples/quickstart/quickstart.toml", *words)
    said += headrace("resume", str(folder / "tracked"), "--set", "run.versions=5")
    assert "switched off" not in said, said
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    return folder / "tracked"


def expected(run_dir: Path) -> Curves:
    curves: Curves = {}
    step = 0
    for record in read_metrics(run_dir / "metrics.jsonl"):
        step = record.get("step", step)
        for name, number in numbers_of(record).items():
            curves.setdefault(name, []).append((step, number))
    return curves


def frames_of_wandb(data: bytes) -> Iterator[bytes]:
    """The records of a file of an offline run. wandb has no reader for Python; the file is a log of LevelDB.

    A block has 32 KiB. A record is one piece, or several if it does not fit into its block, and a piece has a head of
    seven bytes: checksum, length, and whether it is a whole record, the first piece, a middle or the last one.
    """
    whole, first, last = 1, 2, 4
    place, record = 7, b""  # wandb's own head is seven bytes too.
    while place < len(data):
        if (left := -place % 32768) and left < 7:
            place += left
        length, kind = struct.unpack_from("<4xHB", data, place)
        place += 7
        record = (b"" if kind in (whole, first) else record) + data[place : place + length]
        place += length
        if kind in (whole, last):
            yield record


def of_wandb(run_dir: Path) -> Curves:
    from wandb.proto.wandb_internal_pb2 import Record

    curves: Curves = {}
    files = sorted((run_dir / "trackers/wandb").glob("offline-run-*/run-*.wandb"))
    assert len(files) == 2, "one for each process"
    assert len({file.name for file in files}) == 1, "of one run"
    for file in files:
        for record in map(Record.FromString, frames_of_wandb(file.read_bytes())):
            items = {"/".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
            if "step" in items:
                step = json.loads(items.pop("step"))
                for name, text in items.items():
                    if name != "time" and not name.startswith("_"):
                        curves.setdefault(name, []).append((step, float(json.loads(text))))
    return curves


def of_tensorboard(run_dir: Path) -> Curves:
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event

    curves: Curves = {}
    for file in sorted((run_dir / "trackers/tensorboard").iterdir()):
        for data in RawEventFileLoader(str(file)).Load():
            event = Event.FromString(data)
            for value in event.summary.value:
                curves.setdefault(value.tag, []).append((event.step, value.simple_value))
    return curves


def of_mlflow(run_dir: Path, uri: str = "") -> Curves:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri or f"file:{run_dir.parent}/mlruns")
    experiment = client.get_experiment_by_name("headrace")
    [run] = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["buffer.groups"] == "4"
    return {
        name: [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, name)]
        for name in run.data.metrics
    }


def of_trackio(run_dir: Path) -> Curves:
    curves: Curves = {}
    with sqlite3.connect(run_dir.parent / "trackio/headrace.db") as db:
        rows = db.execute("SELECT run_name, step, metrics FROM metrics ORDER BY id").fetchall()
    assert len({name for name, _, _ in rows}) == 1, "one run"
    for _, step, text in rows:
        for name, value in json.loads(text).items():
            curves.setdefault(name, []).append((step, float(value)))
    return curves


READERS: dict[str, Callable[[Path], Curves]] = {
    "wandb": of_wandb,
    "tensorboard": of_tensorboard,
    "mlflow": of_mlflow,
    "trackio": of_trackio,
}


def check(wanted: Curves, found: Curves) -> None:
    assert wanted.keys() == found.keys()
    assert [step for step, _ in wanted["reward"]] == [1, 2, 3, 4, 5]
    for curve, points in wanted.items():
        for (step, value), (other, read) in zip(sorted(points), sorted(found[curve]), strict=True):
            # TensorBoard stores 32 bits.
            assert step == other and math.isclose(value, read, rel_tol=1e-6, abs_tol=1e-12), curve


@pytest.mark.parametrize("name", NAMES)
def test_it_holds_the_same_curves_as_the_metrics(tracked: Path, name: str) -> None:
    check(expected(tracked), READERS[name](tracked))


def test_mlflow_in_a_database(tracked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Here the database is made when the run is over already, which takes longer than the end of a run may wait.
    monkeypatch.setattr(feed, "CLOSE_SECONDS", 200.0)
    options = {"mlflow": {"uri": f"sqlite:///{tmp_path}/mlflow.db"}}
    trackers = Trackers(["mlflow"], "run", {"buffer": {"groups": 4}}, pytest.fail, options=options, folder=tmp_path)
    for record in read_metrics(tracked / "metrics.jsonl"):
        trackers.log(record)
    trackers.close()
    check(expected(tracked), of_mlflow(tracked, options["mlflow"]["uri"]))


def test_a_server_that_is_away_does_not_hold_the_run_up(tmp_path: Path) -> None:
    words = [word for setting in SETTINGS[:-2] for word in ("--set", setting)]
    more = ("observe.trackers=['mlflow']", "observe.tracker_options.mlflow.uri=http://127.0.0.1:9")
    words += [word for setting in (*more, f"run.directory={tmp_path}") for word in ("--set", setting)]
    said = headrace("train", "examples/quickstart/quickstart.toml", *words)
    [line] = [line for line in said.splitlines() if "switched off" in line]
    assert line.startswith("[observe] trackers: mlflow ")
    assert (tmp_path / "tracked/summary.json").is_file()
