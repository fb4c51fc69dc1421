"""The findings of an audit, as data and as text.

An audit passes only if something was compared and nothing is wrong.
"""

from __future__ import annotations

from typing import Any

import msgspec

HINT = "keep more checkpoints: [training] checkpoint_every = 1 and a larger keep_checkpoints"
_SHOWN_PROBLEMS = 20


class VersionAudit(msgspec.Struct, kw_only=True):
    """The findings about one version that sampled tokens of the chosen rollouts."""

    version: int
    weights: str | None = None
    """The checkpoint or model directory that the version's tokens were compared with."""
    tokens: int = 0
    """The number of compared tokens."""
    mean_error: float | None = None
    max_error: float | None = None
    """The largest absolute error of a log-probability."""
    lag_mean: float | None = None
    lag_max: int | None = None
    """The largest lag of the version's trained tokens, whether they were compared or not."""
    published_digest: str | None = None
    accepted: int = 0
    """The number of engines that proved the version."""
    rejected: int = 0
    canary_error: float | None = None
    """The largest canary error among the proofs."""

    def add(self, errors: list[float]) -> None:
        """Add the errors of further compared tokens."""
        total = (self.mean_error or 0.0) * self.tokens + sum(errors)
        self.tokens += len(errors)
        self.mean_error = total / self.tokens
        self.max_error = max(self.max_error or 0.0, *errors)


class Audit(msgspec.Struct, kw_only=True):
    """The findings of a whole audit."""

    recorded: int
    """The number of rollouts with kept tokens."""
    checkable: int
    """The number of those rollouts that hold tokens of a version whose weights are known."""
    drawn: int
    tolerance: float = 0.0
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
        more = len(found.problems) - _SHOWN_PROBLEMS
        return "\n".join(
            [*lines, "FAILED:", *(f"  {problem}" for problem in found.problems[:_SHOWN_PROBLEMS])]
            + ([f"  and {more} more"] if more > 0 else [])
        )
    if not found.compared:
        return "\n".join([*lines, "nothing was compared"])
    return "\n".join([*lines, f"passed: {found.compared:,} tokens, no error over {found.tolerance:g}"])


def _table(versions: list[VersionAudit]) -> list[str]:
    lines = [["version", "weights", "tokens", "mean error", "max error", "lag mean", "max", "proofs", "canary error"]]
    for entry in versions:
        proofs = f"{entry.accepted} accepted" + (f", {entry.rejected} rejected" if entry.rejected else "")
        lines.append(
            [
                *(str(entry.version), entry.weights or "none", f"{entry.tokens:,}"),
                *(_number(entry.mean_error, ".2g"), _number(entry.max_error, ".2g"), _number(entry.lag_mean, ".2f")),
                *(_number(entry.lag_max, "d"), proofs, _number(entry.canary_error, ".2g")),
            ]
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"
