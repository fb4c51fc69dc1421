"""The command socket of a run: who may connect, what is answered, and what a command says without a live run."""

import asyncio
import json
import stat
from pathlib import Path

import pytest

from headrace.cluster.socket_dir import SocketDir
from headrace.errors import UserError
from headrace.pipeline.commands import ask, command_socket
from headrace.pipeline.scaling import ScaleAnswer, ScaleRequest


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run directory whose path is too long for a socket."""
    path = tmp_path / ("long" * 30)
    path.mkdir()
    (path / "config.toml").write_text('[model]\npath = "m"\n[task]\nkind = "gym"\nname = "chain_sum"\n')
    return path


def answer(request: ScaleRequest) -> ScaleAnswer:
    if request.engines is None:
        raise UserError("a line about\nwhat is wrong")
    return ScaleAnswer(before=1, after=request.engines)


def test_a_request_and_its_answer(run_dir: Path) -> None:
    async def use() -> None:
        sockets = SocketDir()
        try:
            async with command_socket(sockets.path / "commands", run_dir / "control.json", answer):
                mode = (sockets.path / "commands").stat().st_mode
                assert stat.S_ISSOCK(mode) and stat.S_IMODE(mode) == 0o600
                answered = await asyncio.to_thread(ask, run_dir, ScaleRequest(engines=3))
                assert answered == ScaleAnswer(before=1, after=3)
                with pytest.raises(UserError, match=r"^a line about what is wrong$"):
                    await asyncio.to_thread(ask, run_dir, ScaleRequest(add="http://a:1"))
                for damage in (b"\n", b"[]\n", b'{"engines": "x"}\n', b'{"other": 1}\n', b"\xff\n", b"x" * 100_000):
                    reader, writer = await asyncio.open_unix_connection(sockets.path / "commands")
                    writer.write(damage)
                    writer.write_eof()
                    assert "cannot be read" in json.loads(await reader.readline())["error"]
                    writer.close()
            assert not (run_dir / "control.json").exists()
        finally:
            sockets.remove()

    asyncio.run(use())


@pytest.mark.parametrize(
    ("control", "line"),
    [
        (None, "no run is live there, on this host"),
        ('{"socket": "/nowhere/commands"}', "no run is live there, on this host"),
        ("{", "the run does not answer: "),
        (json.dumps({"socket": "/tmp/" + "x" * 200}), "the run does not answer: "),
    ],
)
def test_a_run_that_is_not_live_is_one_line(run_dir: Path, control: str | None, line: str) -> None:
    if control is not None:
        (run_dir / "control.json").write_text(control)
    with pytest.raises(UserError) as caught:
        ask(run_dir, ScaleRequest(engines=2))
    assert str(caught.value).startswith(f"{run_dir}: {line}")


def test_what_is_no_run_directory_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a run directory"):
        ask(tmp_path, ScaleRequest(engines=2))
