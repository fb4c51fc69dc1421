"""A holder and its worker, as real processes: the key, the end, and that the worker does not outlive its holder."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from headrace.cluster.base import KEY_LINE
from headrace.cluster.launchers.holder import Holder
from waiting import alive, until

KEY = f"print({KEY_LINE + 'PUBLIC'!r}); "
SLEEP = "import time; time.sleep(600)"


def held(code: str, **environment: str) -> Holder:
    return Holder(["-c", code], environment, "/")


def test_the_key_comes_after_whatever_libraries_say() -> None:
    holder = held(f"import sys; print('a warning', file=sys.stderr); {KEY}{SLEEP}")
    assert holder.key(printed=True) == "PUBLIC"
    holder.kill()
    assert holder.wait() == (-signal.SIGKILL, "")
    holder.kill()


@pytest.mark.parametrize(
    ("code", "end"),
    [
        ("import sys; print('first'); sys.exit('last')", (1, "first\nlast")),
        (f"{KEY}print('served'); raise SystemExit(7)", (7, "served")),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", (-signal.SIGTERM, "")),
    ],
)
def test_the_end_is_told_with_code_and_last_lines(code: str, end: tuple[int, str]) -> None:
    holder = held(code)
    assert holder.key(printed=True) == ("PUBLIC" if KEY in code else "")
    assert holder.wait() == end


def test_a_worker_without_a_key_is_not_waited_for() -> None:
    holder = held(SLEEP)
    assert holder.key(printed=False) == ""
    holder.kill()
    assert holder.wait()[0] == -signal.SIGKILL


def test_a_scheduler_leaves_no_trace_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_JOB_ID", "SLURM_PROCID", "PMIX_RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "PLAIN"):
        monkeypatch.setenv(name, "theirs")
    shown = "import os; print(*sorted(name for name, value in os.environ.items() if value in ('theirs', 'ours')))"
    holder = held(f"{shown}; print(os.getcwd(), os.getsid(0) == os.getpid())", OWN="ours")
    assert holder.wait() == (0, "OWN PLAIN\n/ True")


HOLDING = """
import sys
from headrace.cluster.launchers.holder import Holder

holder = Holder(["-c", sys.argv[1]], {}, "/")
holder.wait()
"""
DYING = """
import os, pathlib, sys, time
from headrace.channel.worker_side import die_with_parent

die_with_parent()
pathlib.Path(os.environ["NOTE"]).write_text(str(os.getpid()))
time.sleep(600)
"""


async def test_a_worker_ends_with_its_holder(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    holding = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", HOLDING, DYING), env={**os.environ, "NOTE": str(note)}
    )
    await until(lambda: note.is_file() and note.read_text())
    pid = note.read_text()
    assert alive(pid)
    holding.kill()
    await holding.wait()
    await until(lambda: not alive(pid))
