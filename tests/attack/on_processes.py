"""Kills and stops of the processes of a run at random moments. The run must end as if nothing had happened."""

from __future__ import annotations

import time
from pathlib import Path
from random import Random
from typing import NamedTuple

from mutations import Case
from targets import AGENT, HELDOUT, PROMPTS, QUICKSTART, Targets

from victims import Victim

COMMON = (
    "training.checkpoint_every=3", "pipeline.restarts=50", "observe.display=plain", "evaluate.every=0",
    "evaluate.prompts=120", "warm_start.steps=60", "warm_start.learning_rate=2e-3",
)  # fmt: skip
EASY = (f"task.path={PROMPTS}", f"task.heldout_path={HELDOUT}")


class Configuration(NamedTuple):
    """One way to run, and which of its processes are killed."""

    file: Path
    settings: tuple[str, ...]
    kinds: tuple[str, ...]


CONFIGURATIONS = {
    "shm": Configuration(
        QUICKSTART,
        (*EASY, "engine.count=2", "delivery.transport=shm"),
        ("controller", "engine-0", "engine-1", "trainer-0", "reward", "fork server"),
    ),
    "ranks": Configuration(
        QUICKSTART,
        (*EASY, "training.ranks=2", "delivery.transport=tcp"),
        ("controller", "engine-0", "trainer-0", "trainer-1", "reward", "fork server"),
    ),
    "agents": Configuration(
        AGENT,
        ("delivery.transport=tcp", "delivery.send=delta"),
        ("controller", "engine-0", "trainer-0", "agent", "gateway-0", "fork server"),
    ),
}
VERSIONS = 20
KILLS = 4
"""Attacks on one run of `attack_processes`. Several may come at once."""
RUN_SECONDS, STOP_SECONDS, LONG_STOP_SECONDS = 600.0, 3.0, 25.0
MOMENTS = ("any", "any", "checkpoint", "delivery")


def attack_processes(random: Random, targets: Targets) -> Case:
    """Run one configuration and attack its processes, then look at what is left."""
    name = random.choice(list(CONFIGURATIONS))
    chosen = CONFIGURATIONS[name]
    with targets.fresh() as directory:
        victim = Victim(chosen.file, directory, *COMMON, *chosen.settings, versions=VERSIONS, seconds=RUN_SECONDS)
        try:
            kinds = [random.choice(chosen.kinds) for _ in range(KILLS)]
            done = disturb(victim, random, kinds, stops=0.25)
            return Case(f"{name}: {', '.join(done)}", victim.problem(), f"exit {victim.controller.returncode}")
        finally:
            victim.end()


def disturb(victim: Victim, random: Random, kinds: list[str], *, stops: float = 0.0) -> list[str]:
    """Attack these kinds of processes, one after the other, over the whole run. Return what was done.

    The first attack may come in the warm start. Others come while a checkpoint is written or a version delivered, soon
    after the attack before (so also while a run is resumed), or at any moment.
    """
    done = []
    steps = sorted(random.randrange(victim.versions - 3) for _ in kinds)
    for kind, step, moment in zip(kinds, steps, random.choices(MOMENTS, k=len(kinds)), strict=True):
        pause, stopped = random.random(), random.random() < stops
        if not victim.wait_for_step(step):
            break
        victim.wait_for_moment(moment)
        if moment == "any":
            time.sleep(pause)
        if stopped and kind != "controller":
            seconds = STOP_SECONDS * pause if pause < 0.9 else LONG_STOP_SECONDS
            found = victim.stop(kind, random, seconds)
            how = f"stopped for {seconds:.1f} s"
        else:
            found, how = victim.kill(kind, random), "killed"
        done.append(f"{kind} {how if found else 'not there'} at step {step} ({moment})")
    return done


KINDS = {"processes": attack_processes}
