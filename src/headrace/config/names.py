"""Keys whose value is one of Headrace's own names, or a reference to the user's code.

A reference is `module:attribute` or `path/to/file.py:attribute`. Only its form is checked here; the stage that the key
belongs to imports it.
"""

from __future__ import annotations

import typing

import msgspec

REFERENCES = "or module:attribute, or file.py:attribute"


class Names(tuple[str, ...]):
    """The names that a key takes: `kind: Annotated[str, Names(("embedded", "vllm"))]`. A reference is allowed too."""


def names_of(section: type[msgspec.Struct], key: str) -> Names | None:
    """Return the names that this key of a section takes beside a reference; None for a key of another type."""
    hint = typing.get_type_hints(section, include_extras=True)[key]
    return next((each for each in typing.get_args(hint) if isinstance(each, Names)), None)


def is_reference(value: str) -> bool:
    """Return whether a value has the form of a reference to the user's code."""
    where, _, attribute = value.rpartition(":")
    return bool(where.strip() and attribute.strip())


def mistake(value: str, names: Names) -> str | None:
    """Return one line that says what is wrong with the value of a key with these names; None if nothing is wrong."""
    allowed = ", ".join(names)
    if value in names or is_reference(value):
        return None
    return f"invalid enum value {value!r} (one of: {allowed}, {REFERENCES})"
