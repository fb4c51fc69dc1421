"""Attacks Headrace with damaged input, and prints what was tried and what was found.

    make attack COUNT=40                                every kind, 40 cases each
    make attack OPTIONS="--seed 7 --only run:12"        one case again

Each case follows from the seed, its kind and its number alone. The exit code is 1 if anything was found.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from contextlib import ExitStack, closing
from pathlib import Path
from random import Random

from commands import Commands
from on_files import KINDS as ON_FILES
from on_live import KINDS as ON_LIVE
from on_live import LiveRun
from on_processes import KINDS as ON_PROCESSES
from targets import Targets

from shared_fork_server import shared_fork_server

SLOW = {"resume": 20, "processes": 40}
"""Kinds of which one case takes seconds, and how many times fewer cases of them are tried."""


def main() -> int:
    """Attack as the arguments say. Return the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--count", type=int, default=40, help="cases of each kind")
    parser.add_argument("--only", action="append", default=[], metavar="KIND[:NUMBER]")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no case after so many seconds")
    options = parser.parse_args()
    chosen = [word.partition(":")[::2] for word in options.only] or [
        (kind, "") for kind in (*ON_FILES, *ON_LIVE, *ON_PROCESSES)
    ]
    for kind, number in chosen:
        if kind not in (*ON_FILES, *ON_LIVE, *ON_PROCESSES) or not (number == "" or number.isdigit()):
            parser.error(f"--only {kind}{':' * bool(number)}{number}: no such kind of attack, or no number")
    began = time.monotonic()
    found = 0
    with tempfile.TemporaryDirectory() as directory, shared_fork_server(Path(directory)), ExitStack() as parts:
        targets = Targets(Path(directory))
        commands, live = parts.enter_context(closing(Commands())), parts.enter_context(closing(LiveRun(targets)))
        for kind, number in chosen:
            tried = 0
            for case in [int(number)] if number else range(max(1, options.count // SLOW.get(kind, 1))):
                if time.monotonic() - began > options.seconds:
                    break
                random = Random(f"{options.seed}/{kind}/{case}")
                if kind in ON_FILES:
                    done, problem = ON_FILES[kind](random, targets, commands)
                elif kind in ON_LIVE:
                    done, problem = ON_LIVE[kind](random, live)
                else:
                    done, problem = ON_PROCESSES[kind](random, targets)
                tried += 1
                if problem is not None or number:
                    found += problem is not None
                    print(f"{kind}:{case}  {done}\n    {problem or 'nothing wrong'}", flush=True)
            if kind in ON_LIVE and (problem := live.problem()):
                found += 1
                print(f"{kind}: afterwards {problem}", flush=True)
            print(f"{kind}: {tried} tried", flush=True)
    print(f"seed {options.seed}: {found} found in {time.monotonic() - began:.0f} s")
    return int(found > 0)


if __name__ == "__main__":
    sys.exit(main())
