"""The entry point of a worker: `python -m headrace.cluster.worker_main --role R --rank N --address A --run DIR`.

A worker needs only these four arguments. It inherits no descriptor and no state, and reads no environment variable
except those that say how a GPU is shared (`mps`), so it may also be a fork of a process that has loaded its libraries.
It ends when it is told to, when its parent dies, or when the controller falls silent.
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
    """Parse the four arguments and serve. Returns the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--role", choices=["engine", "trainer"], required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--address", required=True)
    parser.add_argument("--run", type=Path, required=True)
    arguments = parser.parse_args(argv)
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The controller handles Ctrl-C and asks workers to stop.
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
    """Have the system kill this process when its parent ends. Only Linux can do this."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def leave(code: int) -> NoReturn:
    """End this process at once, after its work is closed.

    Tearing down an interpreter that has loaded torch can take seconds. During that time the process could not be
    reached, and would be killed for it, so that its exit code would not tell how it ended.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
