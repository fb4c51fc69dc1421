"""The audit compares recorded log-probabilities with those that the checkpoints of the tagged versions give.

Every sampled token of a chosen rollout is either compared, or counted as not checkable with a reason. The weights come
from a checkpoint (or, before the first step, from the model directory), and no engine takes part. Their digest is
compared with the digest under which the version was published. An audit passes only if something was compared and
nothing is wrong.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.buffer.reader import JournalReader, open_readonly
from headrace.config import Config
from headrace.config.hub import model_dir
from headrace.errors import HeadraceError
from headrace.observe.records import DeliveryRecord, RolloutRecord, VersionRecord
from headrace.observe.summary import aligned, lag_mean_and_max
from headrace.run_dir import RunDir
from headrace.training.checkpoints.base import by_version
from headrace.training.checkpoints.remote_store import fetch_missing
from headrace.types import NO_VERSION, Float32Array, Int32Array, Kept, Rollout, Trace, without_republished

NO_CHECKPOINT = "their version has no checkpoint"
KEPT_CACHE = 'sampled after a swap with [engine] kv = "keep"'
CHANGED_MODEL = "the model directory is not what was published"
HINT = "keep more checkpoints: [training] checkpoint_every = 1 and a larger keep_checkpoints"
HIDDEN = "0" * 16
"""The live digest of an engine that cannot show its live weights."""
_SHOWN_PROBLEMS = 20


class Weights(Protocol):
    """One version's weights, ready to score (`recompute.PlainModel`, which needs torch)."""

    @property
    def digest(self) -> int:
        """The digest of the weights, as a delivery proves it."""

    def logprobs(self, token_ids: Int32Array, temperature: Float32Array, kept: Kept | None = None) -> Float32Array:
        """Return the log-probabilities of tokens 1..n given their prefix ([n - 1]), each among its kept set.

        `temperature` has the temperature of each of these tokens.
        """


Load = Callable[[Path, str], Weights]
"""A function that loads weights from a model directory, in a dtype."""


class VersionAudit(msgspec.Struct, kw_only=True):
    """The findings about one version that sampled tokens of the chosen rollouts."""

    version: int
    weights: str | None = None
    """The checkpoint or model directory that the version's tokens were compared with."""
    tokens: int = 0
    """The number of compared tokens."""
    mean_error: float | None = None
    """The mean absolute error of a log-probability."""
    max_error: float | None = None
    lag_mean: float | None = None
    lag_max: int | None = None
    """The largest lag of the version's trained tokens, whether they were compared or not."""
    published_digest: str | None = None
    accepted: int = 0
    """The number of engines that proved the version."""
    rejected: int = 0
    canary_error: float | None = None
    """The largest canary error among the proofs."""


class Audit(msgspec.Struct, kw_only=True):
    """The findings of a whole audit."""

    recorded: int
    """The number of rollouts with kept tokens."""
    checkable: int
    """The number of those rollouts that hold tokens of a version whose weights are known."""
    drawn: int
    tolerance: float
    versions: list[VersionAudit] = []
    not_checkable: dict[str, int] = {}
    """Reason -> the number of sampled tokens in the chosen rollouts that could not be checked for it."""
    problems: list[str] = []

    def skip(self, reason: str, tokens: int) -> None:
        """Count tokens that could not be compared."""
        if tokens:
            self.not_checkable[reason] = self.not_checkable.get(reason, 0) + tokens

    @property
    def compared(self) -> int:
        """The number of compared tokens."""
        return sum(entry.tokens for entry in self.versions)

    @property
    def passed(self) -> bool:
        """Whether something was compared and nothing is wrong."""
        return bool(self.compared) and not self.problems

    def as_dict(self) -> dict[str, Any]:
        """Return the findings for programs."""
        return {**msgspec.to_builtins(self), "tokens_compared": self.compared, "passed": self.passed}


class _Stretch(msgspec.Struct, frozen=True):
    """The tokens of one trace that one version sampled."""

    rollout: str
    number: int
    trace: Trace
    where: npt.NDArray[np.intp]
    lag: int | None
    first: bool
    """Whether no other version sampled tokens of the trace before."""


def audit(run_dir: Path, load: Load, *, samples: int = 64, seed: int = 0, tolerance: float = 1e-3) -> Audit:
    """Choose recorded rollouts at random and check every token that can be checked, one version at a time."""
    paths, config = RunDir.open(run_dir)
    stretches: dict[int, list[_Stretch]] = {}
    with open_readonly(paths.journal) as journal:
        published = {version.id: version for version in journal.versions()}
        proofs: dict[int, list[DeliveryRecord]] = {}
        for delivery in sorted(journal.deliveries(), key=lambda delivery: (delivery.engine, delivery.time)):
            proofs.setdefault(delivery.version, []).append(delivery)
        fetch_missing(config, paths.checkpoints)
        sources = _sources(paths, config, published)
        everything, checkable = journal.kept_ids(), journal.kept_ids(sources)
        # If there is no rollout with tokens of a version whose weights are known, all rollouts may be chosen.
        population = checkable or everything
        chosen = sorted(random.Random(seed).sample(range(len(population)), min(samples, len(population))))
        drawn = [record for index in chosen for record in journal.rollout_records("id = ?", population[index])]
        report = Audit(recorded=len(everything), checkable=len(checkable), drawn=len(drawn), tolerance=tolerance)
        again = journal.republished()
        unrecorded = journal.meta().get("temperature", config.rollouts.temperature)
        for record in drawn:
            for version, stretch in _stretches(journal, record, report, again):
                stretches.setdefault(version, []).append(stretch)
    kept = config.engine.kv == "keep" and config.engine.interrupt == "never"
    for version, found in sorted(stretches.items()):
        entry = _proofs(version, published.get(version), proofs.get(version, []), report)
        report.versions.append(entry)
        lags = Counter[int]()
        for part in found:
            if part.lag is not None:
                lags[part.lag] += int(part.trace.trained[part.where].sum())
        entry.lag_mean, entry.lag_max = lag_mean_and_max(lags)
        if kept:
            report.skip(KEPT_CACHE, sum(len(part.where) for part in found if not part.first))
            found = [part for part in found if part.first]
        _check(entry, found, sources.get(version), config, load, report, unrecorded=unrecorded)
    return report


def _sources(paths: RunDir, config: Config, published: dict[int, VersionRecord]) -> dict[int, Path]:
    """Return where the weights of each version are: a checkpoint, or the model directory before the first step."""
    found = by_version(paths.checkpoints)
    whole = config.model.weights == "load" and config.lora is None
    if whole and not config.warm_start.steps and model_dir(config.model).is_dir():
        untrained = [version.id for version in published.values() if not version.step and version.id not in found]
        found |= dict.fromkeys(untrained, model_dir(config.model))
    return found


def _stretches(
    journal: JournalReader, record: RolloutRecord, report: Audit, again: Sequence[int]
) -> Iterator[tuple[int, _Stretch]]:
    """Yield a rollout's sampled tokens by version. A record that is unreadable or unlike its row is a problem."""
    try:
        rollout = journal.tokens(record)
    except HeadraceError as error:
        report.problems.append(f"rollout {record.id}: {error}")
        return
    assert rollout is not None
    if not _same(record, rollout):
        report.problems.append(f"rollout {record.id}: its tokens are not those that its row in the journal counts")
    trained = None if record.trained_as is None else without_republished(record.trained_as, again)
    for number, trace in enumerate(rollout.traces):
        sampled = trace.versions[trace.versions != NO_VERSION]
        for version in np.unique(sampled).tolist():
            where = np.flatnonzero(trace.versions == version)
            lag = None if trained is None else int(trained - without_republished(version, again))
            yield version, _Stretch(record.id, number, trace, where, lag, version == sampled[0])


def _same(record: RolloutRecord, rollout: Rollout) -> bool:
    sampled = [version for trace in rollout.traces for version in trace.versions[trace.trained].tolist()]
    counted = (record.id, record.sampled_tokens, record.oldest_version, record.newest_version)
    return counted == (rollout.id, len(sampled), min(sampled, default=None), max(sampled, default=None))


def _proofs(
    version: int, published: VersionRecord | None, deliveries: list[DeliveryRecord], report: Audit
) -> VersionAudit:
    """Return what the engines proved about a version that sampled tokens."""
    if published is None:
        report.problems.append(f"version {version} has sampled tokens but was never published")
        return VersionAudit(version=version)
    proved = [proof for proof in deliveries if proof.proved]
    if not proved:
        report.problems.append(f"version {version} has sampled tokens but no engine has proved it")
    for proof in proved:
        # A server that packs its weights shows no live ones to digest. Only the canary proves them.
        if {proof.staged_digest, proof.live_digest} - {HIDDEN} != {published.digest}:
            report.problems.append(f"{proof.engine} accepted version {version} with another digest than published")
    return VersionAudit(
        version=version,
        published_digest=published.digest,
        accepted=len(proved),
        rejected=len(deliveries) - len(proved),
        canary_error=max((proof.canary_error for proof in proved), default=None),
    )


def _check(
    entry: VersionAudit,
    found: list[_Stretch],
    source: Path | None,
    config: Config,
    load: Load,
    report: Audit,
    *,
    unrecorded: float,
) -> None:
    tokens = sum(len(part.where) for part in found)
    if source is None:
        report.skip(NO_CHECKPOINT, tokens)
        return
    if not tokens:
        return
    weights = load(source, config.model.dtype)
    # The model directory may have changed since the run; a checkpoint may not.
    checkpoint = source != model_dir(config.model)
    digest = f"{weights.digest:016x}"
    if digest != entry.published_digest:
        if not checkpoint:
            report.skip(CHANGED_MODEL, tokens)
            return
        if entry.published_digest:
            report.problems.append(
                f"{source}: its weights have digest {digest}, but version {entry.version} was published as "
                f"{entry.published_digest}"
            )
    entry.weights = source.name if checkpoint else str(source)
    every: list[npt.NDArray[np.float64]] = []
    for part in found:
        trace = part.trace
        temperature = trace.temperature_of_tokens(unrecorded)[1:].astype(np.float32)
        reference = weights.logprobs(trace.token_ids, temperature, trace.kept)
        every.append(_compare(entry, part, reference, report))
    errors = np.concatenate(every)
    entry.tokens, entry.mean_error, entry.max_error = len(errors), float(errors.mean()), float(errors.max())


def _compare(entry: VersionAudit, part: _Stretch, reference: Float32Array, report: Audit) -> npt.NDArray[np.float64]:
    """Return the errors of one stretch. A rollout is reported once, with its worst token."""
    errors = np.abs(part.trace.logprobs[part.where].astype(np.float64) - reference[part.where - 1])
    errors[~np.isfinite(errors)] = np.inf
    worst = int(errors.argmax())
    if errors[worst] > report.tolerance:
        place = int(part.where[worst])
        report.problems.append(
            f"rollout {part.rollout}: token {place} of trace {part.number}, sampled by version {entry.version}, is "
            f"recorded with {part.trace.logprobs[place]:.6f}, but its checkpoint gives {reference[place - 1]:.6f} "
            f"(error {errors[worst]:.2g}; {int((errors > report.tolerance).sum())} of {len(errors)} tokens over "
            f"{report.tolerance:g})"
        )
    return errors


def describe_audit(found: Audit) -> str:
    """Describe the findings for people: a line for each version, what could not be checked, and the verdict."""
    lines = [
        f"{found.recorded:,} rollouts recorded, {found.checkable:,} with tokens of a version whose weights are kept, "
        f"{found.drawn:,} drawn",
        *_table(found.versions),
    ]
    lines += [f"not checkable: {tokens:,} tokens, {reason}" for reason, tokens in found.not_checkable.items()]
    if found.checkable < found.recorded:
        lines.append(f"to check more, {HINT}")
    if found.problems:
        lines += ["FAILED:", *(f"  {problem}" for problem in found.problems[:_SHOWN_PROBLEMS])]
        if len(found.problems) > _SHOWN_PROBLEMS:
            lines.append(f"  and {len(found.problems) - _SHOWN_PROBLEMS} more")
    elif found.compared:
        lines.append(f"passed: {found.compared:,} tokens, no error over {found.tolerance:g}")
    else:
        lines.append("nothing was compared")
    return "\n".join(lines)


def _table(versions: list[VersionAudit]) -> list[str]:
    lines = [["version", "weights", "tokens", "mean error", "max error", "lag mean", "max", "proofs", "canary error"]]
    for entry in versions:
        proofs = f"{entry.accepted} accepted" + (f", {entry.rejected} rejected" if entry.rejected else "")
        line = [str(entry.version), entry.weights or "none", f"{entry.tokens:,}"]
        line += [_number(entry.mean_error, ".2g"), _number(entry.max_error, ".2g"), _number(entry.lag_mean, ".2f")]
        lines.append([*line, _number(entry.lag_max, "d"), proofs, _number(entry.canary_error, ".2g")])
    return aligned(lines)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"
