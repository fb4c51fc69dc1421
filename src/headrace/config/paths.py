"""Relative paths in a configuration become absolute ones when it is read, so that a saved one holds no relative path.

A path in a TOML file follows the directory of that file, and a path in a `--set` follows the working directory. What a
run writes follows the working directory in both cases. The name of a model or dataset on the Hugging Face hub stays.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.config.hub import is_template, looks_like_name
from headrace.config.stores import is_url

HUB_KEYS = {("model", "path"), ("algorithm", "teacher"), ("task", "path"), ("task", "heldout_path")}
"""Keys that hold a path or a name on the hub."""
WRITTEN = {("training", "checkpoint_directory"), ("delivery", "directory")}
"""Keys of directories that a run writes to. A URL stays as it is."""
FREE = {
    "config", "system", "suffix", "arguments", "command", "stop", "fields", "hosts", "urls", "url", "pattern",
    "answer_pattern", "environment", "markers", "tag", "good", "bad",
}  # fmt: skip
"""Keys whose values are the user's own words. They are never taken for a path."""
_FILE_REFERENCE = re.compile(r"(?P<file>[^\n]*\.py):(?P<attribute>[A-Za-z_][\w.]*)")


def make_absolute(sections: Mapping[str, Any], base: Path) -> dict[str, Any]:
    """Return sections, in the short form, in which every path is absolute. `base` is what relative ones follow."""
    return {
        section: _tasks(values, base) if section == "tasks" else _inside(values, (section,), base, sections)
        for section, values in sections.items()
    }


def _tasks(tasks: Mapping[str, Any], base: Path) -> dict[str, Any]:
    """Return several tasks, each as `[task]` would be."""
    return {name: _inside(task, ("task",), base, {"task": task}) for name, task in tasks.items()}


def _inside(value: Any, place: tuple[str, ...], base: Path, sections: Mapping[str, Any]) -> Any:
    if place[0] == "scorers" and place[2:] == ("command",) and isinstance(value, list):
        return [_file_or_word(word, base) for word in value]
    if len(place) > 1 and place[-1] in FREE:
        return value
    if place == ("observe", "tracker_options") and isinstance(value, Mapping):
        # The names are those in `trackers`, and the options are the user's own words.
        return {_inside(name, ("observe", "trackers"), base, sections): options for name, options in value.items()}
    if isinstance(value, Mapping):
        return {key: _inside(inner, (*place, str(key)), base, sections) for key, inner in value.items()}
    if isinstance(value, list):
        return [_inside(inner, place, base, sections) for inner in value]
    if not isinstance(value, str) or not value or "\0" in value:
        return value
    if place in HUB_KEYS:
        pinned = isinstance(values := sections[place[0]], Mapping) and values.get("revision") and place[1] == "path"
        return _model_or_data(value, base, named=bool(pinned))
    if place in WRITTEN:
        return value if is_url(value) else _joined(value, Path.cwd())
    if place == ("model", "chat_template"):
        return value if is_template(value) else _joined(value, base)
    if place[0] == "scorers" and place[2:] in (("model",), ("tokenizer",)):
        pinned = isinstance(values := sections["scorers"][place[1]], Mapping) and values.get("revision")
        return _model_or_data(value, base, named=bool(pinned))
    if place[:2] == ("evaluate", "sets") and place[3:] == ("path",):
        return _model_or_data(value, base, named=bool(sections["evaluate"]["sets"][place[2]].get("revision")))
    if place[0] == "scorers" and place[2:] == ("template",):
        return value if is_template(value) else _joined(value, base)
    if place == ("engine", "python"):
        return _joined(value, base) if "/" in value else value
    if reference := _FILE_REFERENCE.fullmatch(value):
        return f"{_joined(reference['file'], base)}:{reference['attribute']}"
    return value


def _model_or_data(value: str, base: Path, *, named: bool) -> str:
    """Return a name on the hub as it is. A directory or file with the same name comes first, unless it is `named`."""
    if looks_like_name(value) and (named or "@" in value or not Path(_joined(value, base)).exists()):
        return value
    return value if is_url(value) else _joined(value, base)


def _file_or_word(word: Any, base: Path) -> Any:
    """Return the path of a file, if a word of a program's command is one."""
    if not isinstance(word, str) or not word or "\0" in word or not Path(_joined(word, base)).is_file():
        return word
    return _joined(word, base)


def _joined(value: str, base: Path) -> str:
    try:
        path = Path(value).expanduser()
    except RuntimeError:  # there is no such user
        path = Path(value)
    return os.path.abspath(base / path)  # noqa: PTH100  (unlike resolve, it keeps the names of links)
