"""This module turns a TOML file and `--set` into a checked `Config`, and back.

A user's mistake becomes one line that names `[section] key`.
"""

from __future__ import annotations

import ipaddress
import math
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import tomli_w

from headrace.config.algorithm import check_algorithm
from headrace.config.declared import transport_facts
from headrace.config.explain import NAMES, explain
from headrace.config.names import is_reference, mistake, names_of
from headrace.config.schema import (
    AgentTaskConfig,
    AlgorithmConfig,
    BufferConfig,
    Config,
    DatasetTaskConfig,
    EngineConfig,
    LoraConfig,
    RolloutsConfig,
    ScorerConfig,
)
from headrace.config.tables import ShortForm, check_name, long_form
from headrace.errors import ConfigError


def load_config(path: str | Path, settings: Iterable[str] = ()) -> Config:
    """Read a TOML file and apply `section.key=value` settings to it. Raises `ConfigError`."""
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"{path}: no such configuration file")
    try:
        raw = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error
    return make_config(raw, settings)


def make_config(raw: Mapping[str, Any], settings: Iterable[str] = ()) -> Config:
    """Make a checked configuration from nested dictionaries. Raises `ConfigError`."""
    given = ShortForm(raw)
    for setting in settings:
        _apply(given, setting)
    try:
        return _checked(given)
    except ConfigError as error:
        raise ConfigError(given.as_given(str(error))) from error


def _checked(given: ShortForm) -> Config:
    data = given.data
    for name in NAMES:
        if name in data:
            raise ConfigError(explain(f"Object contains unknown field `{name}`"))
    for section, values in data.items():
        if section != "scorers":
            _check_finite(section, values)
    for name, scorer in data.get("scorers", {}).items():
        _check_scorer(name, scorer)
    names = {"task_name": given.task_name, "policy_name": given.policy_name}
    try:
        config = msgspec.convert({**data, **names}, Config, strict=True)
    except msgspec.ValidationError as error:
        raise ConfigError(explain(str(error))) from error
    _check_names(config)
    _check_together(config)
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
    return long_form(_without_none(sections), config.task_name, config.policy_name)


def _apply(given: ShortForm, setting: str) -> None:
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
    target[parts[-1]] = _value(text.strip())


def _value(text: str) -> Any:
    """Read a TOML value. Text that is not TOML is taken as a string, so a command line needs no quotes."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _check_finite(section: str, value: Any, *keys: str) -> None:
    """Raise `ConfigError` for infinity and NaN. TOML can write them, but no key has a meaning for them."""
    if isinstance(value, float) and not math.isfinite(value):
        where = f"[{section}] {'.'.join(keys)}" if keys else section
        raise ConfigError(f"{where}: {value} is not a finite number")
    inner = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        _check_finite(section, each, *keys, str(key))


def _check_scorer(name: str, given: Any) -> None:
    """Check one scorer by itself, because msgspec does not name the entry of a table in its messages."""
    check_name("scorers", name)
    place = f"scorers.{name}"
    _check_finite(place, given)
    try:
        scorer = msgspec.convert(given, ScorerConfig, strict=True)
    except msgspec.ValidationError as error:
        raise ConfigError(explain(str(error), "scorers").replace("[scorers]", f"[{place}]", 1)) from error
    if not is_reference(scorer.scorer):
        raise ConfigError(f"[{place}] scorer: {scorer.scorer!r} is not module:attribute, or file.py:attribute")


def _check_names(config: Config) -> None:
    """Check that a key which takes names has one of them, or a reference to the user's code."""
    for name in Config.__struct_fields__:
        section = getattr(config, name)
        for key in getattr(section, "__struct_fields__", ()):
            names = names_of(type(section), key)
            if names is None:
                continue
            if wrong := mistake(getattr(section, key), names):
                raise ConfigError(f"[{name}] {key}: {wrong}")


def _check_together(config: Config) -> None:
    """Check the rules that concern several keys."""
    check_algorithm(config.algorithm, config.rollouts)
    _check_engine(config.engine)
    if config.engine.kind == "vllm":
        _check_for_vllm(config)
    _check_buffer(config.buffer, config.rollouts, config.algorithm)
    rollouts = config.rollouts
    longest = rollouts.max_tokens
    if config.engine.cache_tokens and config.engine.cache_tokens < longest + config.engine.block_size:
        raise ConfigError(
            f"[engine] cache_tokens: {config.engine.cache_tokens} cannot hold one answer of "
            f"[rollouts] max_tokens = {longest} with its prompt"
        )
    if config.lora is not None:
        _check_lora(config.lora)
    _check_bind("delivery", config.delivery.bind)
    _check_bind("gateway", config.gateway.bind)
    if isinstance(config.task, DatasetTaskConfig) and config.task.reward is None and not config.scorers:
        raise ConfigError("[task] reward is required, or a scorer in its place ([scorers.NAME])")
    if isinstance(config.task, AgentTaskConfig) and config.task.agent is not None and config.task.command:
        raise ConfigError("[task] command: give an agent or a command, not both")
    if isinstance(config.task, AgentTaskConfig) and config.rollouts.truncates:
        raise ConfigError("[rollouts] top_k, top_p, min_p: agents' answers are drawn without truncation")
    training = config.training
    if training.ranks % training.tensor_parallel:
        raise ConfigError(
            f"[training] tensor_parallel: {training.tensor_parallel} does not divide ranks = {training.ranks}"
        )
    if training.ranks > 1 or training.offload:
        _check_ranks(config)
    if not is_reference(config.delivery.transport):
        check_transport(config)
    whole_file = config.evaluate.prompts is None and getattr(config.task, "heldout_path", None) is not None
    if config.evaluate.every and not (config.evaluate.prompts or whole_file):
        raise ConfigError("[evaluate] every: needs prompts > 0")


def _check_buffer(buffer: BufferConfig, rollouts: RolloutsConfig, algorithm: AlgorithmConfig) -> None:
    depth, max_lag = buffer.depth, buffer.max_lag
    if depth == "unbounded" and max_lag is None:
        raise ConfigError("[buffer] max_lag: required with depth = 'unbounded', which nothing else holds back")
    if depth != "unbounded" and max_lag is not None and max_lag < depth:
        raise ConfigError(
            f"[buffer] max_lag: {max_lag} is below depth {depth}, so the deeper work could never be "
            f"trained (set depth = {max_lag}, or a larger max_lag)"
        )
    if buffer.on_stale != "wait" and max_lag is None:
        raise ConfigError(f"[buffer] on_stale: {buffer.on_stale!r} needs max_lag; without it nothing is too old")
    if buffer.correct_above is not None and not algorithm.corrections:
        raise ConfigError("[buffer] correct_above: says where [algorithm] corrections apply, and there are none")
    if "zero_variance" in buffer.filter and rollouts.group_size < 2:
        raise ConfigError("[buffer] filter: 'zero_variance' compares answers and needs [rollouts] group_size >= 2")
    if buffer.oversample > 1 and not buffer.filter:
        raise ConfigError("[buffer] oversample: makes up for groups that are filtered, and filter is empty")
    if rollouts.min_group is not None and not min(2, rollouts.group_size) <= rollouts.min_group <= rollouts.group_size:
        raise ConfigError(
            f"[rollouts] min_group: {rollouts.min_group} is not between {min(2, rollouts.group_size)} and group_size "
            f"{rollouts.group_size}"
        )


def _check_ranks(config: Config) -> None:
    """Refuse, in one line each, features that work with only one rank so far."""
    wanted = {
        '[lora] base = "nf4"': config.lora is not None and config.lora.base == "nf4",
        '[training] optimizer = "adamw_8bit"': config.training.optimizer == "adamw_8bit",
        '[delivery] send = "delta"': config.delivery.send == "delta",
    }
    for what, used in wanted.items():
        if used:
            raise ConfigError(f"[training] ranks: {what} needs one rank without offload")
    if config.lora is not None and config.training.tensor_parallel > 1:
        raise ConfigError("[training] tensor_parallel: an adapter is not cut over tensor ranks (set it to 1)")


def check_transport(config: Config) -> None:
    """Check the transport's declarations against the trainer's ranks and the engines.

    If the transport is the user's own, its file is read.
    """
    what, facts = f'[delivery] transport = "{config.delivery.transport}"', transport_facts(config.delivery.transport)
    if (config.training.ranks > 1 or config.training.offload) and not facts.for_ranks:
        raise ConfigError(f"[training] ranks: {what} needs one rank without offload")
    if config.engine.kind == "vllm" and not facts.for_servers:
        raise ConfigError(f'[engine] kind = "vllm" does not go together with {what}')


def _check_lora(lora: LoraConfig) -> None:
    for key in ("targets", "modules"):
        if not all(name.strip(".") for name in getattr(lora, key)):
            raise ConfigError(f"[lora] {key}: a name is empty; name the ends of modules, such as q_proj")
    if both := sorted(set(lora.targets) & set(lora.modules)):
        raise ConfigError(f"[lora] modules: {both[0]} is one of targets too; a module is adapted or trained in full")
    if lora.dropout and any(target.rpartition(".")[0].endswith("experts") for target in lora.targets):
        raise ConfigError("[lora] dropout: stacked experts take none; set dropout = 0 or leave them out of targets")


def _check_engine(engine: EngineConfig) -> None:
    if engine.kind == "embedded":
        for key in ("python", "urls", "port", "arguments"):
            if getattr(engine, key):
                raise ConfigError(f'[engine] {key}: only engine kind "vllm" has it')
    if engine.kind != "vllm":
        return
    if engine.kv == "keep":
        raise ConfigError(
            '[engine] kv: "keep" is not for vLLM: a sequence kept over a swap would go on before the new weights are '
            'proved; use "recompute"'
        )
    if not engine.python and not engine.urls:
        raise ConfigError(
            '[engine] python: engine kind "vllm" needs the interpreter of an environment with vLLM '
            "(`make vllm` creates .venv-vllm/bin/python), or [engine] urls"
        )


def _check_for_vllm(config: Config) -> None:
    """Refuse, in one line each, features that vLLM servers do not support so far."""
    wanted = {
        '[lora] serve = "unmerged"': config.lora is not None and config.lora.serve == "unmerged",
        '[lora] on [model] weights = "random"': config.lora is not None and config.model.weights == "random",
        '[lora] base = "nf4"': config.lora is not None and config.lora.base == "nf4",
        '[delivery] send = "delta"': config.delivery.send == "delta",
        "[training] ranks above 1": config.training.ranks > 1,
        "[rollouts] top_k, top_p or min_p": config.rollouts.truncates,
    }
    for what, used in wanted.items():
        if used:
            raise ConfigError(f'[engine] kind = "vllm" does not go together with {what}')


def _check_bind(section: str, bind: str) -> None:
    try:
        address = ipaddress.ip_address(bind)
    except ValueError as error:
        raise ConfigError(f"[{section}] bind: {bind!r} is not an IP address, such as 127.0.0.1") from error
    if address.is_unspecified:
        peers = "engines" if section == "delivery" else "agents"
        raise ConfigError(f"[{section}] bind: {bind} is every interface; name the one address that {peers} can reach")


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_none(inner) for inner in value]
    return value
