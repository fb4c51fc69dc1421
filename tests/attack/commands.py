"""Runs commands of `headrace` and judges how they ended: a damaged input costs one clear line, never a traceback."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from command_server import CommandServer

ROOT = Path(__file__).parents[2]
SECONDS = 240.0
"""A command that takes longer hangs. On a machine with much else to do, loading torch alone can take a minute."""
EACH_FORK = 50
MOST_LINES = 40
LONGEST_LINE = 4_000
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


class Commands:
    """Commands, many of them in one fork of a process that has loaded torch, or each in a process of its own."""

    def __init__(self, *, own_process: bool = False) -> None:
        self._server = None if own_process else CommandServer(EACH_FORK)
        self.last: Outcome | None = None

    def run(self, *arguments: str, seconds: float = SECONDS) -> Outcome:
        """Run `headrace` with these arguments from the root of the checkout."""
        try:
            if self._server is not None:
                done = self._server.run(arguments, seconds, ROOT)
            else:
                command = [sys.executable, "-m", "headrace", *arguments]
                done = subprocess.run(
                    command, capture_output=True, encoding="utf-8", errors="replace", timeout=seconds, cwd=ROOT
                )
        except subprocess.TimeoutExpired:
            done = subprocess.CompletedProcess(arguments, -1, "", f"not over after {seconds:g} s")
        self.last = Outcome(done)
        return self.last

    def close(self) -> None:
        """End the process that commands are forked from."""
        if self._server is not None:
            self._server.close()


class Outcome:
    """How a command ended, and what it said."""

    def __init__(self, done: subprocess.CompletedProcess[str]) -> None:
        self.code = done.returncode
        self.stderr = done.stderr
        self.said = done.stdout + done.stderr

    def problem(self, *, failing: tuple[int, ...] = (1, 2)) -> str | None:
        """Return what is wrong with how the command ended, or None."""
        if "Traceback (most recent call last)" in self.said:
            return "a traceback: " + self.said.strip().splitlines()[-1][:300]
        if self.code not in (0, *failing):
            return f"exit code {self.code}: {self.stderr[-300:]}"
        if self.code and not self.stderr.strip():
            return f"exit code {self.code} without a word"
        lines = self.stderr.splitlines()
        if self.code and (len(lines) > MOST_LINES or any(len(line) > LONGEST_LINE for line in lines)):
            return f"{len(lines)} lines of errors, the longest of {max(map(len, lines))} characters"
        if CONTROL.search(self.said):
            return "control characters reach the terminal"
        return None

    def names(self, *words: str) -> bool:
        """Return whether the command said one of these words."""
        return any(word in self.said for word in words)

    def same_as(self, other: Outcome) -> bool:
        """Return whether both commands ended alike. Directories, numbers and line breaks may differ."""
        return self.code == other.code and _plain(self.stderr) == _plain(other.stderr)


def _plain(text: str) -> str:
    return re.sub(r"\d+|\s+", "", text)
