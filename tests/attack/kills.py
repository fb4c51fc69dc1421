"""The kill campaign: 100 kills over nine runs, each compared with the same run undisturbed.

    make kills

Three configurations, three seeds each. Every run is judged as `Victim.problem` says. Together they may sample at most
2% of their tokens again, and each configuration must learn as it does undisturbed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from statistics import mean
from typing import NamedTuple

from on_processes import COMMON, CONFIGURATIONS, disturb

from victims import Victim

VERSIONS = {"shm": 90, "ranks": 60, "agents": 60}
"""How long a run is: until it has learnt, and long enough for its kills."""
SEEDS = 3
RUN_SECONDS = 900.0
MOST_AGAIN = 0.02
LEARNS_LESS = 0.05
"""How far the mean held-out score of disturbed runs may be below that of undisturbed ones. Both are near 1."""
JOBS = 2


class Result(NamedTuple):
    """What one run came to."""

    configuration: str
    seed: int
    done: list[str]
    problem: str | None
    heldout: float = 0.0
    sampled: int = 0
    again: int = 0
    killed: Counter[str] = Counter()
    resumed: int = 0
    seconds: float = 0.0


def run(configuration: str, seed: int, kills: list[str], directory: Path) -> Result:
    """Run one configuration, with these kills, to its end."""
    began = time.monotonic()
    file, settings, _ = CONFIGURATIONS[configuration]
    directory = directory / f"{configuration}-{seed}-{len(kills)}"
    directory.mkdir()
    settings = (*COMMON, *settings, f"run.seed={seed}")
    victim = Victim(file, directory, *settings, versions=VERSIONS[configuration], seconds=RUN_SECONDS)
    try:
        done = disturb(victim, Random(f"{configuration}/{seed}"), kills)
        problem = victim.problem()
        if problem is not None:
            return Result(configuration, seed, done, problem)
        ledger, heldout = victim.ledger(), victim.summary()["heldout_after"]
        sampled, again = sum(ledger["sampled_tokens"].values()), ledger["regenerated_tokens"]
        seconds = time.monotonic() - began
        return Result(configuration, seed, done, None, heldout, sampled, again, victim.killed, victim.resumed, seconds)
    finally:
        victim.end()


def plan(kills: int, seed: int) -> list[tuple[str, int, list[str]]]:
    """Return the configuration, the seed and the kinds to kill of each run; an undisturbed run follows each."""
    runs = [(name, seed + number) for number in range(SEEDS) for name in CONFIGURATIONS]
    shares = [kills // len(runs) + (number < kills % len(runs)) for number in range(len(runs))]
    planned = []
    for (name, run_seed), share in zip(runs, shares, strict=True):
        kinds = CONFIGURATIONS[name].kinds
        # Every kind is killed in its turn; the order is drawn.
        deck = [kinds[(number + run_seed) % len(kinds)] for number in range(share)]
        Random(f"{name}/{run_seed}/deck").shuffle(deck)
        planned += [(name, run_seed, deck), (name, run_seed, [])]
    return planned


def judge(results: list[Result], kills: int) -> list[str]:
    """Print what was done and how it compares. Return what is wrong."""
    wrong = [f"{result.configuration}, seed {result.seed}: {result.problem}" for result in results if result.problem]
    print(
        f"\n{'configuration':<14} {'seed':>4} {'kills':>6} {'resumed':>8} {'again':>12} {'held-out':>9} {'seconds':>8}"
    )
    for result in results:
        again = f"{result.again}/{result.sampled}"
        print(
            f"{result.configuration:<14} {result.seed:>4} {result.killed.total():>6} {result.resumed:>8} {again:>12} "
            f"{result.heldout:>9.3f} {result.seconds:>8.0f}"
        )
    killed = sum((result.killed for result in results), Counter[str]())
    print("killed: " + ", ".join(f"{kind} {number}" for kind, number in sorted(killed.items())))
    disturbed = [result for result in results if result.done]
    sampled, again = sum(result.sampled for result in disturbed), sum(result.again for result in disturbed)
    print(f"sampled again: {again:,} of {sampled:,} tokens, {again / max(1, sampled):.2%}")
    if again > MOST_AGAIN * sampled:
        wrong.append(f"more than {MOST_AGAIN:.0%} of the tokens were sampled again")
    if killed.total() < kills - len(disturbed):
        wrong.append(f"only {killed.total()} of {kills} kills found their process")
    for name in CONFIGURATIONS:
        scores = {
            bool(kind): [one.heldout for one in results if one.configuration == name and bool(one.done) is kind]
            for kind in (True, False)
        }
        if not all(scores.values()):
            continue
        with_kills, without = mean(scores[True]), mean(scores[False])
        print(f"{name}: held-out {with_kills:.3f} with kills, {without:.3f} without")
        if with_kills < without - LEARNS_LESS:
            wrong.append(f"{name} learns less with kills: {with_kills:.3f}, {without:.3f} without")
    return wrong


def main() -> int:
    """Run the campaign. Return the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--only", metavar="CONFIGURATION:SEED", help="one disturbed run of the campaign")
    options = parser.parse_args()
    planned = plan(options.kills, options.seed)
    if options.only:
        planned = [one for one in planned if f"{one[0]}:{one[1]}" == options.only and one[2]]
    began = time.monotonic()
    results = []
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(JOBS) as pool:
        for result in pool.map(lambda one: run(*one, Path(directory)), planned):
            results.append(result)
            print(f"{result.configuration} seed {result.seed}: {', '.join(result.done) or 'undisturbed'}")
            print(f"    {result.problem or 'nothing wrong'}", flush=True)
    wrong = judge(results, 0 if options.only else options.kills)
    for line in wrong:
        print(f"found: {line}")
    print(f"seed {options.seed}: {len(wrong)} found in {time.monotonic() - began:.0f} s")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
