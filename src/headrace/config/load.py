"""This module turns a TOML file and `--set` into a checked `Config`, and back.

A user's mistake becomes one line that names `[section] key`.

`[task]` is short for `[tasks.task]`. `[model]`, `[training]` and the other sections of a policy are short for
`[policies.policy.model]` and so on. All other modules see only the short form. The names of the task and of the policy
are fields of `Config`. Several tasks, `[tasks.NAME]` each, become one task, a `MixtureConfig`. A run has one policy so
far, so a second one is refused here, in one line.
"""

from __future__ import annotations

import difflib
import math
import re
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import tomli_w

from headrace.config.base import Section
from headrace.config.checks import REFERENCES, check_together, in_section
from headrace.config.evaluate import EvaluationSetConfig
from headrace.config.other_names import key_for
from headrace.config.paths import make_absolute
from headrace.config.schema import (
    AgentTaskConfig,
    Config,
    MixtureConfig,
    TaskConfig,
    is_reference,
    names_of,
)
from headrace.config.scorers import FUNCTION, FunctionScorerConfig, ScorerConfig, check_scorer
from headrace.errors import ConfigError, one_line
from headrace.types import POLICY, TASK

NAMES = ("task_name", "policy_name")
"""The fields of `Config` that are not sections."""
POLICY_SECTIONS = ("model", "engine", "buffer", "algorithm", "training", "lora", "warm_start", "delivery")
"""The sections of a policy, for `[policies.NAME]`."""
NOT_TASKS = ("score", "extra")
"""Names that a task must not have if there are several: the names of curves begin with the name of a task, or with one
of these."""
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_SECTION = re.compile(r"\[(\w+)\]")
_WHERE = re.compile(r"^(?P<what>.*?)(?: - at `\$(?P<path>[^`]*)`)?$", re.DOTALL)
_UNKNOWN = re.compile(r"unknown field `(?P<key>[^`]*)`")
_MISSING = re.compile(r"missing required field `(?P<key>[^`]*)`")


def load_config(path: str | Path, settings: Iterable[str] = (), *, base: Path | None = None) -> Config:
    """Read a TOML file and apply `section.key=value` settings to it. Raises `ConfigError`.

    Relative paths in the file follow `base`, by default the directory of the file.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"{path}: no such configuration file")
    try:
        raw = tomllib.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error
    return make_config(raw, settings, base=path.parent if base is None else base)


def make_config(raw: Mapping[str, Any], settings: Iterable[str] = (), *, base: Path | None = None) -> Config:
    """Make a checked configuration from nested dictionaries. Raises `ConfigError`.

    Relative paths follow `base`, by default the working directory. Those in `settings` follow the working directory.
    """
    given = _ShortForm(raw)
    given.data = make_absolute(given.data, (base or Path()).absolute())
    for setting in settings:
        _apply(given, setting)
    try:
        return _checked(given)
    except ConfigError as error:
        raise ConfigError(given.as_given(str(error))) from error


def _checked(given: _ShortForm) -> Config:
    data = given.data
    for name in NAMES:
        if name in data:
            raise ConfigError(_explain(f"Object contains unknown field `{name}`"))
    for section, values in data.items():
        if section not in ("scorers", "tasks"):
            _check_finite(section, values)
    if tasks := data.get("tasks"):
        for name, task in tasks.items():
            _check_task(name, task)
        data = {**data, "task": {"kind": MixtureConfig.__struct_config__.tag, "tasks": tasks}}
        del data["tasks"]
    elif isinstance(task := data.get("task"), Mapping) and task.get("kind") == MixtureConfig.__struct_config__.tag:
        raise ConfigError("[task] kind: several tasks are given by a section each, [tasks.NAME]")
    if scorers := data.get("scorers"):
        data = {**data, "scorers": {name: _with_kind(scorer) for name, scorer in scorers.items()}}
        for name, scorer in data["scorers"].items():
            _check_scorer(name, scorer)
    if isinstance(evaluate := data.get("evaluate"), Mapping) and "sets" in evaluate:
        for name, each in _table("evaluate.sets", evaluate["sets"]).items():
            _check_set(name, each)
    names = {"task_name": given.task or TASK, "policy_name": given.policy or POLICY}
    try:
        config = msgspec.convert({**data, **names}, Config, strict=True)
    except msgspec.ValidationError as error:
        raise ConfigError(_explain(str(error))) from error
    check_together(config)
    return config


def with_settings(config: Config, settings: Iterable[str]) -> Config:
    """Return the same configuration with `section.key=value` settings applied."""
    return make_config(_written(config), settings)


def dump_config(config: Config) -> str:
    """Return the resolved configuration as TOML. Loading that TOML gives an equal configuration."""
    return tomli_w.dumps(_written(config))


def _written(config: Config) -> dict[str, Any]:
    sections = {key: value for key, value in msgspec.to_builtins(config).items() if key not in NAMES}
    if not config.scorers:
        del sections["scorers"]
    written: dict[str, Any] = _without_none(sections)
    if isinstance(config.task, MixtureConfig):
        written["tasks"] = written.pop("task")["tasks"]
    elif config.task_name != TASK:
        written["tasks"] = {config.task_name: written.pop("task")}
    if config.policy_name != POLICY:
        sections = {key: written.pop(key) for key in POLICY_SECTIONS if key in written}
        written["policies"] = {config.policy_name: sections}
    return written


def _apply(given: _ShortForm, setting: str) -> None:
    key, equals, text = setting.partition("=")
    parts = [part.strip() for part in key.split(".")]
    if not equals or len(parts) < 2 or not all(parts):
        raise ConfigError(f"--set {setting}: expected section.key=value, such as --set buffer.depth=2")
    target, parts = given.data, given.path(parts)
    for part in parts[:-1]:
        inner = target.setdefault(part, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"--set {setting}: {part} is a value, not a section")
        target = inner
    place, value = parts[-1], _value(text.strip())
    nested: dict[str, Any] = {place: value}
    for part in reversed(parts[:-1]):
        nested = {part: nested}
    nested = make_absolute(nested, Path.cwd())
    for part in parts[:-1]:
        nested = nested[part]
    target[place] = nested[place]


def _value(text: str) -> Any:
    """Read a TOML value. Text that is not TOML is taken as a string, so a command line needs no quotes."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--set {one_line(text, 40)}: not TOML: {error}") from error


def _check_finite(section: str, value: Any, *keys: str) -> None:
    """Raise `ConfigError` for infinity, NaN and huge integers. TOML can write them, but no key has a use for them."""
    where = f"[{section}] {'.'.join(keys)}" if keys else section
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{where}: {value} is not a finite number")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ConfigError(f"{where}: a whole number of {value.bit_length()} bits is too large")
    inner = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        _check_finite(section, each, *keys, str(key))


def _check_task(name: str, given: Any) -> None:
    """Check one of several tasks by itself, because msgspec does not name the entry of a table in its messages."""
    place = f"tasks.{name}"
    if name in NOT_TASKS:
        raise ConfigError(f"[{place}]: {name!r} is what other curves begin with; choose another name")
    _check_finite(place, given)
    with in_section(place):
        try:
            task = msgspec.convert(given, TaskConfig, strict=True)
        except msgspec.ValidationError as error:
            raise ConfigError(_explain(str(error), "task")) from error
        if isinstance(task, AgentTaskConfig):
            raise ConfigError("[task] kind: agents cannot be mixed with other tasks; give a run of agents one task")


def _with_kind(scorer: Any) -> Any:
    return {"kind": FUNCTION, **scorer} if isinstance(scorer, Mapping) else scorer


def _check_scorer(name: str, given: Any) -> None:
    """Check one scorer by itself, because msgspec does not name the entry of a table in its messages."""
    _check_name("scorers", name)
    place = f"scorers.{name}"
    _check_finite(place, given)
    try:
        scorer = msgspec.convert(given, ScorerConfig, strict=True)
    except msgspec.ValidationError as error:
        raise ConfigError(_explain(str(error), "scorers").replace("[scorers]", f"[{place}]", 1)) from error
    if isinstance(scorer, FunctionScorerConfig) and not is_reference(scorer.scorer):
        raise ConfigError(f"[{place}] scorer: {scorer.scorer!r} is not module:attribute, or file.py:attribute")
    check_scorer(place, scorer)


def _check_set(name: str, given: Any) -> None:
    """Check one set of held-out prompts by itself, because msgspec does not name the entry of a table."""
    _check_name("evaluate.sets", name)
    try:
        msgspec.convert(given, EvaluationSetConfig, strict=True)
    except msgspec.ValidationError as error:
        line = _explain(str(error), "evaluate.sets").replace("[evaluate.sets]", f"[evaluate.sets.{name}]", 1)
        raise ConfigError(line) from error


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_none(inner) for inner in value]
    return value


class _ShortForm:
    """A configuration as nested dictionaries in the short form. It remembers the names and places of the long form."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        data: dict[str, Any] = _copied(raw)
        self.data = data
        self._places: dict[str, str] = {}
        """Section -> its place in the long form, such as `policies.writer.model`, if it was given there."""
        self.task = TASK if "task" in data else None
        self.policy = None
        """The names of the one task and of the one policy, as far as they were given."""
        if (tasks := data.pop("tasks", None)) is not None:
            if "task" in data:
                raise ConfigError("[tasks]: [task] is given too, which is short for one of them; give one of the two")
            if len(_table("tasks", tasks)) > 1:
                for name in tasks:
                    _check_name("tasks", name)
                data["tasks"] = tasks
            else:
                self.task, data["task"] = _one("tasks", tasks)
                self._places["task"] = f"tasks.{self.task}"
        if (policies := data.pop("policies", None)) is not None:
            self.policy, policy = _one("policies", policies)
            if "model" not in data:
                self._places["model"] = f"policies.{self.policy}.model"
            for section, values in policy.items():
                _check_policy_key(self.policy, section)
                place = self._places[section] = f"policies.{self.policy}.{section}"
                if section in data:
                    raise ConfigError(f"[{place}]: [{section}] is given too; give one of the two")
                data[section] = values
        elif "model" in data:
            self.policy = POLICY
        _table("scorers", data.get("scorers", {}))

    def path(self, parts: list[str]) -> list[str]:
        """Translate the path of a `--set` to the short form. Raises `ConfigError` for a further task or policy."""
        if parts[0] == "task" and (tasks := self.data.get("tasks")):
            known = ", ".join(tasks)
            raise ConfigError(f"[task]: the run has several tasks; name one of them, [tasks.NAME] (there are {known})")
        if parts[0] not in ("tasks", "policies"):
            return parts
        table, name, *rest = parts
        if not rest:
            raise ConfigError(f"--set {table}.{name}: expected {table}.NAME.key=value")
        _check_name(table, name)
        if table == "tasks":
            if tasks := self.data.get("tasks"):
                if name not in tasks:
                    raise ConfigError(f"[tasks.{name}]: there is no such task (there are {', '.join(tasks)})")
                return parts
            if self.task not in (None, name):
                raise ConfigError(f"[tasks.{name}]: there is no such task (the run has {self.task!r})")
            self.task = name
            self._places.setdefault("task", f"tasks.{name}")
            return ["task", *rest]
        self.policy = _only(table, name, self.policy)
        _check_policy_key(name, rest[0])
        self._places.setdefault(rest[0], f"policies.{name}.{rest[0]}")
        return rest

    def as_given(self, message: str) -> str:
        """Rewrite a message about the short form, so that it names sections as the user wrote them."""
        return _SECTION.sub(lambda found: f"[{self._places.get(found[1], found[1])}]", message)


def _copied(value: Any) -> Any:
    return {key: _copied(inner) for key, inner in value.items()} if isinstance(value, Mapping) else value


def _one(table: str, given: Any) -> tuple[str, Mapping[str, Any]]:
    """Return the name and the entry of a table that may have only one entry so far."""
    entries = _table(table, given)
    if len(entries) > 1:
        raise ConfigError(
            f"[{table}]: several {table} in one run are not built yet; give one (there are {', '.join(entries)})"
        )
    if not entries:
        raise ConfigError(f"[{table}]: has no entry; give one, [{table}.NAME]")
    [(name, entry)] = entries.items()
    _check_name(table, name)
    return name, entry


def _table(table: str, given: Any) -> Mapping[str, Mapping[str, Any]]:
    if not isinstance(given, Mapping):
        raise ConfigError(f"[{table}]: expected a section for each name, such as [{table}.NAME]")
    for name, entry in given.items():
        if not isinstance(entry, Mapping):
            raise ConfigError(f"[{table}] {name}: expected a section, [{table}.{name}]")
    return given


def _check_name(table: str, name: str) -> None:
    """Refuse a name that could not be written in a TOML key or in a `--set`."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"[{table}] {name!r}: a name is made of letters, digits, - and _")


def _only(table: str, name: str, known: str | None) -> str:
    if known not in (None, name):
        raise ConfigError(f"[{table}.{name}]: several {table} in one run are not built yet, and this one has {known!r}")
    return name


def _check_policy_key(policy: str, key: str) -> None:
    if key not in POLICY_SECTIONS:
        raise ConfigError(f"[policies.{policy}] unknown key {key!r} ({_hint(key, sorted(POLICY_SECTIONS))})")


def _explain(message: str, *inside: str) -> str:
    """Turn msgspec's message about a value `inside` a section into a line that names `[section] key`."""
    match = _WHERE.match(message)
    assert match is not None
    what, inner = match["what"], [part for part in re.split(r"\.|\[", (match["path"] or "")) if part]
    parts = [*inside, *inner]
    where = f"[{parts[0]}]" if parts else ""
    if unknown := _UNKNOWN.search(what):
        noun = "key" if parts else "section"
        unknown_key = ".".join([*parts[1:], unknown["key"]])
        return f"{where} unknown {noun} {unknown_key!r} ({_hint(unknown['key'], _known_keys(parts))})".strip()
    if missing := _MISSING.search(what):
        return (
            f"{where} {'.'.join([*parts[1:], missing['key']])} is required"
            if parts
            else f"section [{missing['key']}] is required"
        )
    key = ".".join(part.removesuffix("]") for part in parts[1:] if part.strip(".]"))
    detail = what[0].lower() + what[1:]
    if allowed := _allowed_values(parts):
        detail += f" (one of: {', '.join(allowed)})"
    return f"{where} {key}".strip() + f": {detail}"


def _hint(key: str, known: list[str]) -> str:
    if meant := key_for(key):
        return f"here it is {meant}"
    close = difflib.get_close_matches(key, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"


def _known_keys(parts: list[str]) -> list[str]:
    if not parts:
        return [*(key for key in typing.get_type_hints(Config) if key not in NAMES), "tasks", "policies"]
    found = _kinds(parts[0])
    for part in parts[1:]:
        hints = [typing.get_type_hints(kind).get(part) for kind in found]
        found = [kind for hint in hints for kind in typing.get_args(hint) if isinstance(kind, type)]
        found = [kind for kind in found if issubclass(kind, Section)]
    return sorted({key for kind in found for key in typing.get_type_hints(kind)})


def _kinds(section: str) -> list[type[Section]]:
    """Return the structs of a section: several for a task or a scorer, otherwise one, even for an optional section."""
    tables: dict[str, Any] = {"scorers": ScorerConfig, "evaluate.sets": EvaluationSetConfig}
    hint = tables.get(section) or typing.get_type_hints(Config).get(section)
    kinds = typing.get_args(hint) or (hint,)
    sections = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)]
    return [kind for kind in sections if kind is not MixtureConfig]


def _allowed_values(parts: list[str]) -> list[str]:
    if parts == ["task", "kind"]:
        return [str(task.__struct_config__.tag) for task in typing.get_args(TaskConfig)]
    if parts == ["scorers", "kind"]:
        return [str(scorer.__struct_config__.tag) for scorer in typing.get_args(ScorerConfig)]
    kinds = _kinds(parts[0]) if len(parts) > 1 else []
    if parts and parts[0] == "scorers" and kinds:
        kinds = [kind for kind in kinds if parts[1] in kind.__struct_fields__][:1]
    if len(kinds) != 1:
        return []
    [section] = kinds
    hint = typing.get_type_hints(section).get(parts[1])
    if hint is str and (names := names_of(section, parts[1])):
        return [*names, REFERENCES]
    if len(parts) == 3 and typing.get_origin(hint) is list:
        [hint] = typing.get_args(hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        words = [part for part in typing.get_args(hint) if typing.get_origin(part) is typing.Literal]
        return ["a number", *(str(value) for part in words for value in typing.get_args(part))] if words else []
    return [str(value) for value in typing.get_args(hint)] if typing.get_origin(hint) is typing.Literal else []
