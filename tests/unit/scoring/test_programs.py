"""Programs as scorers, in real sandboxes: what they may do, and how they are stopped when they do more."""

import asyncio
import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.channel.worker_side import MARK
from headrace.config import make_config
from headrace.config.scorers import ProgramConfig
from headrace.errors import ConfigError
from headrace.pipeline.inputs import make_stage
from headrace.scoring import programs
from headrace.scoring.base import Ended, ScoreError, Turn
from headrace.scoring.programs import Program
from headrace.scoring.sandbox import descendants, landlock_version
from headrace.types import Prompt, Rollout, Score, Trace
from waiting import until


def program(code: str, **keys: Any) -> Program:
    """A program of these lines of Python. `asked` is the object that it was given."""
    lines = f"import json, os, sys, time\nasked = json.load(sys.stdin)\n{code}"
    return Program(ProgramConfig(command=[sys.executable, "-I", "-S", "-c", lines], **{"timeout": 20.0, **keys}))


def ended(completion: str = "42", **data: Any) -> Ended:
    prompt = Prompt(id="p", messages=[{"role": "user", "content": "6 * 7?"}], data={"answer": "42", **data})
    trace = Trace.of_context(np.asarray([1, 2], np.int32))
    rollout = Rollout(id="1/0", index=0, traces=[trace], ending="finished")
    return Ended(prompt, rollout, [Turn(0, 1, 2, lambda: completion)])


async def judged(code: str, **keys: Any) -> Score:
    [score] = await program(code, **keys).score(ended())
    return score


async def refused(code: str, **keys: Any) -> str:
    with pytest.raises(ScoreError) as caught:
        await judged(code, **keys)
    return str(caught.value)


def marked() -> list[str]:
    """The live processes of all programs of this process."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            variables = (process / "environ").read_bytes().decode(errors="replace").split("\0")
            state = (process / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state != "Z" and any(each.startswith(f"{MARK}=") and ".program-" in each for each in variables):
            found.append(process.name)
    return found


async def test_a_program_reads_the_question_and_prints_the_score() -> None:
    score = await judged('print("thinking")\nprint(asked["completion"] == asked["answer"] and len(asked["prompt"]))')
    assert score.value == 6.0
    score = await judged('print(json.dumps({"reward": 0.5, "lines": 3}))')
    assert (score.value, score.metrics) == (0.5, {"lines": 3.0})


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("print('good')", "the program printed no number as its last line: 'good'"),
        ("pass", "the program printed no number as its last line: ''"),
        ("print('NaN')", "the reward function gave nan, not a finite number"),
        ("sys.exit('it is wrong')", "the program ended with code 1: it is wrong"),
        ("os.abort()", "the program was killed by SIGABRT"),
        ("while True: print('x' * 1000)", "the program printed more than 1,048,576 bytes"),
    ],
)
async def test_a_program_that_fails_is_a_reason(code: str, reason: str) -> None:
    assert await refused(code) == reason


async def test_a_program_that_hangs_is_ended_with_all_its_processes() -> None:
    began = time.monotonic()
    hangs = "import subprocess\nsubprocess.Popen(['sleep', '60'], start_new_session=True)\ntime.sleep(60)"
    assert await refused(hangs, timeout=2.0, processes=2) == "the program took more than 2 s"
    assert time.monotonic() - began < 20
    assert marked() == []


async def test_a_program_leaves_nothing_behind() -> None:
    left = "if os.fork() == 0:\n    os.setsid()\n    time.sleep(60)\nprint(1)"
    # The child holds the pipes, but it ends with the program.
    assert (await judged(left, processes=2)).value == 1.0
    assert marked() == []
    where = await refused("open('file', 'w').write('x')\nsys.exit(os.getcwd())")
    assert "headrace-program-" in where and not os.path.exists(where.rpartition(": ")[2])  # noqa: ASYNC240, PTH110


async def test_a_program_that_forks_is_stopped() -> None:
    assert "Resource temporarily unavailable" in await refused("os.fork()")
    assert "Resource temporarily unavailable" in await refused("import subprocess; subprocess.run(['true'])")
    threads = "import threading\nt = threading.Thread(target=print, args=(5,))\nt.start()\nt.join()"
    assert (await judged(threads)).value == 5.0


async def test_a_fork_bomb_never_has_more_processes_than_allowed() -> None:
    bomb = "while True:\n    try:\n        os.fork()\n    except OSError:\n        time.sleep(0.01)"
    running = asyncio.create_task(refused(bomb, processes=4, timeout=3.0))
    most = 0
    while not running.done():
        # One more is the sandbox itself.
        most = max(most, len(marked()) - 1)
        await asyncio.sleep(0.05)
    assert await running == "the program took more than 3 s"
    assert 2 <= most <= 4
    assert marked() == []


async def test_a_program_that_eats_memory_is_stopped() -> None:
    assert await refused("bytearray(256 << 20)", memory=128) == "the program ended with code 1: MemoryError"
    assert (await judged("bytearray(256 << 20)\nprint(1)", memory=1024)).value == 1.0


async def test_a_program_cannot_raise_its_limits_even_as_root() -> None:
    raises = "import resource\nresource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))"
    assert "not allowed to raise maximum limit" in await refused(raises)
    assert (await judged("print(int(open('/proc/self/status').read().split('CapEff:')[1].split()[0], 16))")).value == 0


@pytest.mark.parametrize(("number", "machine"), [(319, "x86_64"), (29, "x86_64"), (279, "aarch64"), (194, "aarch64")])
async def test_memory_that_no_limit_counts_is_refused(number: int, machine: str) -> None:
    asks = (
        "import ctypes\nlibrary = ctypes.CDLL(None, use_errno=True)\n"
        f"found = library.syscall({number}, b'x', 0, 0) if os.uname().machine == {machine!r} else -1\n"
        "print(json.dumps({'reward': found, 'errno': ctypes.get_errno()}))"
    )
    score = await judged(asks)
    assert score.value == -1
    assert score.metrics["errno"] in (0, errno.ENOSYS)


async def test_a_sandbox_that_does_not_end_is_killed_with_its_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "END_SECONDS", 0.5)
    child = "if os.fork() == 0:\n    os.setsid()\n    os.execve('/bin/sleep', ['sleep', '60'], {})\ntime.sleep(60)"
    running = asyncio.create_task(judged(child, processes=2))
    await until(lambda: len(marked()) == 2)
    sandbox_pid = min(map(int, marked()))
    await until(lambda: len(descendants(sandbox_pid)) == 2)
    below = descendants(sandbox_pid)
    os.kill(sandbox_pid, signal.SIGSTOP)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    # The child has no mark and a session of its own.
    await until(lambda: not any(_runs(pid) for pid in below))


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_program_ends_with_its_owner(tmp_path: Path) -> None:
    child = "import os, time\nif os.fork() == 0:\n    os.execve('/bin/sleep', ['sleep', '60'], {})\ntime.sleep(60)"
    owner = (
        "import asyncio, sys\nfrom headrace.config.scorers import ProgramConfig\n"
        "from headrace.scoring.programs import run_program\n"
        f"config = ProgramConfig(command=[sys.executable, '-S', '-c', {child!r}], processes=2, timeout=60.0)\n"
        "asyncio.run(run_program(config, b''))\n"
    )
    with subprocess.Popen([sys.executable, "-c", owner], env={**os.environ, "TMPDIR": str(tmp_path)}) as process:
        deadline = time.monotonic() + 20
        while len(below := descendants(process.pid)) < 3 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(below) == 3
        process.kill()
    while any(_runs(pid) for pid in below) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(_runs(pid) for pid in below)


@pytest.mark.parametrize("family", ["AF_INET", "AF_INET6", "AF_UNIX", "AF_NETLINK"])
async def test_a_program_that_opens_a_socket_is_stopped(family: str) -> None:
    opens = f"import socket\nsocket.socket(socket.{family}, socket.SOCK_DGRAM)\nprint(1)"
    assert "PermissionError: [Errno 1] Operation not permitted" in await refused(opens)
    assert (await judged(opens, network=True)).value == 1.0


async def test_a_child_of_a_program_has_its_limits_too() -> None:
    opens = "import subprocess\nsubprocess.run([sys.executable, '-c', 'import socket; socket.socket()'], check=True)"
    assert "CalledProcessError" in await refused(opens, processes=2)


async def test_a_program_sees_no_variable_of_the_controller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "abc")
    keys = "print(int('SECRET_TOKEN' not in os.environ and os.environ['MINE'] == 'x'))"
    assert (await judged(keys, environment={"MINE": "x"})).value == 1.0


async def test_a_program_writes_only_in_its_directory(tmp_path: Path) -> None:
    writes = f"open({str(tmp_path / 'file')!r}, 'w').write('x')\nprint(1)"
    if landlock_version():
        assert "Permission denied" in await refused(writes)
        assert not (tmp_path / "file").exists()
    else:
        assert (await judged(writes)).value == 1.0
    assert (await judged("open('file', 'w').write('x')\nprint(len(open('file').read()))")).value == 1.0


async def test_a_cancelled_judgement_ends_its_program() -> None:
    running = asyncio.create_task(judged("time.sleep(60)"))
    await until(lambda: len(marked()) == 2)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert marked() == []


async def test_what_cannot_run_is_found_before_the_run() -> None:
    with pytest.raises(ConfigError, match=r"^\[scorers.program\] command: there is no program 'no-such-program'"):
        await Program(ProgramConfig(command=["no-such-program"])).start()
    with pytest.raises(ConfigError, match=r"^\[scorers.program\]: an empty program cannot run under these limits"):
        await Program(ProgramConfig(command=["true"], memory=1)).start()
    await Program(ProgramConfig(command=["true"])).start()


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"environment": {"PATH": "/x"}}, "[scorers.tests] environment: PATH is set by the sandbox"),
        ({"environment": {"A=B": "x"}}, "[scorers.tests] environment: 'A=B' cannot be a variable with this value"),
        ({"command": ["a\0b"]}, "[scorers.tests] command: it holds a zero byte"),
    ],
)
def test_what_is_wrong_with_a_program_is_one_line(tmp_path: Path, keys: dict[str, Any], line: str) -> None:
    section = {"kind": "program", "command": ["true"], **keys}
    task = {"kind": "gym", "name": "spell_backward"}
    with pytest.raises(ConfigError) as caught:
        make_config({"model": {"path": "m"}, "task": task, "scorers": {"tests": section}}, base=tmp_path)
    assert str(caught.value) == line


def test_a_file_beside_the_toml_is_the_program(tmp_path: Path) -> None:
    (tmp_path / "check.py").write_text("print(1)")
    raw = {
        "model": {"path": "m"},
        "task": {"kind": "gym", "name": "spell_backward"},
        "scorers": {"tests": {"kind": "program", "command": ["python3", "check.py"]}},
    }
    config = make_config(raw, base=tmp_path)
    assert config.scorers["tests"].command == ["python3", str(tmp_path / "check.py")]
    before = make_stage(config).scorers["tests"].version
    (tmp_path / "check.py").write_text("print(2)")
    assert make_stage(config).scorers["tests"].version != before
