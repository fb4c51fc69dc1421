"""The figures of a benchmark as lines for a reader, under the names that they have in `--json`.

Each line shows one figure. Parts with the same figures, such as two runs or the rows of a comparison, are columns of
one table. Figures that were not measured are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

Say = Callable[[str], None]
"""A function that gets a line of text before each part of a benchmark."""
Part = tuple[str, dict[str, str]]
"""A title, and the text of each figure under it by the name of the figure."""
MANY = 8
"""Of a list with more numbers, only their count is shown."""


def lines(found: Mapping[str, Any]) -> list[str]:
    """Return one aligned line for each figure. The arguments are left out: the reader has just typed them."""
    parts = list(_parts("", {name: value for name, value in found.items() if name != "arguments"}))
    shown: list[str] = []
    while parts:
        title, names = parts[0]
        # Columns of one table: the first part, and all parts with the same figures and perhaps more.
        columns = [part for part in parts if names.keys() <= part[1].keys()] if title else parts[:1]
        parts = [part for part in parts if part not in columns]
        rows = [["", *(title for title, _ in columns)]] if title else []
        for name in dict.fromkeys(name for _, part in columns for name in part):
            rows.append([name, *(part.get(name, "") for _, part in columns)])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        shown += [""] if shown else []
        shown += ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return shown


def _parts(title: str, found: Mapping[str, Any]) -> Iterator[Part]:
    """Yield the plain figures under this title, then the parts inside it."""
    inside: dict[str, Mapping[str, Any]] = {}
    plain: dict[str, str] = {}
    for name, value in found.items():
        if isinstance(value, Mapping):
            inside[name] = value
        elif isinstance(value, list) and value and isinstance(value[0], Mapping):
            inside |= {f"{name} {number}": item for number, item in enumerate(value, start=1)}
        elif value is not None:
            plain[name] = _text(value)
    if plain:
        yield title, plain
    for name, value in inside.items():
        yield from _parts(f"{title} {name}".strip(), value)


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_text, value)) if len(value) <= MANY else f"{len(value):,} of them"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
