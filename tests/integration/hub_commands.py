"""Commands with a Hugging Face home of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from runs import ROOT, small_settings

from headrace.cluster.launchers.local import SHARED

TIMEOUTS = ("HF_HUB_DOWNLOAD_TIMEOUT", "HF_HUB_ETAG_TIMEOUT")


def command(home: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A command with a Hugging Face home of its own, and no token or endpoint of the machine's."""
    # The fork server that tests share has read its own variables when it loaded huggingface_hub.
    inherited = {
        name: value for name, value in os.environ.items() if name != SHARED and not name.startswith(("HF_", "HUGGING"))
    }
    return subprocess.run(
        [sys.executable, "-m", "headrace", *arguments],
        capture_output=True,
        text=True,
        timeout=900,
        cwd=ROOT,
        check=False,
        # The server may be slow where all tests run at once.
        env={**inherited, "HF_HOME": str(home), **dict.fromkeys(TIMEOUTS, "120"), **variables},
    )


def settings(directory: Path, *more: str) -> list[str]:
    """Options that make the quickstart a run of seconds."""
    return [part for setting in small_settings(directory, *more) for part in ("--set", setting)]


def refused(done: subprocess.CompletedProcess[str]) -> str:
    """The one line with which a command ended."""
    assert done.returncode == 2, done.stderr
    [line] = done.stderr.splitlines()
    return line
