"""Attacks Headrace with damaged input, and prints what was tried and what was found.

    make attack COUNT=40                                every kind, in their proportions
    make attack OPTIONS="--seed 7 --only run:12"        one case again

Each case follows from the seed, its kind and its number alone. The exit code is 1 if anything was found.
"""

from __future__ import annotations

import argparse
import queue
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from random import Random

from commands import Commands
from mutations import Case
from on_files import KINDS as ON_FILES
from on_live import KINDS as ON_LIVE
from on_live import LiveRun
from on_processes import KINDS as ON_PROCESSES
from targets import Targets

from shared_fork_server import shared_fork_server

KINDS = (*ON_FILES, *ON_LIVE, *ON_PROCESSES)
SHARES = {"config": 2.0, "prompts": 0.5, "resume": 0.05, "connections": 0.02, "processes": 0.02}
"""How many cases of a kind are tried for each that the count asks for, where it is not one."""
AGAIN = 25
"""Of so many cases on files, one is tried again in a process of its own, and must end alike."""
JOBS = 2


class Tally:
    """What was tried of one kind, and what was found."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.outcomes: Counter[str] = Counter()
        self.found = 0
        self._began = time.monotonic()
        self.seconds = 0.0

    def add(self, number: int, case: Case, *, show: bool) -> None:
        """Count a case, and print it if something was found."""
        self.outcomes[case.outcome] += 1
        self.found += case.problem is not None
        self.seconds = time.monotonic() - self._began
        if case.problem is not None or show:
            print(f"{self.kind}:{number}  {case.done}\n    {case.problem or 'nothing wrong'}", flush=True)

    def line(self) -> str:
        """Return this kind's line of the table."""
        outcomes = ", ".join(f"{outcome} {count}" for outcome, count in sorted(self.outcomes.items()))
        tried = sum(self.outcomes.values())
        return f"{self.kind:<10} {tried:>6} {self.found:>6} {self.seconds:>8.0f}  {outcomes}"


class Suite:
    """The parts that all cases share: the targets, the commands of each thread, and the live run."""

    def __init__(self, targets: Targets, live: LiveRun, parts: ExitStack, seed: int) -> None:
        self._targets = targets
        self._live = live
        self._seed = seed
        self._idle: queue.SimpleQueue[Commands] = queue.SimpleQueue()
        for _ in range(JOBS):
            self._idle.put(parts.enter_context(closing(Commands())))

    def attack(self, kind: str, number: int) -> Case:
        """Try one case."""
        random = self._random(kind, number)
        if kind in ON_LIVE:
            return ON_LIVE[kind](random, self._live)
        if kind in ON_PROCESSES:
            return ON_PROCESSES[kind](random, self._targets)
        with self._commands() as commands:
            case = ON_FILES[kind](random, self._targets, commands)
            if number % AGAIN or case.problem is not None or SHARES.get(kind, 1.0) < 0.1:
                return case
            with closing(Commands(own_process=True)) as own:
                again = ON_FILES[kind](self._random(kind, number), self._targets, own)
            assert commands.last is not None and own.last is not None
            if not own.last.same_as(commands.last):
                problem = f"{commands.last.code}, {commands.last.stderr[-200:]!r}, and in a process of its own "
                case = case._replace(problem=problem + f"{own.last.code}, {own.last.stderr[-200:]!r}")
            return case._replace(problem=case.problem or again.problem)

    def afterwards(self, kind: str) -> str | None:
        """Return what is wrong after all cases of a kind."""
        return self._live.problem() if kind in ON_LIVE else None

    def _random(self, kind: str, number: int) -> Random:
        return Random(f"{self._seed}/{kind}/{number}")

    @contextmanager
    def _commands(self) -> Iterator[Commands]:
        commands = self._idle.get()
        try:
            yield commands
        finally:
            self._idle.put(commands)


def main() -> int:
    """Attack as the arguments say. Return the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--count", type=int, default=40, help="cases of most kinds")
    parser.add_argument("--only", action="append", default=[], metavar="KIND[:NUMBER]")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no case after so many seconds")
    options = parser.parse_args()
    chosen = [word.partition(":")[::2] for word in options.only] or [(kind, "") for kind in KINDS]
    for kind, number in chosen:
        if kind not in KINDS or not (number == "" or number.isdigit()):
            parser.error(f"--only {kind}{':' * bool(number)}{number}: no such kind of attack, or no number")
    began = time.monotonic()
    tallies = []
    with tempfile.TemporaryDirectory() as directory, shared_fork_server(Path(directory)), ExitStack() as parts:
        targets = Targets(Path(directory))
        suite = Suite(targets, parts.enter_context(closing(LiveRun(targets))), parts, options.seed)
        if any(kind in ON_FILES for kind, _ in chosen):
            targets.make({kind for kind, _ in chosen})
        for kind, number in chosen:
            tally = Tally(kind)
            tallies.append(tally)
            numbers = [int(number)] if number else range(max(1, round(options.count * SHARES.get(kind, 1.0))))
            cases = _try_all(suite.attack, kind, numbers, until=began + options.seconds)
            for case_number, case in cases:
                tally.add(case_number, case, show=bool(number))
            if problem := suite.afterwards(kind):
                tally.found += 1
                print(f"{kind}: afterwards {problem}", flush=True)
    print(f"\n{'kind':<10} {'tried':>6} {'found':>6} {'seconds':>8}  how they ended")
    for tally in tallies:
        print(tally.line())
    found = sum(tally.found for tally in tallies)
    print(f"seed {options.seed}: {found} found in {time.monotonic() - began:.0f} s")
    return int(found > 0)


def _try_all(
    attack: Callable[[str, int], Case], kind: str, numbers: Iterable[int], until: float
) -> Iterator[tuple[int, Case]]:
    """Try these cases, several at once except on the live run, and give them in their order."""

    def one(number: int) -> tuple[int, Case | None]:
        return number, attack(kind, number) if time.monotonic() < until else None

    with ThreadPoolExecutor(1 if kind in ON_LIVE else JOBS) as pool:
        for number, case in pool.map(one, numbers):
            if case is not None:
                yield number, case


if __name__ == "__main__":
    sys.exit(main())
