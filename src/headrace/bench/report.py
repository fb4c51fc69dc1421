"""The figures of a benchmark as lines for a reader, under the names that they have in `--json`.

Each line shows one figure. Parts with the same figures, such as two runs or the rows of a comparison, are columns of
one table. Figures that were not measured are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Say = Callable[[str], None]
"""A function that gets a line of text before each part of a benchmark."""
Part = dict[str, str]
"""The text of each figure, by the name of the figure. A dot in a name separates a figure and a figure inside it."""
HIDDEN = ("arguments",)
"""Left out, because the reader has just typed them."""
FEW = 4
"""A part with at most this many figures gets no table of its own."""
LONG = 100
"""A text with more characters is broken at its semicolons. In a table it is left out."""


def lines(found: Mapping[str, Any]) -> list[str]:
    """Return one aligned line for each figure."""
    alone: Part = {}
    parts: list[tuple[str, Part]] = []
    for name, value in found.items():
        if name in HIDDEN:
            continue
        inner = list(_parts(name, value))
        if len(inner) == 1 and len(inner[0][1]) <= FEW:
            alone |= {f"{name}.{key}" if key else name: text for key, text in inner[0][1].items()}
        else:
            parts += inner
    shown = _aligned([name, text] for name, text in alone.items())
    while parts:
        first = parts[0][1]
        count = next((i for i, (_, part) in enumerate(parts) if 2 * len(first.keys() & part.keys()) < len(part)), None)
        columns, parts = parts[:count], parts[count:] if count else []
        names = dict.fromkeys(name for _, part in columns for name in part if len(part[name]) <= LONG)
        cells = ([name, *(part.get(name, "") for _, part in columns)] for name in names)
        shown += ["", *_aligned([["", *(title for title, _ in columns)], *cells])]
    return shown


def _parts(name: str, value: Any) -> Iterator[tuple[str, Part]]:
    """Yield the parts of a figure, each with a title. A plain figure is one part, in which the figure has no name."""
    if isinstance(value, list) and value and isinstance(value[0], Mapping):
        value = {str(number): item for number, item in enumerate(value, start=1)}
    if isinstance(value, Mapping) and any(isinstance(item, list | Mapping) for item in value.values()):
        nested = {key: item for key, item in value.items() if isinstance(item, list | Mapping)}
        if len(nested) == len(value):
            for key, item in nested.items():
                yield from _parts(f"{name} {key}", item)
            return
    yield name, dict(_flat("", value))


def _flat(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value.keys() == {"median", "min", "max"}:
        value = value["median"]
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flat(f"{name}.{key}" if name else key, item)
    elif value is not None:
        yield name, _text(value)


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_text, value)) if len(value) <= 2 * FEW else f"{len(value):,} of them"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _aligned(rows: Iterator[list[str]] | Sequence[list[str]]) -> list[str]:
    cells = [line for row in rows for line in _broken(row)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))] if cells else []
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]


def _broken(row: list[str]) -> list[list[str]]:
    """Return the rows for a row whose text may be too long for one line."""
    if len(row) != 2 or len(row[1]) <= LONG:
        return [row]
    return [[row[0] if number == 0 else "", text] for number, text in enumerate(row[1].split("; "))]
