"""Distillation against RL alone: measures how many tokens a student needs to reach its teacher's held-out score.

    python benchmarks/distillation.py [--results docs/distillation.jsonl] [--smoke]

- The teacher is the quickstart's model after the whole quickstart (150 versions), with seed 0.
- A student is the same model after the quickstart's warm start, with a seed of its own, which no other run has.
- "RL alone" is the quickstart as it is: 16 groups of 8 answers in a version. "RL and reverse" is the same run with a
  teacher added to its reward.
- The other students compare no answers with each other. Their versions have one answer to each of 32 prompts, and
  their learning rate is the quickstart's, constant.
- These settings were chosen with seed 9, which is not measured: with 4 groups of 8 answers, students forget what they
  know, and RL alone does not reach its teacher.
- An evaluation has 1,000 held-out prompts, greedy. The student has reached its teacher at the first evaluation whose
  score is at least the teacher's score minus 2 standard errors of the difference of two such scores.
- The figure is the number of trained tokens up to that version. A student that never gets there counts as all its
  tokens, and is marked.

Every finished run is one line of the results file. A run that is in the file is not made again.
"""

import argparse
import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from headrace import Run
from headrace.config import load_config
from headrace.observe.progress import NoProgress
from headrace.pipeline.launch import start_run

ROOT = Path(__file__).parents[1]
QUICKSTART = ROOT / "examples/quickstart/quickstart.toml"
TAUGHT = ["algorithm.loss=distillation", "rollouts.group_size=1", "buffer.groups=32", "training.schedule=constant"]
TAUGHT += ["run.versions=60", "evaluate.every=4"]
REWARDED = ["run.versions=150", "evaluate.every=5"]
ARMS = {
    "RL alone": REWARDED,
    "reverse, top 8": [*TAUGHT, "algorithm.teacher_divergence=reverse"],
    "forward, top 8": [*TAUGHT, "algorithm.teacher_divergence=forward"],
    "sampled": TAUGHT,
    "RL and reverse, top 8": [*REWARDED, "algorithm.teacher_divergence=reverse", "algorithm.teacher_weight=1.0"],
}
STANDARD_ERRORS = 2.0
QUIET = ["observe.display=none"]


def main() -> None:
    """Make the runs that are missing, then print the table of all runs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=ROOT / "docs/distillation.jsonl")
    parser.add_argument("--runs", type=Path, default=Path("runs/distillation"), help="where the runs are made")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--smoke", action="store_true", help="tiny runs that only show that everything works")
    given = parser.parse_args()
    size = Size(teacher=4, prompts=20, warm=5, only=3) if given.smoke else Size()
    teacher, score = trained_teacher(given.runs, size)
    goal = score - STANDARD_ERRORS * math.sqrt(2 * score * (1 - score) / size.prompts)
    print(f"teacher: held-out {score:.3f}; a student must reach {goal:.3f}", flush=True)
    for arm in given.arms:
        for seed in given.seeds:
            if not any((found["arm"], found["seed"]) == (arm, seed) for found in read(given.results)):
                outcome = {**measured(arm, seed, teacher, goal, given.runs, size), "teacher": score, "goal": goal}
                with given.results.open("a") as file:
                    file.write(json.dumps(outcome) + "\n")
                print(json.dumps({key: value for key, value in outcome.items() if key != "curve"}), flush=True)
    print("\n".join(table(read(given.results))))


class Size:
    """The sizes of the runs."""

    def __init__(self, teacher: int = 150, prompts: int = 1000, warm: int = 250, only: int | None = None) -> None:
        """`teacher` is the number of the teacher's versions. `only` is that of the students, by default their arm's.

        `warm` is the number of supervised steps, by default the quickstart's.
        """
        self.teacher, self.prompts, self.warm, self.only = teacher, prompts, warm, only


def read(path: Path) -> list[dict[str, Any]]:
    """Return the results so far."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def trained_teacher(runs: Path, size: Size) -> tuple[Path, float]:
    """Return the teacher's directory and its held-out score. It is trained once."""
    path = runs / "teacher"
    if not (path / "summary.json").exists():
        shutil.rmtree(path, ignore_errors=True)
        settings = [
            "run.name=teacher",
            f"run.directory={runs}",
            f"run.versions={size.teacher}",
            f"warm_start.steps={size.warm}",
        ]
        settings += [f"evaluate.prompts={size.prompts}", "evaluate.every=0", *QUIET]
        start_run(load_config(QUICKSTART, settings), NoProgress())
    summary = json.loads((path / "summary.json").read_text())
    return max((path / "checkpoints").glob("step-*")), summary["heldout_after"]


def measured(arm: str, seed: int, teacher: Path, goal: float, runs: Path, size: Size) -> dict[str, Any]:
    """Return how many tokens a student of this arm and seed needed."""
    name = "".join(letter if letter.isalnum() else "-" for letter in f"{arm}-{seed}")
    shutil.rmtree(runs / name, ignore_errors=True)
    settings = [
        f"run.name={name}",
        f"run.directory={runs}",
        f"run.seed={seed}",
        f"warm_start.steps={size.warm}",
        "training.checkpoint_every=0",
        f"evaluate.prompts={size.prompts}",
        f"evaluate.during={size.prompts}",
        *ARMS[arm],
        *QUIET,
    ]
    if size.only is not None:
        settings.append(f"run.versions={size.only}")
    if arm != "RL alone":
        settings += ["scorers.big.kind=teacher", f"scorers.big.model={teacher}"]
    outcome = start_run(load_config(QUICKSTART, settings), NoProgress())
    if outcome.outcome != "finished":
        raise SystemExit(f"{name} was {outcome.outcome}: it is not a result")
    steps = [step for step in Run(runs / name).history if step["objective"] == "policy"]
    curve = []
    for entry in outcome.summary["evaluations"]:
        # Version V is published after step V, so the tokens of steps 1 to V are behind it.
        behind = sum(step["trained_tokens"] for step in steps if step["step"] <= entry["version"])
        curve.append([behind, entry["pass_1"]])
    shutil.rmtree(runs / name)
    reached = next((tokens for tokens, right in curve if right >= goal), None)
    return {
        "arm": arm,
        "seed": seed,
        "reached": reached is not None,
        "tokens": curve[-1][0] if reached is None else reached,
        "before": curve[0][1],
        "after": curve[-1][1],
        "curve": curve,
    }


def table(results: Sequence[dict[str, Any]]) -> list[str]:
    """Return a table with a line for each arm."""
    lines = [
        "| arm | trained tokens until the teacher's score, each seed | mean | held-out at the end |",
        "|---|---|---|---|",
    ]
    for arm in ARMS:
        mine = [found for found in results if found["arm"] == arm]
        if mine:
            each = ", ".join(f"{one['tokens']:,}" + ("" if one["reached"] else " (not reached)") for one in mine)
            ends = fmean(one["after"] for one in mine)
            lines.append(f"| {arm} | {each} | {fmean(one['tokens'] for one in mine):,.0f} | {ends:.3f} |")
    return lines


if __name__ == "__main__":
    main()
