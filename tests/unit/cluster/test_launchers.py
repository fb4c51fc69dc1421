"""Both launchers, on real worker processes: how these end is told, they can be seen, and none is left."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest

from headrace.cluster.base import EXIT_USER_ERROR, KEY_LINE
from headrace.cluster.launchers.base import Launcher, WorkerSpec
from headrace.cluster.launchers.local import SHARED, ForkedLauncher, LocalLauncher, make_launcher
from headrace.cluster.placement import Place
from headrace.config import dump_config, load_config
from headrace.errors import ConfigError

ROOT = Path(__file__).parents[3]
QUICKSTART = ROOT / "examples/quickstart/quickstart.toml"
SECONDS = 60.0


@pytest.fixture(autouse=True)
def no_shared_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SHARED, raising=False)


WITHOUT_LIBRARIES = """
import sys, time, types

for name in ("headrace.engines.embedded.building", "headrace.training.serving"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].serve = lambda *arguments: time.sleep(600)
"""


@pytest.fixture
def light(tmp_path: Path) -> dict[str, str]:
    """The environment of a seed that loads none of the libraries of workers: these take seconds, and are not used."""
    (tmp_path / "light").mkdir()
    (tmp_path / "light" / "sitecustomize.py").write_text(WITHOUT_LIBRARIES)
    return {"PYTHONPATH": os.pathsep.join([str(tmp_path / "light"), os.environ.get("PYTHONPATH", "")])}


@pytest.fixture(params=[LocalLauncher, ForkedLauncher])
async def launcher(request: pytest.FixtureRequest, light: dict[str, str]) -> AsyncIterator[Launcher]:
    launcher = LocalLauncher() if request.param is LocalLauncher else ForkedLauncher(light)
    yield launcher
    await launcher.stop(0.0)


@pytest.fixture
def spec(tmp_path: Path) -> WorkerSpec:
    """A worker that waits for its controller, which is not there."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "config.toml").write_text(dump_config(load_config(QUICKSTART, [f"run.directory={tmp_path}"])))
    return WorkerSpec(role="trainer", rank=0, address=f"ipc://{tmp_path}/hub", run_dir=str(run_dir))


def seen(run_dir: str) -> dict[int, list[str]]:
    """Workers of a run by process id, with their command lines."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().decode().rstrip("\0").split("\0")
        except OSError:
            continue
        if "headrace.cluster.worker_main" in command and run_dir in command:
            found[int(process.name)] = command
    return found


def environment(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/environ").read_text().split("\0")


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


async def until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


async def test_a_mistake_is_told_with_its_line_and_exit_code(launcher: Launcher, tmp_path: Path) -> None:
    await launcher.start(WorkerSpec(role="engine", rank=3, address="ipc://nowhere", run_dir=str(tmp_path)))
    exited = await asyncio.wait_for(launcher.next_exit(), SECONDS)
    assert (exited.name, exited.code) == ("engine-3", EXIT_USER_ERROR)
    assert str(tmp_path / "config.toml") in exited.last_lines.splitlines()[-1]
    assert (tmp_path / "logs" / "engine-3.log").read_text().strip().endswith(exited.last_lines.splitlines()[-1])


async def test_the_lines_of_an_earlier_start_are_not_told_again(launcher: Launcher, spec: WorkerSpec) -> None:
    """The log of all starts is one file, and what killed this process is not in it."""
    log = Path(spec.run_dir) / "logs" / f"{spec.name}.log"
    log.parent.mkdir()
    log.write_text("Traceback of the process before\n")
    await launcher.start(spec)
    await until(lambda: seen(spec.run_dir))
    os.kill(next(iter(seen(spec.run_dir))), signal.SIGKILL)
    exited = await asyncio.wait_for(launcher.next_exit(), SECONDS)
    assert (exited.code, exited.last_lines) == (-signal.SIGKILL, "")


async def test_a_worker_is_seen_killed_told_and_started_again(launcher: Launcher, spec: WorkerSpec) -> None:
    for _ in range(2):
        await launcher.start(spec)
        await until(lambda: seen(spec.run_dir))
        ((pid, command),) = seen(spec.run_dir).items()
        assert command == [sys.executable, "-m", "headrace.cluster.worker_main", *spec.arguments]
        assert os.getsid(pid) == pid, "its group is killed as a whole"
        launcher.kill(spec.name)
        exited = await asyncio.wait_for(launcher.next_exit(), SECONDS)
        assert (exited.name, exited.code) == ("trainer-0", -signal.SIGKILL)
        assert not seen(spec.run_dir)
    launcher.kill(spec.name)


async def test_a_worker_sees_the_gpus_of_its_place(spec: WorkerSpec) -> None:
    launcher = LocalLauncher({"CUDA_VISIBLE_DEVICES": "0,1,2"})
    place = Place(role="trainer", rank=0, host="localhost", gpus=("2",), maps=("0",), neighbours=("engine-1",))
    placed = msgspec.structs.replace(spec, environment=place.environment, neighbours=place.neighbours)
    await launcher.start(placed)
    await until(lambda: seen(spec.run_dir))
    ((pid, command),) = seen(spec.run_dir).items()
    assert "CUDA_VISIBLE_DEVICES=2,0" in environment(pid)
    assert command[-2:] == ["--neighbours", "engine-1"]
    launcher.kill(spec.name)
    await asyncio.wait_for(launcher.next_exit(), SECONDS)


async def test_stop_leaves_nothing_and_may_be_called_again(launcher: Launcher, spec: WorkerSpec) -> None:
    await launcher.start(spec)
    await until(lambda: seen(spec.run_dir))
    await launcher.stop(0.1)
    assert not seen(spec.run_dir)
    await launcher.stop(0.1)


async def test_a_fork_server_that_dies_takes_its_workers_along_and_another_grows(
    spec: WorkerSpec, light: dict[str, str]
) -> None:
    launcher = ForkedLauncher(light)
    for _ in range(2):
        await launcher.start(spec)
        await until(lambda: seen(spec.run_dir))
        ((pid, _),) = seen(spec.run_dir).items()
        os.kill(parent(pid), signal.SIGKILL)
        exited = await asyncio.wait_for(launcher.next_exit(), SECONDS)
        assert (exited.name, exited.code) == ("trainer-0", -signal.SIGKILL)
        await until(lambda: not seen(spec.run_dir))
    await launcher.stop(0.0)


async def test_workers_that_start_at_once_have_one_fork_server(spec: WorkerSpec) -> None:
    launcher = ForkedLauncher()  # It loads all libraries, and is asked for both workers before it has loaded them.
    other = msgspec.structs.replace(spec, rank=1)
    await asyncio.gather(launcher.start(spec), launcher.start(other))
    await until(lambda: len(seen(spec.run_dir)) == 2)
    first, second = seen(spec.run_dir)
    assert parent(first) == parent(second)
    await launcher.stop(0.0)
    assert not seen(spec.run_dir)


@pytest.mark.parametrize("library", ["msgspec", "torch"])
async def test_a_library_that_cannot_be_loaded_is_named(spec: WorkerSpec, tmp_path: Path, library: str) -> None:
    (tmp_path / f"{library}.py").write_text("raise ImportError('this copy is broken')\n")
    search = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    launcher = ForkedLauncher({"PYTHONPATH": search})
    await launcher.start(spec)
    exited = await asyncio.wait_for(launcher.next_exit(), SECONDS)
    assert exited.code == 1
    assert exited.last_lines.endswith("ImportError: this copy is broken")
    await launcher.stop(0.0)


OWNER = """
import asyncio, sys
from headrace.cluster.launchers.base import WorkerSpec
from headrace.cluster.launchers.local import ForkedLauncher

async def main():
    await ForkedLauncher().start(WorkerSpec(role="trainer", rank=0, address=sys.argv[1], run_dir=sys.argv[2]))
    await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_workers_end_with_the_process_that_asked_for_them(spec: WorkerSpec, light: dict[str, str]) -> None:
    owner = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", OWNER, spec.address, spec.run_dir), env={**os.environ, **light}
    )
    await until(lambda: seen(spec.run_dir))
    owner.kill()
    await owner.wait()
    await until(lambda: not seen(spec.run_dir))


def test_a_run_on_cpus_forks_and_one_may_ask_for_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.cluster.launchers.local.GPU_DRIVER", ROOT)

    def made(*settings: str) -> type:
        return type(make_launcher(load_config(QUICKSTART, list(settings))))

    assert made("engine.device=cpu", "training.device=cpu") is ForkedLauncher
    assert made("engine.device=auto", "training.device=cpu") is LocalLauncher
    assert made("engine.device=auto", "pipeline.launcher=forked") is ForkedLauncher
    assert made("engine.device=cpu", "training.device=cpu", "pipeline.launcher=local") is LocalLauncher
    monkeypatch.setattr("headrace.cluster.launchers.local.GPU_DRIVER", ROOT / "no such file")
    assert made("engine.device=auto", "training.device=auto") is ForkedLauncher


def test_the_launcher_for_ray_says_how_to_get_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # As if Ray was not installed.
    monkeypatch.delitem(sys.modules, "headrace.cluster.launchers.ray", raising=False)
    with pytest.raises(ConfigError) as refused:
        make_launcher(load_config(QUICKSTART, ["pipeline.launcher=ray"]))
    assert str(refused.value) == "[pipeline] launcher = \"ray\" needs Ray: pip install 'headrace[ray]'"


def test_a_hub_key_that_begins_with_a_dash_is_not_taken_for_an_option() -> None:
    spec = WorkerSpec(
        role="engine", rank=0, address="tcp://127.0.0.1:1", run_dir="", away=True, server_key="-" + "a" * 39
    )
    command = [sys.executable, "-m", "headrace.cluster.worker_main", *spec.arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as worker:
        assert worker.stdout is not None
        said = worker.stdout.readline()
        worker.kill()
    assert said.startswith(KEY_LINE)
