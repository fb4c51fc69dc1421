"""The off-policy study: measures what lag costs on the quickstart's task, and how much importance weights help.

    python benchmarks/off_policy.py [--results docs/off_policy.jsonl] [--svg docs/off_policy.svg]

All runs are real and begin with the same warm-started weights. Every finished run is one line of the results file. A
run that is in the file is not made again, so an interrupted study continues where it stopped.

The lag of a run is fixed by its configuration. With `interrupt = "block"` an engine finishes all requests that it has
before it takes new weights. With `depth = max_lag = K`, K versions of groups are generated ahead, so each group is
trained K versions after the version that sampled it.
"""

import argparse
import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from learning_curve import standalone

from headrace.config import load_config
from headrace.observe.charts import Series
from headrace.observe.progress import NoProgress
from headrace.pipeline.launch import start_run

ROOT = Path(__file__).parents[1]
QUICKSTART = ROOT / "examples/quickstart/quickstart.toml"
LOSSES = {"corrected": "cispo", "uncorrected": "reinforce"}
"""The losses that are compared. `cispo`, the default, is min(r, 1.28) A log pi. `reinforce` is A log pi: the same
without the importance weight."""
TONES = {0: "a", 1: "b", 4: "c", 8: "d"}
KEY = ("lag", "arm", "seed", "learning_rate", "versions")


def main() -> None:
    """Make the runs that are missing, then print the table and draw the picture of all runs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=ROOT / "docs/off_policy.jsonl")
    parser.add_argument("--svg", type=Path)
    parser.add_argument("--runs", type=Path, default=Path("runs/off_policy"), help="where the runs are made")
    parser.add_argument("--lags", type=int, nargs="+", choices=TONES, default=[0, 1, 4, 8])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--learning-rates", type=float, nargs="+", default=[3e-4])
    parser.add_argument("--versions", type=int, default=80)
    given = parser.parse_args()
    wanted = [
        {"lag": lag, "arm": arm, "seed": seed, "learning_rate": rate, "versions": given.versions}
        for seed in given.seeds
        for rate in given.learning_rates
        for lag in given.lags
        for arm in (LOSSES if lag else ["corrected"])  # Without lag, both losses are the same.
    ]
    for run in wanted:
        if not any(_same(run, found) for found in _read(given.results)):
            outcome = _measure(run, given.runs)
            with given.results.open("a") as file:
                file.write(json.dumps(outcome) + "\n")
            print(json.dumps({key: value for key, value in outcome.items() if key != "curve"}), flush=True)
    results = [found for found in _read(given.results) if any(_same(run, found) for run in wanted)]
    print("\n".join(table(results)))
    if given.svg is not None:
        given.svg.write_text(picture(results, max(given.learning_rates)))


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _same(run: dict[str, Any], found: dict[str, Any]) -> bool:
    return all(run[key] == found[key] for key in KEY)


def _measure(run: dict[str, Any], runs: Path) -> dict[str, Any]:
    name = "-".join(str(run[key]) for key in KEY)
    shutil.rmtree(runs / name, ignore_errors=True)
    lag = run["lag"]
    settings = [
        f"run.name={name}",
        f"run.directory={runs}",
        f"run.seed={run['seed']}",
        f"run.versions={run['versions']}",
        f"model.path={_warm_start(runs)}",
        "model.weights=load",
        "warm_start.steps=0",
        f"buffer.depth={lag}",
        f"buffer.max_lag={lag}",
        "engine.interrupt=block",
        f"algorithm.loss={LOSSES[run['arm']]}",
        f"training.learning_rate={run['learning_rate']}",
        "evaluate.prompts=500",
        "evaluate.during=250",
        f"evaluate.every={max(1, run['versions'] // 10)}",
        "observe.display=none",
    ]
    started = time.monotonic()
    outcome = start_run(load_config(QUICKSTART, settings), NoProgress())
    summary = outcome.summary
    shutil.rmtree(runs / name)
    if outcome.outcome != "finished":
        raise SystemExit(f"{name} was {outcome.outcome}: it is not a result")
    return {
        **run,
        "lag_mean": round(summary["lag_mean"], 3),
        "lag_max": summary["lag_max"],
        "heldout_after": summary["heldout_after"],
        "curve": [[entry["version"], entry["pass_1"]] for entry in summary["evaluations"]],
        "seconds": round(time.monotonic() - started, 1),
    }


def _warm_start(runs: Path) -> Path:
    """Return the weights that all runs begin with: those of the quickstart after its supervised steps."""
    path = runs / "start"
    if not list((path / "checkpoints").glob("step-*")):
        shutil.rmtree(path, ignore_errors=True)
        settings = [f"run.directory={runs}", "run.name=start", "run.versions=1", "training.learning_rate=1e-12"]
        settings += ["evaluate.prompts=0", "evaluate.every=0", "observe.display=none"]
        outcome = start_run(load_config(QUICKSTART, settings), NoProgress())
        if outcome.outcome != "finished":
            shutil.rmtree(path)
            raise SystemExit(f"the warm start was {outcome.outcome}: there are no weights to begin with")
    return next((path / "checkpoints").glob("step-*"))


def table(results: Sequence[dict[str, Any]]) -> list[str]:
    """Return a table with a line for each learning rate, lag and loss: means over seeds, and the worst seed."""
    lines = [
        "| learning rate | lag | lag of trained tokens, mean (largest) | loss | held-out half-way | at the end "
        "| worst seed | seeds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for rate, lag, arm in sorted({(r["learning_rate"], r["lag"], r["arm"]) for r in results}):
        runs = [r for r in results if (r["learning_rate"], r["lag"], r["arm"]) == (rate, lag, arm)]
        ends = [r["heldout_after"] for r in runs]
        half = fmean(_at_half(r) for r in runs)
        lines.append(
            f"| {rate:g} | {lag} | {fmean(r['lag_mean'] for r in runs):.2f} ({max(r['lag_max'] for r in runs)}) | "
            f"`{LOSSES[arm]}`{', ' + arm if lag else ''} | {half:.3f} | {fmean(ends):.3f} | {min(ends):.3f} | "
            f"{len(runs)} |"
        )
    return lines


def _at_half(run: dict[str, Any]) -> float:
    return next(right for version, right in run["curve"] if version - run["curve"][0][0] >= run["versions"] / 2)


def picture(results: Sequence[dict[str, Any]], rate: float) -> str:
    """Draw held-out accuracy over versions at one learning rate: a chart for each loss, and a line for each seed."""
    shown = [run for run in results if run["learning_rate"] == rate]
    charts = {
        f"{arm} ({LOSSES[arm]})": [_line(run) for run in shown if run["arm"] == arm or run["lag"] == 0]
        for arm in LOSSES
    }
    return standalone(charts, "versions", "held-out accuracy")


def _line(run: dict[str, Any]) -> Series:
    first = run["curve"][0][0]
    points = [(float(version - first), right) for version, right in run["curve"]]
    label = f"lag {run['lag']}" if run["lag"] else "on-policy"
    return Series(label=label, points=points, tone=TONES[run["lag"]], hover=False)


if __name__ == "__main__":
    main()
