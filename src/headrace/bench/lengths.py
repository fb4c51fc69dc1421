"""How long answers are: all alike, or drawn from a lognormal distribution; a function of the text and the seed."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from headrace.bench.engine_work import draw_lengths, parse_lengths, parse_pair
from headrace.errors import UserError


def make_lengths(text: str, count: int, seed: int) -> npt.NDArray[np.int64]:
    """The lengths of `count` answers by `equal:N` or `lognormal:MEAN:CUT`."""
    kind, _, rest = text.partition(":")
    if kind == "equal" and rest.isdecimal() and int(rest):
        return np.full(count, int(rest))
    if kind == "lognormal":
        mean, cut = parse_lengths(text)
        return draw_lengths(count, mean, cut, seed)
    raise UserError(f"--lengths {text}: must be equal:N or lognormal:MEAN:CUT")


def longest_of(text: str) -> int:
    """No answer is longer than this."""
    kind, _, rest = text.partition(":")
    return int(rest) if kind == "equal" else int(parse_pair("--lengths lognormal", "lognormal:MEAN:CUT", rest)[1])
