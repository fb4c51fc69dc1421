"""The off-policy study: measures what lag costs on the quickstart's task, and how much importance weights help.

    python benchmarks/off_policy.py [--results docs/off_policy.jsonl] [--svg docs/off_policy.svg]

All runs are real, with real processes, and begin with the same warm-started weights. Every finished run is one line of
the results file. A run that is in the file is not made again, so an interrupted study continues where it stopped.

The lag of a run is fixed by its configuration. With `interrupt = "block"` an engine finishes all requests that it has
before it takes new weights. With `depth = max_lag = K` the groups of a version fill the window until they are trained K
versions later.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from headrace.config import load_config
from headrace.observe.progress import NoProgress
from headrace.pipeline.launch import start_run

ROOT = Path(__file__).parents[1]
QUICKSTART = ROOT / "examples/quickstart/quickstart.toml"
LOSSES = {"corrected": "cispo", "uncorrected": "reinforce"}
"""The losses that are compared. `cispo`, the default, is min(r, 1.28) A log pi. `reinforce` is A log pi: the same
without the importance weight."""
TONES = {0: "#8a8f98", 1: "#2a9d8f", 4: "#1f6feb", 8: "#d1495b"}
WIDTH, HEIGHT, LEFT, BOTTOM, GAP = 640, 340, 56, 44, 26
KEY = ("lag", "arm", "seed", "learning_rate", "versions")


def main() -> None:
    """Make the runs that are missing, then print the table and draw the picture of all runs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=ROOT / "docs/off_policy.jsonl")
    parser.add_argument("--svg", type=Path)
    parser.add_argument("--runs", type=Path, default=Path("runs/off_policy"), help="where the runs are made")
    parser.add_argument("--lags", type=int, nargs="+", default=[0, 1, 4, 8])
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
    if not (path / "summary.json").exists():
        shutil.rmtree(path, ignore_errors=True)
        settings = [f"run.directory={runs}", "run.name=start", "run.versions=1", "training.learning_rate=1e-12"]
        settings += ["evaluate.prompts=0", "evaluate.every=0", "observe.display=none"]
        start_run(load_config(QUICKSTART, settings), NoProgress())
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
        half = _mean(_at_half(r) for r in runs)
        lines.append(
            f"| {rate:g} | {lag} | {_mean(r['lag_mean'] for r in runs):.2f} ({max(r['lag_max'] for r in runs)}) | "
            f"`{LOSSES[arm]}`{', ' + arm if lag else ''} | {half:.3f} | {_mean(ends):.3f} | {min(ends):.3f} | "
            f"{len(runs)} |"
        )
    return lines


def _at_half(run: dict[str, Any]) -> float:
    return next(right for version, right in run["curve"] if version - run["curve"][0][0] >= run["versions"] / 2)


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)


def picture(results: Sequence[dict[str, Any]], rate: float) -> str:
    """Draw held-out accuracy over versions at one learning rate: a panel for each loss, and a line for each seed."""
    shown = [run for run in results if run["learning_rate"] == rate]
    body = []
    for number, arm in enumerate(LOSSES):
        left, right = _panel(number)
        body.append(_axes(left, right, shown[0]["versions"]))
        body.append(f'<text x="{(left + right) / 2}" y="18" text-anchor="middle">{arm} ({LOSSES[arm]})</text>')
        for run in shown:
            if run["arm"] == arm or run["lag"] == 0:
                body.append(_line(run, left, right))
    for number, lag in enumerate(sorted({run["lag"] for run in shown})):
        x, y = LEFT + 14 + 130 * number, HEIGHT - 10
        body.append(f'<line x1="{x}" y1="{y - 4}" x2="{x + 24}" y2="{y - 4}" stroke="{TONES[lag]}" stroke-width="3"/>')
        body.append(f'<text x="{x + 32}" y="{y}">{"on-policy" if lag == 0 else f"lag {lag}"}</text>')
    style = "font: 13px sans-serif; fill: #333; background: white"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" style="{style}">'
    return "\n".join([head, f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>', *body, "</svg>\n"])


def _line(run: dict[str, Any], left: float, right: float) -> str:
    first = run["curve"][0][0]
    points = " ".join(
        f"{left + (right - left) * (version - first) / run['versions']:.1f},{_y(share):.1f}"
        for version, share in run["curve"]
    )
    return f'<polyline fill="none" stroke="{TONES[run["lag"]]}" stroke-width="1.6" opacity="0.85" points="{points}"/>'


def _axes(left: float, right: float, versions: int) -> str:
    marks = []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = _y(share)
        marks.append(f'<line x1="{left}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="#ddd"/>')
        if left == LEFT:
            marks.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{share:g}</text>')
    for part in (0, 0.5, 1):
        x = left + (right - left) * part
        marks.append(
            f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{round(versions * part)}</text>'
        )
    return "\n".join(marks)


def _panel(number: int) -> tuple[float, float]:
    width = (WIDTH - LEFT - 20 - GAP) / 2
    left = LEFT + number * (width + GAP)
    return left, left + width


def _y(share: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - 30) * share


if __name__ == "__main__":
    main()
