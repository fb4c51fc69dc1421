"""Checks of [algorithm]: its keys against each other, and against what its loss, advantage and corrections declare.

A loss, an advantage or a correction declares facts about itself in its own file (see `headrace.config.declared`). The
file of a user's own loss or advantage is read only when a run is checked or started. So a run directory can be examined
on a machine that does not have the file.
"""

from __future__ import annotations

from headrace.config.declared import (
    LossFacts,
    compares_answers,
    correction_facts,
    loss_facts,
    loss_names,
    losses_that_read,
)
from headrace.config.names import is_reference
from headrace.config.schema import AlgorithmConfig, RolloutsConfig
from headrace.errors import ConfigError


def check_algorithm(algorithm: AlgorithmConfig, rollouts: RolloutsConfig) -> None:
    """Raise `ConfigError` if values contradict each other.

    A loss or an advantage of the user is left to `check_references`.
    """
    if algorithm.proximal == "recomputed" and algorithm.proximal_mix is not None:
        raise ConfigError("[algorithm] proximal_mix: a proximal policy that is recomputed has no mix (remove one)")
    for name in ("icepop", "mis"):
        low, high = getattr(algorithm, f"{name}_low"), getattr(algorithm, f"{name}_high")
        if low > high:
            raise ConfigError(f"[algorithm] {name}_low: {low} is above {name}_high {high}")
    buffer, longest = algorithm.overlong_buffer, rollouts.max_tokens
    if buffer > longest:
        raise ConfigError(f"[algorithm] overlong_buffer: {buffer} is above [rollouts] max_tokens {longest}")
    if not is_reference(algorithm.loss):
        if not is_reference(algorithm.advantage):
            check_group(algorithm, rollouts)
        check_loss(algorithm, loss_facts(algorithm.loss))
    _check_ignored(algorithm)


def check_references(algorithm: AlgorithmConfig, rollouts: RolloutsConfig) -> None:
    """Raise `ConfigError` if values contradict what the user's own loss or advantage declares. This reads their files.

    Nothing is checked here if both are built in.
    """
    if is_reference(algorithm.loss):
        check_loss(algorithm, loss_facts(algorithm.loss))
    if is_reference(algorithm.loss) or is_reference(algorithm.advantage):
        check_group(algorithm, rollouts)


def check_group(algorithm: AlgorithmConfig, rollouts: RolloutsConfig) -> None:
    """Raise `ConfigError` if an advantage that compares answers has only one, unless the loss uses no advantages."""
    if rollouts.group_size < 2 and loss_facts(algorithm.loss).uses_rewards and compares_answers(algorithm.advantage):
        raise ConfigError(
            f"[rollouts] group_size: advantage {algorithm.advantage!r} compares answers and needs at least 2"
        )


def check_loss(algorithm: AlgorithmConfig, facts: LossFacts) -> None:
    """Raise `ConfigError` if the loss contradicts the teacher, the corrections, or a key that is not at its default."""
    loss, corrections = algorithm.loss, correction_facts()
    learns = "teacher" in facts.needed(algorithm)
    if learns and algorithm.teacher is None:
        raise ConfigError(f"[algorithm] teacher: loss {loss!r} needs the directory of a model to learn from")
    for name in algorithm.corrections:
        if name in corrections.goes_by_rewards and not facts.uses_rewards:
            raise ConfigError(f"[algorithm] corrections: {name!r} goes by rewards, which loss {loss!r} does not")
        if name in corrections.bounds_ratios and not facts.uses_ratios:
            raise ConfigError(
                f"[algorithm] corrections: {name!r} bounds ratios, and loss {loss!r} has none (take 'cispo')"
            )
    if algorithm.teacher is not None and not learns:
        learners = " or ".join(repr(name) for name in loss_names() if "teacher" in loss_facts(name).needs)
        raise ConfigError(f"[algorithm] teacher: only loss {learners} learns from one")
    for key in _changed(algorithm):
        if facts.reads is not None and key not in facts.reads and (readers := losses_that_read(key)):
            raise ConfigError(f"[algorithm] {key}: loss {loss!r} does not look at it (only {', '.join(readers)})")


def _check_ignored(algorithm: AlgorithmConfig) -> None:
    """Raise `ConfigError` if a key was changed from its default but no correction or addition reads it."""
    changed = _changed(algorithm)
    for correction, keys in correction_facts().reads.items():
        for key in changed:
            if key in keys and correction not in algorithm.corrections:
                raise ConfigError(f"[algorithm] {key}: only {correction!r} looks at it, which is not in corrections")
    if "kl_weight" in changed and algorithm.kl == "none":
        raise ConfigError("[algorithm] kl_weight: kl is 'none', so nothing has this weight (set kl)")
    if "overlong_penalty" in changed and not algorithm.overlong_buffer:
        raise ConfigError("[algorithm] overlong_penalty: overlong_buffer is 0, so no answer is punished (set it)")


def _changed(algorithm: AlgorithmConfig) -> list[str]:
    """Return the keys that are not at their defaults."""
    default = AlgorithmConfig()
    return sorted(key for key in AlgorithmConfig.__struct_fields__ if getattr(algorithm, key) != getattr(default, key))
