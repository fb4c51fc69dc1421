"""The long form of a configuration: `[tasks.NAME]`, `[policies.NAME]`, `[scorers.NAME]`.

`[task]` is short for `[tasks.task]`. `[model]`, `[training]` and the other sections of a policy are short for
`[policies.policy.model]` and so on. All other modules see only the short form, with the name of the task and the name
of the policy beside it. A run has one task and one policy so far, so a second one is refused here, in one line.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any

from headrace.config.schema import PolicyConfig
from headrace.errors import ConfigError
from headrace.types import POLICY, TASK

POLICY_SECTIONS = PolicyConfig.__struct_fields__
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_SECTION = re.compile(r"\[(\w+)\]")


class ShortForm:
    """A configuration as nested dictionaries in the short form. It remembers the names and places of the long form."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        data: dict[str, Any] = _copied(raw)
        self.data = data
        self._places: dict[str, str] = {}
        """Section -> its place in the long form, such as `policies.writer.model`, if it was given there."""
        self._task = TASK if "task" in data else None
        self._policy = None
        if (tasks := data.pop("tasks", None)) is not None:
            self._take_task(tasks)
        if (policies := data.pop("policies", None)) is not None:
            self._take_policy(policies)
        elif "model" in data:
            self._policy = POLICY
        _table("scorers", data.get("scorers", {}))

    @property
    def task_name(self) -> str:
        """The name of the one task."""
        return self._task or TASK

    @property
    def policy_name(self) -> str:
        """The name of the one policy."""
        return self._policy or POLICY

    def path(self, parts: list[str]) -> list[str]:
        """Translate the path of a `--set` to the short form, and record the name of the task or policy in it.

        If the task or policy has a name already, any other name raises `ConfigError`.
        """
        if parts[0] not in ("tasks", "policies"):
            return parts
        table, name, *rest = parts
        if not rest:
            raise ConfigError(f"--set {table}.{name}: expected {table}.NAME.key=value")
        check_name(table, name)
        if table == "tasks":
            self._task = _only(table, name, self._task)
            self._places.setdefault("task", f"tasks.{name}")
            return ["task", *rest]
        self._policy = _only(table, name, self._policy)
        _check_policy_key(name, rest[0])
        self._places.setdefault(rest[0], f"policies.{name}.{rest[0]}")
        return rest

    def as_given(self, message: str) -> str:
        """Rewrite a message about the short form, so that it names sections as the user wrote them."""
        return _SECTION.sub(lambda found: f"[{self._places.get(found[1], found[1])}]", message)

    def _take_task(self, tasks: Any) -> None:
        if "task" in self.data:
            raise ConfigError("[tasks]: [task] is given too, which is short for one of them; give one of the two")
        self._task, task = _one("tasks", tasks)
        self._places["task"] = f"tasks.{self._task}"
        self.data["task"] = task

    def _take_policy(self, policies: Any) -> None:
        self._policy, policy = _one("policies", policies)
        if "model" not in self.data:
            self._places["model"] = f"policies.{self._policy}.model"
        for section, values in policy.items():
            _check_policy_key(self._policy, section)
            place = f"policies.{self._policy}.{section}"
            if section in self.data:
                raise ConfigError(f"[{place}]: [{section}] is given too; give one of the two")
            self._places[section] = place
            self.data[section] = values


def long_form(data: dict[str, Any], task: str, policy: str) -> dict[str, Any]:
    """Turn the short form into what is written to disk: a task or policy with a name of its own in the long form."""
    written = dict(data)
    if task != TASK:
        written["tasks"] = {task: written.pop("task")}
    if policy != POLICY:
        written["policies"] = {policy: {key: written.pop(key) for key in POLICY_SECTIONS if key in written}}
    return written


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
    check_name(table, name)
    return name, entry


def _table(table: str, given: Any) -> Mapping[str, Mapping[str, Any]]:
    if not isinstance(given, Mapping):
        raise ConfigError(f"[{table}]: expected a section for each name, such as [{table}.NAME]")
    for name, entry in given.items():
        if not isinstance(entry, Mapping):
            raise ConfigError(f"[{table}] {name}: expected a section, [{table}.{name}]")
    return given


def check_name(table: str, name: str) -> None:
    """Refuse a name that could not be written in a TOML key or in a `--set`."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"[{table}] {name!r}: a name is made of letters, digits, - and _")


def _only(table: str, name: str, known: str | None) -> str:
    if known not in (None, name):
        raise ConfigError(f"[{table}.{name}]: several {table} in one run are not built yet, and this one has {known!r}")
    return name


def _check_policy_key(policy: str, key: str) -> None:
    if key not in POLICY_SECTIONS:
        close = difflib.get_close_matches(key, POLICY_SECTIONS, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(sorted(POLICY_SECTIONS))}"
        raise ConfigError(f"[policies.{policy}] unknown key {key!r} ({hint})")
