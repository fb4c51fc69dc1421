"""The start of every worker process: `python -m headrace.cluster.worker_main --role R --rank N --address A --run DIR`.

It needs nothing but these four: no inherited descriptor, no state, and no environment but what says how a GPU is shared
(`mps`), so that it may also be a fork of a process that has loaded its libraries. It ends when it is told to, when its
parent dies, or when the controller falls silent.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from headrace.channel.worker_link import WorkerLink
from headrace.cluster.exit_codes import EXIT_LOST, EXIT_USER_ERROR
from headrace.cluster.mps import without_mps
from headrace.cluster.roles import serve
from headrace.errors import HeadraceError, PeerDied
from headrace.run_dir import RunDir

PR_SET_PDEATHSIG = 1


def main(argv: Sequence[str]) -> int:
    """Parse the four arguments and serve; returns the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--role", choices=["engine", "trainer"], required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--address", required=True)
    parser.add_argument("--run", type=Path, required=True)
    arguments = parser.parse_args(argv)
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the controller's to handle; it asks us to stop.
    config = without_mps(RunDir(arguments.run).config_to_start_with(), os.environ)
    link = WorkerLink(f"{arguments.role}-{arguments.rank}", arguments.address, arguments.run)
    link.spoke.start()
    try:
        serve(arguments.role, link, config)
    except PeerDied as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_LOST
    except HeadraceError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_USER_ERROR
    finally:
        link.spoke.close()
    return 0


def die_with_parent() -> None:
    """Have this process killed as soon as its parent is gone, where the system can do that."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def leave(code: int) -> NoReturn:
    """End the process, whose work is closed: to take down an interpreter with torch in it can take seconds.

    In these it could not be reached, and would be killed for that, instead of telling by its exit code how it ended.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
