"""From a TOML file and `--set` to a checked `Config`, and back. A mistake is one line that names `[section] key`."""

from __future__ import annotations

import difflib
import ipaddress
import re
import tomllib
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import tomli_w

from headrace.config.schema import AlgorithmConfig, Config, RolloutsConfig, Section
from headrace.errors import ConfigError

_WHERE = re.compile(r"^(?P<what>.*?)(?: - at `\$(?P<path>[^`]*)`)?$", re.DOTALL)
_UNKNOWN = re.compile(r"unknown field `(?P<key>[^`]*)`")
_MISSING = re.compile(r"missing required field `(?P<key>[^`]*)`")


def load_config(path: str | Path, settings: Iterable[str] = ()) -> Config:
    """Read a TOML file and apply `section.key=value` settings to it."""
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"{path}: no such configuration file")
    try:
        raw = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error
    return make_config(raw, settings)


def make_config(raw: Mapping[str, Any], settings: Iterable[str] = ()) -> Config:
    """A checked configuration from nested dictionaries."""
    data: dict[str, Any] = {key: dict(value) if isinstance(value, Mapping) else value for key, value in raw.items()}
    for setting in settings:
        _apply(data, setting)
    try:
        config = msgspec.convert(data, Config, strict=True)
    except msgspec.ValidationError as error:
        raise ConfigError(_explain(str(error))) from error
    _check_together(config)
    return config


def with_settings(config: Config, settings: Iterable[str]) -> Config:
    """The same configuration with `section.key=value` settings applied."""
    return make_config(msgspec.to_builtins(config), settings)


def dump_config(config: Config) -> str:
    """The resolved configuration as TOML: loading it again gives an equal one."""
    return tomli_w.dumps(_without_none(msgspec.to_builtins(config)))


def _apply(data: dict[str, Any], setting: str) -> None:
    key, equals, text = setting.partition("=")
    parts = [part.strip() for part in key.split(".")]
    if not equals or len(parts) < 2 or not all(parts):
        raise ConfigError(f"--set {setting}: expected section.key=value, such as --set buffer.depth=2")
    target = data
    for part in parts[:-1]:
        inner = target.setdefault(part, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"--set {setting}: {part} is a value, not a section")
        target = inner
    target[parts[-1]] = _value(text.strip())


def _value(text: str) -> Any:
    """A TOML value; what is not one is taken as a string, so that quotes are not needed on a command line."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _explain(message: str) -> str:
    match = _WHERE.match(message)
    assert match is not None
    what, parts = match["what"], [part for part in re.split(r"\.|\[", (match["path"] or "")) if part]
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
    key = ".".join(part.removesuffix("]") for part in parts[1:] if part != "...]")
    detail = what[0].lower() + what[1:]
    if allowed := _allowed_values(section, parts):
        detail += f" (one of: {', '.join(allowed)})"
    return f"{where} {key}: {detail}"


def _known_keys(parts: list[str]) -> list[str]:
    if not parts:
        return list(typing.get_type_hints(Config))
    hint = typing.get_type_hints(Config)[parts[0]]
    return sorted({key for kind in typing.get_args(hint) or (hint,) for key in typing.get_type_hints(kind)})


def _section_type(parts: list[str]) -> type[Section] | None:
    if not parts:
        return Config
    hint = typing.get_type_hints(Config).get(parts[0])
    return hint if isinstance(hint, type) and issubclass(hint, Section) else None


def _allowed_values(section: type[Section] | None, parts: list[str]) -> list[str]:
    if parts == ["task", "kind"]:
        union = typing.get_args(typing.get_type_hints(Config)["task"])
        return [str(task.__struct_config__.tag) for task in union]
    if section is None or len(parts) < 2:
        return []
    hint = typing.get_type_hints(section).get(parts[1])
    if len(parts) == 3 and typing.get_origin(hint) is list:
        [hint] = typing.get_args(hint)
    return [str(value) for value in typing.get_args(hint)] if typing.get_origin(hint) is typing.Literal else []


def _check_together(config: Config) -> None:
    """What no single key can say."""
    _check_algorithm(config.algorithm, config.rollouts)
    buffer, rollouts = config.buffer, config.rollouts
    if buffer.max_lag is not None and buffer.max_lag < buffer.depth:
        raise ConfigError(
            f"[buffer] max_lag: {buffer.max_lag} is below depth {buffer.depth}, so the deeper work could never be "
            f"trained (set depth = {buffer.max_lag}, or a larger max_lag)"
        )
    longest = rollouts.max_tokens
    if config.engine.cache_tokens and config.engine.cache_tokens < longest + config.engine.block_size:
        raise ConfigError(
            f"[engine] cache_tokens: {config.engine.cache_tokens} cannot hold one answer of "
            f"[rollouts] max_tokens = {longest} with its prompt"
        )
    _check_bind(config.delivery.bind)
    if config.evaluate.every and not config.evaluate.prompts:
        raise ConfigError("[evaluate] every: needs prompts > 0")


def _check_algorithm(algorithm: AlgorithmConfig, rollouts: RolloutsConfig) -> None:
    advantage, loss = algorithm.advantage, algorithm.loss
    if advantage in ("rloo", "maxrl") and rollouts.group_size < 2:
        raise ConfigError(f"[rollouts] group_size: advantage {advantage!r} compares answers and needs at least 2")
    for key in ("clip_low", "clip_high"):
        if loss in ("sapo", "dppo_tv", "topr") and getattr(algorithm, key) is not None:
            raise ConfigError(f"[algorithm] {key}: loss {loss!r} does not clip ratios")
    for name in ("icepop", "mis"):
        low, high = getattr(algorithm, f"{name}_low"), getattr(algorithm, f"{name}_high")
        if low > high:
            raise ConfigError(f"[algorithm] {name}_low: {low} is above {name}_high {high}")
    buffer, longest = algorithm.overlong_buffer, rollouts.max_tokens
    if buffer > longest:
        raise ConfigError(f"[algorithm] overlong_buffer: {buffer} is above [rollouts] max_tokens {longest}")


def _check_bind(bind: str) -> None:
    try:
        address = ipaddress.ip_address(bind)
    except ValueError as error:
        raise ConfigError(f"[delivery] bind: {bind!r} is not an IP address, such as 127.0.0.1") from error
    if address.is_unspecified:
        raise ConfigError(f"[delivery] bind: {bind} is every interface; name the one address that engines can reach")


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_none(inner) for inner in value]
    return value
