"""Shows what a run learned, and how fast: prints the gain in held-out accuracy, and draws a chart over time.

    python benchmarks/learning_curve.py runs/NAME [--svg docs/NAME.svg]

The run must have been evaluated before and after its steps.
"""

import argparse
import math
from pathlib import Path

from headrace.buffer.reader import open_readonly
from headrace.errors import UserError
from headrace.observe.charts import Series, line_chart, moving_mean
from headrace.observe.records import EvaluationRecord, StepRecord

WIDTH, HEIGHT = 640, 320
WINDOW = 5
"""The number of steps in the moving mean of the reward."""
STYLE = """
text { font: 12px sans-serif; fill: #555; } .mid { text-anchor: middle; } .end { text-anchor: end; }
.grid { stroke: #e3e6e3; } .axis { stroke: #888; } path.line { fill: none; stroke-width: 2; }
.line.a { stroke: #17758c; } .line.b { stroke: #c76b29; } .line.c { stroke: #1f6feb; } .line.d { stroke: #d1495b; }
.a { fill: #17758c; } .b { fill: #c76b29; } .c { fill: #1f6feb; } .d { fill: #d1495b; }
.hit rect, .target { fill: transparent; } .hit .dot { opacity: 0; } .hit.shown .dot { opacity: 1; }
"""


def main() -> None:
    """Read the journal of the run, print the gain, and draw the chart."""
    parser = argparse.ArgumentParser(description="Draw what a run learned over time.")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--svg", type=Path)
    given = parser.parse_args()
    try:
        with open_readonly(given.run_dir / "journal.db") as journal:
            steps = journal.steps()
            evaluations = sorted(journal.evaluations(), key=lambda e: (e.version, e.started))
    except UserError as error:
        raise SystemExit(f"learning_curve.py: {error}") from None
    if len(evaluations) < 2 or not steps:
        raise SystemExit("learning_curve.py: the run has no steps, or was not evaluated before and after them")
    print(gain(steps, evaluations))
    if given.svg is not None:
        given.svg.write_text(picture(steps, evaluations))


def gain(steps: list[StepRecord], evaluations: list[EvaluationRecord]) -> str:
    """Return a line with the first and the last held-out accuracy, their difference, and the time between them."""
    first, last = evaluations[0], evaluations[-1]
    more = last.pass_1 - first.pass_1
    error = math.sqrt(sum(e.pass_1 * (1 - e.pass_1) / e.prompts for e in (first, last)))
    minutes = (steps[-1].ended - first.ended) / 60
    # If all answers were right or all were wrong, both times, the standard error is 0.
    errors = f"{more / error:.1f} standard errors, " if error else ""
    return (
        f"held out {first.pass_1:.3f} -> {last.pass_1:.3f} ({first.prompts} and {last.prompts} prompts): "
        f"{more:+.3f}, {errors}{len(steps)} steps in {minutes:.1f} minutes"
    )


def picture(steps: list[StepRecord], evaluations: list[EvaluationRecord]) -> str:
    """Draw reward and held-out accuracy over the seconds since the first evaluation."""
    began = evaluations[0].ended
    reward = [(step.ended - began, step.reward_mean) for step in steps]
    heldout = [(max(0.0, e.started - began), e.pass_1) for e in evaluations]
    chart = [
        Series(label=f"reward, mean of {WINDOW} steps", points=moving_mean(reward, WINDOW), hover=False),
        Series(label="held out", points=heldout, tone="b", dots=True),
    ]
    return standalone(
        {"What the run learned": chart}, "seconds since the first evaluation", "reward in training, held out"
    )


def standalone(charts: dict[str, list[Series]], x_label: str, y_label: str) -> str:
    """Draw charts side by side, each with its name and its legend, as an SVG that brings its own styles."""
    body, width = [], WIDTH // len(charts)
    for number, (name, lines) in enumerate(charts.items()):
        chart = line_chart(
            lines, name=name, x_label=x_label, y_label=y_label, width=width, height=HEIGHT, from_zero=True
        )
        place = f'<svg x="{number * width}" y="20" width="{width}" height="{HEIGHT}" '
        body.append(chart.replace("<svg ", place, 1) + f'<text x="{number * width + 8}" y="16">{name}:')
        legend = dict.fromkeys((line.label, line.tone) for line in lines)
        body += [f'<tspan class="{tone}" dx="8">{label}</tspan>' for label, tone in legend] + ["</text>"]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT + 20}"><style>{STYLE}</style>'
    return "".join([head, f'<rect width="{WIDTH}" height="{HEIGHT + 20}" fill="white"/>', *body, "</svg>\n"])


if __name__ == "__main__":
    main()
