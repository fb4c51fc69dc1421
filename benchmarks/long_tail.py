"""The long-tail study: prints a table, and draws the picture of docs/staleness.md.

    python benchmarks/long_tail.py [--rollouts 20000] [--seed 0] [--svg docs/long_tail.svg]

The real controller, window and rollouts run with the fake engine under a virtual clock, so the numbers are the same on
every machine.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from headrace.sim.long_tail import POLICIES, PolicyOutcome, study

WIDTH, HEIGHT, LEFT, BOTTOM = 640, 360, 56, 44
TONES = {"generated": "#8a8f98", "depth 2": "#1f6feb", "drop oldest": "#d1495b"}


def main() -> None:
    """Run the buffer policies one after the other, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rollouts", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--svg", type=Path)
    given = parser.parse_args()
    outcomes = {}
    print("| policy | generated | trained | mean length, trained / generated | KS distance | tokens/s | largest lag |")
    print("|---|---|---|---|---|---|---|")
    for policy in POLICIES:
        found = outcomes[policy] = study(policy, given.rollouts, given.seed)
        print(
            f"| {policy} | {len(found.generated):,} | {len(found.trained):,} | "
            f"{found.trained.mean():.2f} / {found.generated.mean():.2f} | {found.distance:.3f} | "
            f"{found.tokens_per_second:.0f} | {found.largest_lag} |",
            flush=True,
        )
    faster = outcomes["depth 2"].tokens_per_second / outcomes["depth 0"].tokens_per_second
    print(f"\ndepth 2 consumes {faster:.2f} times the tokens of depth 0 in the same time")
    if given.svg is not None:
        given.svg.write_text(picture(outcomes))


def picture(outcomes: dict[str, PolicyOutcome]) -> str:
    """Draw the cumulative distributions of answer lengths over a logarithmic axis."""
    kept, queue = outcomes["depth 2"], outcomes["drop oldest"]
    longest = float(max(kept.generated.max(), queue.generated.max()))
    lines = {"generated": kept.generated, "depth 2": kept.trained, "drop oldest": queue.trained}
    body = [_axes(longest)]
    for number, (name, lengths) in enumerate(lines.items()):
        grid = np.unique(np.geomspace(1, longest, 160).round())
        share = np.searchsorted(np.sort(lengths), grid, side="right") / len(lengths)
        points = " ".join(f"{_x(x, longest):.1f},{_y(y):.1f}" for x, y in zip(grid, share, strict=True))
        # The curve of generated answers lies under that of depth 2, so it is drawn wide, and both can be seen.
        width = 7 if name == "generated" else 2
        body.append(f'<polyline fill="none" stroke="{TONES[name]}" stroke-width="{width}" points="{points}"/>')
        label = name if name == "generated" else f"trained, {name}"
        x, y = WIDTH - 190, HEIGHT - BOTTOM - 70 + 22 * number
        body.append(f'<line x1="{x}" y1="{y}" x2="{x + 26}" y2="{y}" stroke="{TONES[name]}" stroke-width="{width}"/>')
        body.append(f'<text x="{x + 34}" y="{y + 4}">{label}</text>')
    style = "font: 13px sans-serif; fill: #333; background: white"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" style="{style}">'
    return "\n".join([head, f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>', *body, "</svg>\n"])


def _axes(longest: float) -> str:
    marks = []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = _y(share)
        marks.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - 16}" y2="{y:.1f}" stroke="#ddd"/>')
        marks.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{share:g}</text>')
    for length in (1, 3, 10, 30, 100, 300, 1000):
        if length <= longest:
            marks.append(f'<text x="{_x(length, longest):.1f}" y="{HEIGHT - 24}" text-anchor="middle">{length}</text>')
    middle = (LEFT + WIDTH) / 2
    marks.append(f'<text x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">tokens of an answer (at most)</text>')
    return "\n".join(marks)


def _x(length: float, longest: float) -> float:
    return LEFT + (WIDTH - LEFT - 16) * float(np.log(length) / np.log(longest))


def _y(share: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - 16) * share


if __name__ == "__main__":
    main()
