"""The lengths of answers: all equal, or drawn from a lognormal distribution. They follow from a text and a seed."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from headrace.bench.engine_work import draw_lengths, parse_lengths, parse_pair
from headrace.errors import UserError


def make_lengths(text: str, count: int, seed: int) -> npt.NDArray[np.int64]:
    """Return the lengths of `count` answers. `text` is `equal:N` or `lognormal:MEAN:CUT`."""
    kind, _, rest = text.partition(":")
    if kind == "equal" and rest.isdecimal() and int(rest):
        return np.full(count, int(rest))
    if kind == "lognormal":
        mean, cut = parse_lengths(text)
        return draw_lengths(count, mean, cut, seed)
    raise UserError(f"--lengths {text}: must be equal:N or lognormal:MEAN:CUT")


def longest_of(text: str) -> int:
    """Return the largest length that `make_lengths` can give for this text."""
    kind, _, rest = text.partition(":")
    return int(rest) if kind == "equal" else int(parse_pair("--lengths lognormal", "lognormal:MEAN:CUT", rest)[1])
