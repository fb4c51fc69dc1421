"""Seeded damage: to bytes, to values of a configuration, and to JSON. Everything follows from the given `Random`."""

from __future__ import annotations

import json
from random import Random
from typing import Any, NamedTuple

NASTY_TEXT = (
    "", " ", "\0", "\x1b[2J\x1b[31mred", "..", "../../etc/passwd", "/", "/dev/null", "~", "a" * 100_000, "é🙂",
    "\ud800", "nan", "1e400", "os:system", "json:loads", "missing.py:f", ":", "a:b:c", "{", "%s", "NaN",
    "\r\n", "-", "--help",
)  # fmt: skip
NASTY_VALUES: tuple[Any, ...] = (
    -1, 0, 1, 2**31, 2**63, 2**64, 10**30, -(2**63), 0.0, -0.5, 1e-300, 1e308, float("inf"), float("nan"), True, False,
    [], [[]], [None], {}, [1, "a"], *NASTY_TEXT,
)  # fmt: skip
LITERALS = {
    "an integer of 400 digits": "1" + "0" * 400,
    "an integer of 5000 digits": "9" * 5000,
    "a hexadecimal integer of 80 bits": "0x" + "f" * 20,
    "lists in lists in lists": "[" * 3000 + "]" * 3000,
    "tables in tables": "{a = " * 300 + "1" + "}" * 300,
    "a date": "1979-05-27T07:32:00Z",
    "a string without an end": '"""',
    "a lone surrogate": '"\\ud800"',
    "minus infinity": "-inf",
    "a float of 400 digits": "0." + "1" * 400 + "e-4000",
    "nothing": "",
}
"""Values as a TOML file spells them, which no writer of TOML writes."""


class Case(NamedTuple):
    """One attack and how it ended."""

    done: str
    """What was tried, in one line."""
    problem: str | None
    """What is wrong with the outcome; None: nothing."""
    outcome: str = ""
    """How it ended, in a word that the table counts."""


def damaged(data: bytes, random: Random) -> tuple[bytes, str]:
    """Return other bytes than these, and one line that says what was done to them."""
    while True:
        changed, how = _damage(data, random)
        if changed != data:
            return changed, how


def _damage(data: bytes, random: Random) -> tuple[bytes, str]:
    size = len(data)
    at = random.randrange(size) if size else 0
    length = random.choice((1, 8, 512, 4096))
    match random.choice(("flip", "flip", "cut", "empty", "zero", "lose", "repeat", "append", "garbage")):
        case "flip" if size:
            bit = random.randrange(8)
            return data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :], f"bit {bit} of byte {at} flipped"
        case "cut":
            return data[:at], f"cut to {at} of {size} bytes"
        case "empty":
            return b"", "emptied"
        case "zero":
            zeros = bytes(min(length, size - at))
            return data[:at] + zeros + data[at + len(zeros) :], f"{len(zeros)} bytes at {at} set to zero"
        case "lose":
            return data[:at] + data[at + length :], f"{length} bytes at {at} removed"
        case "repeat":
            return data[:at] + data[max(0, at - length) : at] + data[at:], f"up to {length} bytes before {at} repeated"
        case "append":
            return data + random.randbytes(length), f"{length} random bytes appended"
        case _:
            return random.randbytes(max(1, min(size, 1 << 16))), "replaced by random bytes"


def nasty(random: Random, like: object = None) -> Any:
    """Return a value that a careless reader stumbles over, if possible of the type of `like`."""
    alike = [value for value in NASTY_VALUES if type(value) is type(like)]
    return random.choice(alike or NASTY_VALUES)


def mutated_json(value: Any, random: Random) -> Any:
    """Return a copy of a JSON value in which one place was replaced, removed, repeated or nested deeply."""
    value = json.loads(json.dumps(value))
    holder, key = _some_place({"": value}, "", random)
    match random.choice(("replace", "replace", "remove", "deep", "add")):
        case "remove":
            del holder[key]
        case "deep":
            holder[key] = None  # See `as_json`: nested too deeply for `json.dumps`.
            return ("deep", value)
        case "add" if isinstance(holder[key], dict):
            holder[key][random.choice(NASTY_TEXT)[:40]] = nasty(random)
        case "add" if isinstance(holder[key], list):
            holder[key].extend(nasty(random) for _ in range(random.choice((1, 3, 2000))))
        case _:
            holder[key] = nasty(random)
    return value


def as_json(value: Any, depth: int = 100_000) -> bytes:
    """Return the JSON text of what `mutated_json` returned."""
    if isinstance(value, tuple):
        text = json.dumps(value[1]).replace("null", "[" * depth + "]" * depth, 1)
    else:
        text = json.dumps(value)
    return text.encode("utf-8", "surrogatepass")


def _some_place(holder: Any, key: Any, random: Random) -> tuple[Any, Any]:
    inner = holder[key]
    if isinstance(inner, dict) and inner and random.random() < 0.8:
        return _some_place(inner, random.choice(list(inner)), random)
    if isinstance(inner, list) and inner and random.random() < 0.8:
        return _some_place(inner, random.randrange(len(inner)), random)
    return holder, key
