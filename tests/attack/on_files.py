"""Attacks on files: configurations, datasets, model directories, and the directory of a run."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import tomli_w
from commands import SECONDS, Commands
from mutations import as_json, damaged, mutated_json, nasty
from targets import QUICKSTART, ROOT, Targets

from headrace.config.schema import Config

Case = tuple[str, str | None]
"""What was tried, in one line, and what is wrong with the outcome (None: nothing)."""

READERS = (
    ("report", "{run}"),
    ("ledger", "{run}"),
    ("rollouts", "{run}", "--json"),
    ("rollouts", "{run}", "--text"),
    ("rollouts", "{run}", "--export", "{run}/all.jsonl"),
    ("stall", "{run}"),
    ("export", "{run}", "--to", "hf"),
    ("check", "{run}/config.toml"),
)
"""Commands that read the directory of a run. `resume` is apart: it takes seconds."""


def attack_config(random: Random, targets: Targets, commands: Commands) -> Case:
    """Check a configuration in which some values are nasty, or whose text is damaged."""
    table: dict[str, Any] = tomllib.loads(QUICKSTART.read_text())
    done = []
    for _ in range(random.choice((1, 1, 2, 4))):
        section, key = random.choice(_keys())
        value = nasty(random)
        done.append(f"{section}.{key} = {str(value)[:40]!r}")
        table.setdefault(section, {})[key] = value
    try:
        text = tomli_w.dumps(table).encode()
    except (TypeError, ValueError):
        text = QUICKSTART.read_bytes()
    if random.random() < 0.3:
        text, how = damaged(text, random)
        done.append(how)
    path = targets.directory / "attacked.toml"
    path.write_bytes(text)
    settings = [word for _ in range(random.choice((0, 0, 1))) for word in ("--set", _setting(random))]
    return "; ".join([*done, *settings]), commands.run("check", str(path), *settings).problem()


def _keys() -> list[tuple[str, str]]:
    keys = []
    for field in msgspec.structs.fields(Config):
        kind = field.type
        names = [] if not isinstance(kind, type) or not issubclass(kind, msgspec.Struct) else kind.__struct_fields__
        keys += [(field.encode_name, name) for name in names] or [(field.encode_name, "kind")]
    return [*keys, ("task", "path"), ("task", "reward"), ("lora", "rank"), ("nothing", "x")]


def _setting(random: Random) -> str:
    section, key = random.choice(_keys())
    return f"{section}.{key}={str(nasty(random))[:2000]}".replace("\0", "0")


def attack_dataset(random: Random, targets: Targets, commands: Commands) -> Case:
    """Check a run whose prompts are damaged."""
    lines = (ROOT / "examples/quickstart/train.jsonl").read_bytes().splitlines()[: random.choice((1, 5, 40))]
    at = random.randrange(len(lines))
    if random.random() < 0.5:
        lines[at], how = damaged(lines[at], random)
    else:
        lines[at], how = as_json(mutated_json(json.loads(lines[at]), random)), "another value"
    path = targets.directory / "attacked.jsonl"
    path.write_bytes(b"\n".join(lines))
    setting = f"task.path={path}"
    return f"line {at + 1} of {len(lines)}: {how}", commands.run("check", str(QUICKSTART), "--set", setting).problem()


def attack_prompts(random: Random, targets: Targets, commands: Commands) -> Case:
    """Generate from a damaged file of prompts."""
    line = {"text": "cab", "max_tokens": 2, "temperature": 1.0, "top_k": 3, "seed": 1, "n": 1}
    text, how = (
        damaged(json.dumps(line).encode(), random)
        if random.random() < 0.3
        else (as_json(mutated_json(line, random)), "another value")
    )
    path = targets.directory / "prompts.jsonl"
    path.write_bytes(text)
    arguments = ("--input", str(path), "--output", str(targets.directory / "answers.jsonl"))
    return f"{how}: {text[:100]!r}", commands.run("generate", str(targets.model), *arguments).problem()


def attack_model(random: Random, targets: Targets, commands: Commands) -> Case:
    """Check, or generate with, a model directory in which one file is damaged. Damaged weights must be refused."""
    copy = targets.copy(targets.model)
    try:
        done, _ = _damage_one(copy, random)
        if random.random() < 0.7:
            outcome = commands.run("check", str(QUICKSTART), *_set(f"model.path={copy}", "model.weights=load"))
        else:
            prompts = targets.directory / "good.jsonl"
            prompts.write_text('{"text": "cab", "max_tokens": 2}\n')
            outcome = commands.run(
                "generate", str(copy), "--input", str(prompts), "--output", str(copy / "answers.jsonl")
            )
        return done, outcome.problem()
    finally:
        targets.discard(copy)


def attack_run(random: Random, targets: Targets, commands: Commands) -> Case:
    """Read the directory of a run in which one file is damaged or gone. Damage that is read must be named."""
    return _attack_run(random, targets, commands, random.choice(READERS))


def attack_resume(random: Random, targets: Targets, commands: Commands) -> Case:
    """Resume a run in which one file is damaged or gone: the run goes on from what is good, or says what is not."""
    return _attack_run(random, targets, commands, ("resume", "{run}", "--set", "run.versions=4"), seconds=120)


def _attack_run(
    random: Random, targets: Targets, commands: Commands, words: tuple[str, ...], seconds: float = SECONDS
) -> Case:
    original = random.choice((targets.run, targets.run, targets.adapter_run, targets.sharded_run))
    copy = targets.copy(original)
    try:
        done, damaged_file = _damage_one(copy, random)
        command = [word.format(run=copy) for word in words]
        outcome = commands.run(*command, seconds=seconds)
        problem = outcome.problem()
        if problem is None and outcome.code == 0 and _reads(command, copy, damaged_file):
            problem = None if outcome.names(*_names(damaged_file)) else "the damage was read and not named"
        return f"{original.parent.name}: {done}, then {command[0]}", problem
    finally:
        targets.discard(copy)


def _set(*settings: str) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


def _damage_one(directory: Path, random: Random) -> tuple[str, Path]:
    """Damage or remove one file of a directory. Return what was done, and which file."""
    files = sorted(path for path in directory.rglob("*") if path.is_file() and path.suffix != ".log")
    path = random.choice(files)
    name = path.relative_to(directory)
    if random.random() < 0.1:
        path.unlink()
        return f"{name} removed", path
    if path.suffix == ".json" and random.random() < 0.5:
        path.write_bytes(as_json(mutated_json(json.loads(path.read_text()), random)))
        return f"{name} with another value", path
    changed, how = damaged(path.read_bytes(), random)
    path.write_bytes(changed)
    return f"{name} {how}", path


def _reads(command: list[str], run: Path, path: Path) -> bool:
    """Return whether the command must read this file of a run, so that damage to it must be noticed."""
    if not path.exists() or path.stat().st_size == 0:
        return False
    newest = max((run / "checkpoints").glob("step-*"), key=lambda step: int(step.name.split("-")[1]), default=run)
    if command[0] in ("export", "resume"):
        return newest in path.parents
    return command[0] == "rollouts" and path.parent.name == "segments" and ("--json" not in command)


def _names(path: Path) -> tuple[str, ...]:
    """Return the words of which one names a damaged file: the file, or the checkpoint that it belongs to."""
    return (path.name, *(parent.name for parent in path.parents if parent.name.startswith("step-")))


KINDS = {
    "config": attack_config,
    "dataset": attack_dataset,
    "prompts": attack_prompts,
    "model": attack_model,
    "run": attack_run,
    "resume": attack_resume,
}
