"""What the parts that a configuration names declare about themselves, read from their files without running them.

A loss or a transport imports torch, and a configuration is checked without torch. So what others must know about such a
part stands in its file as plain assignments of literals: `NEEDS = ("teacher",)` beside the function that is named, or
`needs_gpu = True` in the class that is named. Built-in parts and the user's own are read in the same way.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

from headrace.config.names import is_reference
from headrace.config.schema import POLICY_LOSSES, AlgorithmConfig
from headrace.errors import ConfigError
from headrace.reference import find_source, split_reference

CORRECTIONS = "headrace.algorithms.losses.corrections:READS"

Facts = TypeVar("Facts", bound=msgspec.Struct)
Field = Literal["proximal", "reference", "teacher", "entropy"]
"""The optional fields of `TokenInputs`."""


class LossFacts(msgspec.Struct, frozen=True):
    """What a loss declares beside its `build`, in capital letters: `READS = ("clip_high",)`."""

    reads: tuple[str, ...] | None = None
    """Keys of [algorithm] that only some losses read and that this one does; None: it may read any."""
    needs: tuple[Field, ...] = ()
    """Optional fields of `TokenInputs` that it must be given."""
    needs_when: dict[Field, dict[str, Any]] = {}
    """Fields that it must be given where keys of [algorithm] have these values."""
    uses_rewards: bool = True
    """Whether it looks at advantages."""
    uses_ratios: bool = True
    """Whether it looks at importance ratios."""

    def needed(self, algorithm: AlgorithmConfig) -> set[str]:
        """The optional fields of `TokenInputs` that it must be given with this configuration."""
        chosen = {
            field
            for field, values in self.needs_when.items()
            if all(getattr(algorithm, key, None) == value for key, value in values.items())
        }
        return chosen | set(self.needs)


class AdvantageFacts(msgspec.Struct, frozen=True):
    """What the file of an advantage declares: `COMPARES = ("centred",)`."""

    compares: tuple[str, ...] = ()
    """Functions of the file that compare the answers of a group with each other and need at least two."""


class CorrectionFacts(msgspec.Struct, frozen=True):
    """What the file of the corrections declares, by their names."""

    reads: dict[str, tuple[str, ...]] = {}
    """Keys of [algorithm] that only this correction reads."""
    goes_by_rewards: tuple[str, ...] = ()
    bounds_ratios: tuple[str, ...] = ()


class TransportFacts(msgspec.Struct, frozen=True):
    """What the class of a transport declares: `crosses_hosts = False`."""

    needs_gpu: bool = False
    """Whether it works only where weights are on GPUs."""
    on_device: bool = False
    """Whether what is published lies in the memory of the trainer's GPU."""
    crosses_hosts: bool = True
    """Whether an engine on another host can receive."""
    for_servers: bool = True
    """Whether engines that are servers of their own, such as vLLM, can receive."""
    for_ranks: bool = True
    """Whether several ranks of a trainer can send."""
    uses_directory: bool = False
    """Whether it writes to `[delivery] directory`."""
    uses_keys: bool = False
    """Whether it encrypts with keys of the run, which are made beforehand."""


class Needs(NamedTuple):
    """What a configured loss asks the trainer for, beside the policy's log-probabilities."""

    proximal: bool = False
    reference: bool = False
    teacher: bool = False
    entropy: Literal["none", "value", "gradient"] = "none"


def needs(algorithm: AlgorithmConfig) -> Needs:
    """Which of the optional fields of `TokenInputs` must be there: for the loss, and for what is added to it."""
    fields = loss_facts(algorithm.loss).needed(algorithm)
    weight = algorithm.entropy_weight
    return Needs(
        proximal="proximal" in fields,
        reference="reference" in fields or algorithm.kl != "none",
        teacher="teacher" in fields,
        entropy="gradient" if "entropy" in fields or weight else "none" if weight is None else "value",
    )


def loss_names() -> list[str]:
    """The built-in losses: the files of their folder."""
    return sorted(path.stem for path in POLICY_LOSSES.glob("[!_]*.py"))


def loss_facts(name: str) -> LossFacts:
    """What the loss of this name or reference declares."""
    if is_reference(name):
        return read_facts(name, LossFacts)
    facts = read_facts(f"headrace.algorithms.losses.policy.{name}:build", LossFacts)
    return msgspec.structs.replace(facts, reads=facts.reads or ())


def losses_that_read(key: str) -> list[str]:
    """The built-in losses that read this key of [algorithm]; none where the key is not a loss's."""
    return [name for name in loss_names() if key in (loss_facts(name).reads or ())]


def compares_answers(advantage: str) -> bool:
    """Whether the advantage of this name or reference compares the answers of a group with each other."""
    reference = advantage if is_reference(advantage) else f"headrace.algorithms.advantages:{advantage}"
    return split_reference(reference)[1] in read_facts(reference, AdvantageFacts).compares


def transport_facts(name: str) -> TransportFacts:
    """What the transport of this name or reference declares; "auto" takes one that fits, and says nothing itself."""
    if name == "auto":
        return TransportFacts()
    return read_facts(name if is_reference(name) else f"headrace.delivery.transports.{name}:Transport", TransportFacts)


def correction_facts() -> CorrectionFacts:
    """What the corrections declare."""
    return read_facts(CORRECTIONS, CorrectionFacts)


def read_facts(reference: str, kind: type[Facts]) -> Facts:
    """What stands in the file behind a reference, as this kind of facts; nothing of the user's is run.

    Raises `ConfigError` where the file or the attribute is not there, or a declaration is of the wrong type.
    """
    where, attribute = split_reference(reference)
    source = find_source(where)
    if source is None:
        return kind()
    body = _parsed(source, source.stat().st_mtime_ns).body
    first, *inner = attribute.split(".")
    if not {first, "*"} & {name for node in body for name in _defined(node)}:
        raise ConfigError(f"{reference!r}: {where} has no {attribute!r}")
    named = [node for node in body if isinstance(node, ast.ClassDef) and node.name == first and not inner]
    # In a module they are written as constants are, in capital letters.
    found = _literals(named[-1].body) if named else {key.lower(): value for key, value in _literals(body).items()}
    try:
        return msgspec.convert({key: found[key] for key in kind.__struct_fields__ if key in found}, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{reference!r}: what {where} declares is wrong: {error}") from error


@lru_cache(maxsize=64)
def _parsed(path: Path, changed: int) -> ast.Module:
    """The source of a file as it was when it was last changed."""
    try:
        return ast.parse(path.read_text())
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{path.name} is not Python: {error}") from error


def _defined(node: ast.stmt) -> Iterable[str]:
    """The names that a statement of a module defines; what stands in a block is taken to be defined."""
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            return [(each.asname or each.name).partition(".")[0] for each in names]
    return [each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)]


def _literals(body: Iterable[ast.stmt]) -> dict[str, Any]:
    """The plain assignments of literals among these statements."""
    found: dict[str, Any] = {}
    for node in body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                pass
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                pass
            case _:
                continue
        with suppress(ValueError):  # Not a literal: no declaration.
            found[name] = ast.literal_eval(value)
    return found
