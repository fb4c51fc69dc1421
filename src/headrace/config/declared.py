"""The facts that losses, advantages, corrections and transports declare, read from their files without running them.

A loss or a transport imports torch, but a configuration is checked without torch. So the facts about such a part stand
in its file as plain assignments of literals: `NEEDS = ("teacher",)` beside the named function, or `needs_gpu = True` in
the named class. Built-in parts and the user's own parts are read in the same way.
"""

import ast
from collections.abc import Iterable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

from headrace.config.schema import LOSSES, AlgorithmConfig, is_reference
from headrace.errors import ConfigError
from headrace.reference import find_source, split_reference

Facts = TypeVar("Facts", bound=msgspec.Struct)
Field = Literal["proximal", "reference", "teacher", "entropy"]
"""The optional fields of `TokenInputs`."""


class LossFacts(msgspec.Struct, frozen=True):
    """The facts that a loss declares beside its `build`, in capital letters: `READS = ("clip_high",)`."""

    reads: tuple[str, ...] | None = None
    """The loss-specific keys of [algorithm] that this loss reads. None means that it may read any key."""
    needs: tuple[Field, ...] = ()
    """The optional fields of `TokenInputs` that the loss always needs."""
    needs_when: dict[Field, dict[str, Any]] = {}
    """Field -> the values of [algorithm] keys with which the loss needs this field."""
    uses_rewards: bool = True
    """Whether the loss uses advantages."""
    caps_weights: bool = False
    """Whether the loss has importance weights and limits them to `TokenInputs.weight_cap`."""

    def needed(self, algorithm: AlgorithmConfig) -> set[str]:
        """Return the optional fields of `TokenInputs` that the loss needs with this configuration."""
        chosen = {
            field
            for field, values in self.needs_when.items()
            if all(getattr(algorithm, key, None) == value for key, value in values.items())
        }
        return chosen | set(self.needs)


class AdvantageFacts(msgspec.Struct, frozen=True):
    """The facts that the file of an advantage declares: `COMPARES = ("centred",)`."""

    compares: tuple[str, ...] = ()
    """The functions of the file that compare the answers of a group with each other and need at least two answers."""


class CorrectionFacts(msgspec.Struct, frozen=True):
    """The facts that the file of the corrections declares, by the names of the corrections."""

    reads: dict[str, tuple[str, ...]] = {}
    """Correction -> the keys of [algorithm] that only this correction reads."""
    goes_by_rewards: tuple[str, ...] = ()
    caps_weights: tuple[str, ...] = ()


class TransportFacts(msgspec.Struct, frozen=True):
    """The facts that the class of a transport declares: `crosses_hosts = False`."""

    needs_gpu: bool = False
    """Whether the transport works only where the weights are on GPUs."""
    on_device: bool = False
    """Whether published weights lie in the memory of the trainer's GPU."""
    own_gpus: bool = False
    """Whether every process needs a GPU of its own, unless all of them are on CPUs."""
    crosses_hosts: bool = True
    """Whether an engine on another host can receive."""
    for_servers: bool = True
    """Whether engines that are separate servers, such as vLLM, can receive."""
    for_ranks: bool = True
    """Whether several trainer ranks can send."""
    uses_directory: bool = False
    """Whether the transport writes to `[delivery] directory`."""
    uses_keys: bool = False
    """Whether the transport encrypts with keys of the run, which are made beforehand."""
    needs_trust: bool = False
    """Whether the transport has no keys, so that beyond loopback it needs `[cluster] trusted_network`."""


class Needs(NamedTuple):
    """What a configured loss needs from the trainer, beside the policy's log-probabilities."""

    proximal: bool = False
    reference: bool = False
    teacher: bool = False
    entropy: Literal["none", "value", "gradient"] = "none"
    top_k: int = 0
    """The number of the teacher's likeliest tokens; 0 if only the sampled tokens are compared."""


def needs(algorithm: AlgorithmConfig) -> Needs:
    """Return which optional fields of `TokenInputs` are needed, by the loss and by the terms that are added to it."""
    fields = loss_facts(algorithm.loss).needed(algorithm)
    weight = algorithm.entropy_weight
    bonus = weight or algorithm.entropy_target is not None
    teacher = "teacher" in fields or algorithm.teacher_weight is not None
    return Needs(
        proximal="proximal" in fields,
        reference="reference" in fields or (algorithm.kl, algorithm.reward_kl) != ("none", "none"),
        teacher=teacher,
        entropy="gradient" if "entropy" in fields or bonus else "none" if weight is None else "value",
        top_k=algorithm.teacher_top_k if teacher and algorithm.teacher_divergence != "sampled" else 0,
    )


def loss_facts(name: str) -> LossFacts:
    """Return the facts that the loss of this name or reference declares."""
    if is_reference(name):
        return read_facts(name, LossFacts)
    facts = read_facts(f"headrace.algorithms.losses.policy.{name}:build", LossFacts)
    return msgspec.structs.replace(facts, reads=facts.reads or ())


def losses_that_read(key: str) -> list[str]:
    """Return the built-in losses that read this key of [algorithm]. A key that is not a loss's key has none."""
    return [name for name in LOSSES if key in (loss_facts(name).reads or ())]


def compares_answers(advantage: str) -> bool:
    """Return whether the advantage of this name or reference compares the answers of a group with each other."""
    reference = advantage if is_reference(advantage) else f"headrace.algorithms.advantages:{advantage}"
    return split_reference(reference)[1] in read_facts(reference, AdvantageFacts).compares


def transport_facts(name: str) -> TransportFacts:
    """Return the facts that this transport declares. "auto" declares none: it chooses a transport that fits."""
    if name == "auto":
        return TransportFacts()
    return read_facts(name if is_reference(name) else f"headrace.delivery.transports.{name}:Transport", TransportFacts)


def correction_facts() -> CorrectionFacts:
    """Return the facts that the corrections declare."""
    return read_facts("headrace.algorithms.losses.base:READS", CorrectionFacts)


def read_facts(reference: str, kind: type[Facts]) -> Facts:
    """Read the facts that the file behind a reference declares. None of the user's code is run.

    Raises `ConfigError` if the file or the attribute does not exist, or if a declaration has the wrong type.
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
    # Module-level facts are written like constants, in capital letters.
    found = _literals(named[-1].body) if named else {key.lower(): value for key, value in _literals(body).items()}
    try:
        return msgspec.convert({key: found[key] for key in kind.__struct_fields__ if key in found}, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{reference!r}: what {where} declares is wrong: {error}") from error


@lru_cache(maxsize=64)
def _parsed(path: Path, changed: int) -> ast.Module:
    """Parse a file. The result is cached by path and modification time."""
    try:
        return ast.parse(path.read_text())
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{path.name} is not Python: {error}") from error


def _defined(node: ast.stmt) -> Iterable[str]:
    """Return the names that a module's statement defines. Names in a block count as defined."""
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            return [(each.asname or each.name).partition(".")[0] for each in names]
    return [each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)]


def _literals(body: Iterable[ast.stmt]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for node in body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                pass
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                pass
            case _:
                continue
        with suppress(ValueError):  # Not a literal, so not a declaration.
            found[name] = ast.literal_eval(value)
    return found
