"""Attacks on files: configurations, datasets, model directories, adapters, and the directory of a run."""

from __future__ import annotations

import json
import tomllib
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import tomli_w
from commands import SECONDS, Commands
from model_mutations import mutate_model
from mutations import LITERALS, Case, as_json, damaged, mutated_json, nasty
from targets import AGENT, HELDOUT, PROMPTS, QUICKSTART, Targets

from headrace.config.paths import make_absolute
from headrace.config.schema import Config
from victims import ROOT, set_all

BASES = (QUICKSTART, QUICKSTART, AGENT, ROOT / "examples/vllm/vllm.toml")
SMALL_DATA = {"path": str(PROMPTS), "heldout_path": str(HELDOUT)}
READERS = (
    ("report", "{run}"),
    ("ledger", "{run}"),
    ("rollouts", "{run}", "--json"),
    ("rollouts", "{run}", "--text"),
    ("rollouts", "{run}", "--export", "{run}/all.jsonl"),
    ("stall", "{run}"),
    ("export", "{run}", "--to", "hf"),
    ("check", "{run}/config.toml"),
    ("audit", "{run}", "--samples", "4"),
)
"""Commands that read the directory of a run. `resume` and `replay` are apart: each takes seconds."""
SLOW_READERS = (
    ("resume", "{run}", "--set", "run.versions=4"),
    ("resume", "{run}", "--set", "run.versions=4"),
    ("replay", "{run}"),
)


def attack_config(random: Random, targets: Targets, commands: Commands) -> Case:
    """Check a configuration in which some values are nasty, or whose text is damaged."""
    base = random.choice(BASES)
    table: dict[str, Any] = make_absolute(tomllib.loads(base.read_text()), base.parent)
    table["task"] |= SMALL_DATA
    done = []
    for _ in range(random.choice((1, 1, 2, 4))):
        section, key = random.choice(list(_keys()))
        value = nasty(random, like=_keys()[section, key] if random.random() < 0.6 else None)
        try:
            tomli_w.dumps({"key": value})
            table.setdefault(section, {})[key] = value
        except (TypeError, ValueError):
            continue
        done.append(f"{section}.{key} = {str(value)[:40]!r}")
    if random.random() < 0.2:
        section, key = random.choice(list(_keys()))
        name, literal = random.choice(list(LITERALS.items()))
        table.get(section, {}).pop(key, None)
        written = tomli_w.dumps(table).replace(f"[{section}]\n", f"[{section}]\n{key} = {literal}\n", 1)
        done.append(f"{section}.{key} is {name}")
    else:
        written = tomli_w.dumps(table)
    text = written.encode("utf-8", "surrogatepass")
    if random.random() < 0.3:
        text, how = damaged(text, random)
        done.append(how)
    settings = set_all(*(_setting(random) for _ in range(random.choice((0, 0, 1)))))
    with targets.fresh() as directory:
        path = directory / "attacked.toml"
        path.write_bytes(text)
        outcome = commands.run("check", str(path), *settings)
    return Case("; ".join([*done, *settings])[:300], outcome.problem(), f"exit {outcome.code}")


@cache
def _keys() -> dict[tuple[str, str], Any]:
    """Return every (section, key), and the key's default where there is one."""
    keys: dict[tuple[str, str], Any] = {}
    for section in msgspec.structs.fields(Config):
        kind = section.type
        fields = msgspec.structs.fields(kind) if isinstance(kind, type) and issubclass(kind, msgspec.Struct) else ()
        keys |= {(section.encode_name, field.encode_name): field.default for field in fields}
        keys |= {} if fields else {(section.encode_name, "kind"): ""}
    return keys | {("task", "path"): "", ("task", "reward"): "", ("lora", "rank"): 8, ("nothing", "x"): None}


def _setting(random: Random) -> str:
    section, key = random.choice(list(_keys()))
    return f"{section}.{key}={str(nasty(random))[:2000]}".replace("\0", "0").encode(errors="replace").decode()


def attack_dataset(random: Random, targets: Targets, commands: Commands) -> Case:
    """Check a run whose prompts are damaged."""
    lines = PROMPTS.read_bytes().splitlines()[: random.choice((1, 5, 40))]
    at = random.randrange(len(lines))
    if random.random() < 0.5:
        lines[at], how = damaged(lines[at], random)
    else:
        lines[at], how = as_json(mutated_json(json.loads(lines[at]), random)), "another value"
    with targets.fresh() as directory:
        path = directory / "attacked.jsonl"
        path.write_bytes(b"\n".join(lines))
        settings = set_all(f"task.path={path}", f"task.heldout_path={HELDOUT}")
        outcome = commands.run("check", str(QUICKSTART), *settings)
    return Case(f"line {at + 1} of {len(lines)}: {how}", outcome.problem(), f"exit {outcome.code}")


def attack_prompts(random: Random, targets: Targets, commands: Commands) -> Case:
    """Generate from a damaged file of prompts."""
    line = {"text": "cab", "max_tokens": 2, "temperature": 1.0, "top_k": 3, "seed": 1, "n": 1}
    if random.random() < 0.5:
        del line["text"]
        line["token_ids"] = [5, 6, 7]
    text, how = (
        damaged(json.dumps(line).encode(), random)
        if random.random() < 0.3
        else (as_json(mutated_json(line, random)), "another value")
    )
    with targets.fresh() as directory:
        path = directory / "prompts.jsonl"
        path.write_bytes(text)
        arguments = ("--input", str(path), "--output", str(directory / "answers.jsonl"))
        outcome = commands.run("generate", str(targets.model), *arguments)
    return Case(f"{how}: {text[:100]!r}", outcome.problem(), f"exit {outcome.code}")


def attack_model(random: Random, targets: Targets, commands: Commands) -> Case:
    """Check, or generate with, a model directory in which one file is damaged. Damaged weights must be refused."""
    original = random.choice((targets.model,) * 5 + (targets.adapter,))
    with targets.fresh(original) as copy:
        path = None
        if random.random() < 0.3 and original == targets.model:
            done, path = mutate_model(copy, random)
        else:
            done, path = _damage_one(copy, random)
        weights = path.suffix == ".safetensors"
        if original == targets.model and random.random() < 0.6:
            settings = (f"model.path={copy}", "model.weights=load", *(f"task.{k}={v}" for k, v in SMALL_DATA.items()))
            outcome = commands.run("check", str(QUICKSTART), *set_all(*settings))
            must = weights and (not path.exists() or path.stat().st_size < 8)
        else:
            prompts = copy.parent / "good.jsonl"
            prompts.write_text('{"text": "cab", "max_tokens": 2}\n')
            answers = str(copy.parent / "answers.jsonl")
            outcome = commands.run("generate", str(copy), "--input", str(prompts), "--output", answers)
            must = weights
        problem = outcome.problem()
        if problem is None and must and not outcome.code:
            problem = "the damaged weights were used"
        if problem is None and must and not outcome.names(path.name, copy.name):
            problem = f"the damaged file is not named: {outcome.stderr[-300:]}"
        return Case(f"{copy.name}: {done}", problem, f"exit {outcome.code}")


def attack_run(random: Random, targets: Targets, commands: Commands) -> Case:
    """Read the directory of a run in which files are damaged or gone. Damage that is read must be named."""
    return _attack_run(random, targets, commands, random.choice(READERS))


def attack_resume(random: Random, targets: Targets, commands: Commands) -> Case:
    """Resume a run in which files are damaged or gone: the run goes on from what is good, or says what is not."""
    return _attack_run(random, targets, commands, random.choice(SLOW_READERS), seconds=180)


def _attack_run(
    random: Random, targets: Targets, commands: Commands, words: tuple[str, ...], seconds: float = SECONDS
) -> Case:
    runs = (targets.run, targets.run, targets.adapter_run, targets.sharded_run, targets.killed_run)
    original = random.choice(runs)
    with targets.fresh(original) as copy:
        damage = [_damage_one(copy, random) for _ in range(random.choice((1, 1, 1, 2)))]
        command = [word.format(run=copy) for word in words]
        read = [path for how, path in damage if _reads(command, original, copy, path) and "appended" not in how]
        outcome = commands.run(*command, seconds=seconds)
        problem = outcome.problem()
        unnamed = [path for path in read if not outcome.names(*_names(path))]
        if problem is None and unnamed and (outcome.code == 0 or len(unnamed) == len(damage)):
            problem = f"the damage of {unnamed[0].name} was read and not named: {outcome.said[-200:]!r}"
        done = " and ".join(how for how, _ in damage)
        return Case(f"{original.parent.name}: {done}, then {command[0]}", problem, f"exit {outcome.code}")


def _damage_one(directory: Path, random: Random) -> tuple[str, Path]:
    """Damage or remove one file of a directory. Return what was done, and which file."""
    files = sorted(path for path in directory.rglob("*") if path.is_file() and path.suffix != ".log")
    # Every kind of file is as likely, however many of a kind there are.
    suffix = random.choice(sorted({path.name for path in files}))
    path = random.choice([path for path in files if path.name == suffix])
    name = path.relative_to(directory)
    if random.random() < 0.1:
        path.unlink()
        return f"{name} removed", path
    data = path.read_bytes()
    if path.suffix == ".json" and random.random() < 0.5:
        try:
            changed = as_json(mutated_json(json.loads(data), random))
        except (ValueError, RecursionError):  # It was damaged before.
            changed = data
        if changed != data:
            path.write_bytes(changed)
            return f"{name} with another value", path
    changed, how = damaged(data, random)
    path.write_bytes(changed)
    return f"{name} {how}", path


def _reads(command: list[str], original: Path, run: Path, path: Path) -> bool:
    """Return whether the command must read this file of a run, so that damage to it must be noticed."""
    if not path.exists():
        return False
    newest = max((run / "checkpoints").glob("step-*"), key=lambda step: int(step.name.split("-")[1]), default=None)
    if command[0] in ("export", "resume"):
        return newest in path.parents
    # A run that was killed may leave a torn end of a segment, which nothing refers to.
    whole = original.parent.name != "killed"
    return command[0] == "rollouts" and "--export" in command and path.parent.name == "segments" and whole


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
