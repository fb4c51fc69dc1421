"""This module turns msgspec's messages into one line that names `[section] key` and what would be right."""

from __future__ import annotations

import difflib
import re
import types
import typing

from headrace.config.names import REFERENCES, names_of
from headrace.config.schema import Config, Section

NAMES = ("task_name", "policy_name")
"""The fields of `Config` that are not sections."""
_WHERE = re.compile(r"^(?P<what>.*?)(?: - at `\$(?P<path>[^`]*)`)?$", re.DOTALL)
_UNKNOWN = re.compile(r"unknown field `(?P<key>[^`]*)`")
_MISSING = re.compile(r"missing required field `(?P<key>[^`]*)`")


def explain(message: str, *inside: str) -> str:
    """Turn msgspec's message about a value into a line that names `[section] key`.

    The value is `inside` this section.
    """
    match = _WHERE.match(message)
    assert match is not None
    what, inner = match["what"], [part for part in re.split(r"\.|\[", (match["path"] or "")) if part]
    parts = [*inside, *inner]
    section = _section_type(parts)
    where = f"[{parts[0]}]" if parts else ""
    if unknown := _UNKNOWN.search(what):
        known = _known_keys(parts)
        close = difflib.get_close_matches(unknown["key"], known, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"
        noun = "key" if parts else "section"
        return f"{where} unknown {noun} {unknown['key']!r} ({hint})".strip()
    if missing := _MISSING.search(what):
        return f"{where} {missing['key']} is required" if parts else f"section [{missing['key']}] is required"
    key = ".".join(part.removesuffix("]") for part in parts[1:] if part.strip(".]"))
    detail = what[0].lower() + what[1:]
    if allowed := _allowed_values(section, parts):
        detail += f" (one of: {', '.join(allowed)})"
    return f"{where} {key}".strip() + f": {detail}"


def _known_keys(parts: list[str]) -> list[str]:
    if not parts:
        return [*(key for key in typing.get_type_hints(Config) if key not in NAMES), "tasks", "policies"]
    return sorted({key for kind in _kinds(parts[0]) for key in typing.get_type_hints(kind)})


def _section_type(parts: list[str]) -> type[Section] | None:
    if not parts:
        return Config
    kinds = _kinds(parts[0])
    return kinds[0] if len(kinds) == 1 else None


def _kinds(section: str) -> list[type[Section]]:
    """Return the structs of a section: several for a task, otherwise one, even for an optional section or a table."""
    hint = typing.get_type_hints(Config).get(section)
    kinds = typing.get_args(hint) or (hint,)
    return [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)]


def _allowed_values(section: type[Section] | None, parts: list[str]) -> list[str]:
    if parts == ["task", "kind"]:
        union = typing.get_args(typing.get_type_hints(Config)["task"])
        return [str(task.__struct_config__.tag) for task in union]
    if section is None or len(parts) < 2:
        return []
    hint = typing.get_type_hints(section).get(parts[1])
    if hint is str and (names := names_of(section, parts[1])):
        return [*names, REFERENCES]
    if len(parts) == 3 and typing.get_origin(hint) is list:
        [hint] = typing.get_args(hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        words = [part for part in typing.get_args(hint) if typing.get_origin(part) is typing.Literal]
        return ["a number", *(str(value) for part in words for value in typing.get_args(part))] if words else []
    return [str(value) for value in typing.get_args(hint)] if typing.get_origin(hint) is typing.Literal else []
