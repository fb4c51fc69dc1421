"""A program as a scorer. It is started for every answer, in a sandbox, and what it prints is the score.

    the prompt and the answer, as JSON ──stdin──▶ program ──stdout──▶ the last line: a number, or {"reward": ..., ...}

A program that fails, hangs, prints no number or exceeds a limit costs one judgement, never the run. It sees none of the
controller's environment variables, works in a directory of its own, and leaves no process and no file behind.
"""

import asyncio
import contextlib
import hashlib
import itertools
import json
import os
import shutil
import signal
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec

from headrace.channel.worker_side import MARK, end_marked, owner_mark
from headrace.config.scorers import ProgramConfig
from headrace.errors import ConfigError, one_line
from headrace.scoring import sandbox
from headrace.scoring.asking import Asking, NoUseToRetry
from headrace.scoring.base import Ended, ScoreError, Scorer
from headrace.scoring.functions import Question, judgement
from headrace.types import Score

OUTPUT_BYTES = 1 << 20
"""The most bytes that a program may print. It is ended when it prints more."""
SHOWN = 200
"""How much of a program's last line is shown, in characters."""
END_SECONDS = 2.0
"""Seconds that a sandbox has to end its program."""
TRIAL_SECONDS = 30.0
PATH = "/usr/local/bin:/usr/bin:/bin"

_numbers = itertools.count()


class Program(Scorer):
    """A program as a scorer. It gives one score to a whole rollout, based on the text of its last turn."""

    keeps_deadlines = True  # `score` ends within the time limit, so the stage sets none of its own.

    def __init__(self, config: ProgramConfig, section: str = "scorers.program") -> None:
        """`section` is the section of the configuration that mistakes name."""
        self._config = config
        self._section = section
        self._asking = Asking(config, timed=False)
        self.answers_within = self._asking.longest
        self.version = _version(config)

    async def start(self) -> None:
        """Find out whether this system can enforce the limits. Raises `ConfigError` if it cannot."""
        if sys.platform != "linux":
            raise ConfigError(
                f"[{self._section}] kind: a program is limited by means of Linux, and this system is another one"
            )
        trial = msgspec.structs.replace(self._config, command=[sys.executable, "-I", "-S", "-c", "print(1)"])
        try:
            async with asyncio.timeout(TRIAL_SECONDS):
                await run_program(trial, b"")
        except TimeoutError:
            why = f"did not end in its sandbox within {TRIAL_SECONDS:g} s"
            raise ConfigError(f"[{self._section}]: an empty program {why}") from None
        except ScoreError as error:
            raise ConfigError(f"[{self._section}]: an empty program cannot run under these limits: {error}") from error
        if shutil.which(self._config.command[0], path=PATH) is None:
            raise ConfigError(f"[{self._section}] command: there is no program {self._config.command[0]!r} in {PATH}")

    async def score(self, ended: Ended) -> list[Score]:
        """Return the program's judgement as a score."""
        prompt = ended.prompt
        question = Question(
            completion=ended.completion, messages=prompt.messages or [], text=prompt.text, data=prompt.data
        )
        try:
            asked = msgspec.json.encode(question.fields())
        except (TypeError, ValueError, RecursionError) as error:
            raise ScoreError(f"the prompt's data cannot be sent to a program: {error}") from error
        printed = await self._asking.ask(lambda attempt: self._run(asked))
        found = judgement(_last_value(printed))
        assert found.reward is not None
        return [Score(value=found.reward, metrics=found.metrics)]

    async def _run(self, asked: bytes) -> str:
        try:
            async with asyncio.timeout(self._config.timeout):
                return await run_program(self._config, asked)
        except TimeoutError:
            raise NoUseToRetry(f"the program took more than {self._config.timeout:g} s") from None


async def run_program(config: ProgramConfig, asked: bytes) -> str:
    """Run the program in its sandbox, and return what it printed. Raises `ScoreError` if it fails.

    However this ends, no process of the program is left.
    """
    mark = f"{owner_mark()}.program-{next(_numbers)}"
    async with _directory() as directory:
        settings = {
            "command": config.command,
            "memory": config.memory << 20,
            "processes": config.processes,
            "network": config.network,
            "seconds": config.timeout,
            "directory": directory,
        }
        own = {"PATH": PATH, "HOME": directory, "TMPDIR": directory, "LANG": "C.UTF-8", MARK: mark}
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-S", str(sandbox.__file__), json.dumps(settings),
                stdin=PIPE, stdout=PIPE, stderr=PIPE, cwd=directory, env={**config.environment, **own},
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise ScoreError(f"no process can be started: {error.strerror}") from error
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(_feed(process, asked), name="feed a program")
                printed = tasks.create_task(_read(process, process.stdout), name="read a program")
                said = tasks.create_task(_read(process, process.stderr), name="read a program's errors")
            code = await process.wait()
        finally:
            await _end(process, mark)
    if len(printed.result()) > OUTPUT_BYTES or len(said.result()) > OUTPUT_BYTES:
        raise NoUseToRetry(f"the program printed more than {OUTPUT_BYTES:,} bytes")
    if code:
        raise NoUseToRetry(_why(code, said.result().decode(errors="replace")))
    return printed.result().decode(errors="replace")


@contextlib.asynccontextmanager
async def _directory() -> AsyncIterator[str]:
    """Yield an empty directory, which is removed afterwards. A program may leave so many files that this takes time."""
    try:
        made = tempfile.TemporaryDirectory(prefix="headrace-program-", ignore_cleanup_errors=True)
    except OSError as error:
        raise ScoreError(f"no directory can be made for the program: {error.strerror}") from error
    try:
        yield made.name
    finally:
        # The thread ends its work even if this task is cancelled meanwhile.
        await asyncio.to_thread(made.cleanup)


async def _feed(process: Process, asked: bytes) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # The program need not read.
        process.stdin.write(asked)
        await process.stdin.drain()
    process.stdin.close()


async def _read(process: Process, stream: asyncio.StreamReader | None) -> bytes:
    """Read to the end. If the program prints too much, end it, and return a little more than it may print."""
    assert stream is not None
    found = b""
    while piece := await stream.read(1 << 16):
        if len(found) <= OUTPUT_BYTES:
            found += piece
            if len(found) > OUTPUT_BYTES:
                _terminate(process)
    return found


def _terminate(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)


async def _end(process: Process, mark: str) -> None:
    """End the sandbox, which ends its program. If it does not, kill everything below it, and what has its mark."""
    if process.returncode is not None:
        return
    _terminate(process)
    for kill in (True, False):  # Wait for the end, then kill and wait once more.
        try:
            async with asyncio.timeout(END_SECONDS):
                await _ended(process)
            return
        except TimeoutError:
            if kill:
                for pid in (*sandbox.descendants(process.pid), process.pid):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                end_marked(mark)


async def _ended(process: Process) -> None:
    """Wait until the process has ended. Its pipes are read to their ends, because asyncio waits for those too."""
    for stream in (process.stdout, process.stderr):
        while stream is not None and await stream.read(1 << 16):
            pass
    await process.wait()


def _why(code: int, said: str) -> str:
    """Return why a program failed, from its exit code and what it wrote to its standard error."""
    lines = [line for line in said.splitlines() if line.strip()]
    last = one_line(lines[-1], SHOWN) if lines else ""
    if code == sandbox.REFUSED and last:
        return last
    how = f"ended with code {code}"
    with contextlib.suppress(ValueError):
        how = f"was killed by {signal.Signals(code - 128).name}"
    return f"the program {how}" + (f": {last}" if last else "")


def _last_value(printed: str) -> Any:
    """Return the value of the last line: a number, or an object with numbers. Raises `ScoreError`."""
    lines = [line for line in printed.splitlines() if line.strip()]
    try:
        return json.loads(lines[-1])
    except (ValueError, IndexError, RecursionError):
        shown = one_line(lines[-1], SHOWN) if lines else ""
        raise ScoreError(f"the program printed no number as its last line: {shown!r}") from None


def _version(config: ProgramConfig) -> str:
    """Return a short digest of the command, and of the files that it names."""
    digest = hashlib.blake2b(msgspec.json.encode([config.command, config.environment]), digest_size=6)
    for word in config.command:
        with contextlib.suppress(OSError, ValueError):
            if Path(word).is_file() and Path(word).stat().st_size <= OUTPUT_BYTES:
                digest.update(Path(word).read_bytes())
    return digest.hexdigest()
