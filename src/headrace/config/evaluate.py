"""The section `[evaluate]`, and the further held-out sets, `[evaluate.sets.NAME]`."""

import re

from headrace.config.base import Fraction, NonNegative, NonNegativeFloat, Positive, PositiveFloat, Section, Share
from headrace.errors import ConfigError


class MeasuredSection(Section, frozen=True):
    """Keys that say how often held-out prompts are answered, and which figures follow from the answers."""

    samples: Positive = 1
    """The number of answers per prompt, for pass@k. They differ only at a temperature above 0."""
    temperature: NonNegativeFloat = 0.0
    """The sampling temperature of evaluations. 0 is greedy."""
    pass_at: list[Positive] = []
    """The numbers k for which pass@k is estimated, without bias, from `samples` answers: the chance that at least one
    of k answers is right. pass@1 and pass@`samples` are always there."""
    majority_at: list[Positive] = []
    """The numbers k for which majority@k is estimated: how often the most frequent of k answers is right."""
    answer_pattern: str = ""
    """A regular expression that finds what an answer votes for in majority@k: the first group of its last match, or
    else the whole match. By default the whole answer. An answer without a match does not vote."""


class EvaluationSetConfig(MeasuredSection, frozen=True, kw_only=True):
    """[evaluate.sets.NAME]: a further set of held-out prompts, with sampling of its own."""

    path: str
    """A file of rows, or a dataset on the hub, as in `[task] path`. No row may be one of the training prompts."""
    revision: str = ""
    """The branch, tag or commit of a dataset on the hub, as in `[task] revision`."""
    subset: str | None = None
    """The subset (configuration) of a dataset on the hub. By default the only one."""
    split: str = "test"
    """The split of a dataset on the hub."""
    fields: dict[str, str] = {}
    """The fields of a row under other names, as in `[task] fields`."""
    task: str = ""
    """The task whose reward judges the answers, if the run has several."""
    prompts: Positive | None = None
    """The number of prompts, from the first row on. By default all."""
    max_tokens: Positive | None = None
    """The most tokens of an answer. By default `[rollouts] max_tokens`."""
    top_k: NonNegative = 0
    """Sample among this many of the likeliest tokens; 0 samples among all."""
    top_p: Share = 1.0
    """Sample among the likeliest tokens that together have this probability."""
    min_p: Fraction = 0.0
    """Exclude tokens whose probability is below this share of the likeliest token's probability."""


class EvaluateConfig(MeasuredSection, frozen=True):
    """[evaluate]: evaluation on held-out prompts, before, during and after training."""

    every: NonNegative = 0
    """The number of versions between evaluations during the run. 0 evaluates only before and after."""
    prompts: NonNegative | None = None
    """The number of held-out prompts, which are never trained on. 0 switches evaluation off. By default all prompts of
    a held-out file, if there is one."""
    during: NonNegative = 0
    """The number of prompts of each set, also of the main one, in an evaluation during the run. 0 takes all."""
    deadline: PositiveFloat = 600.0
    """Seconds that an evaluation during the run may take; then it is given up, which is printed and recorded. Meanwhile
    the engines that answer it take no new version: a quarter of all engines, rounded up. With `[buffer] depth = 0` all
    engines answer, and there is no limit."""
    sets: dict[str, EvaluationSetConfig] = {}
    """Further sets of held-out prompts, by name, each in a section `[evaluate.sets.NAME]`."""

    @property
    def longest_hold(self) -> float:
        """The seconds for which an engine may take no new version because it answers held-out prompts."""
        return self.deadline if self.every else 0.0


def check_measures(place: str, measured: MeasuredSection) -> None:
    """Raise `ConfigError` if a figure needs more answers than are sampled, or the pattern is wrong."""
    for key in ("pass_at", "majority_at"):
        if (most := max(getattr(measured, key), default=0)) > measured.samples:
            raise ConfigError(f"[{place}] {key}: {most} answers are needed, and samples = {measured.samples}")
    try:
        re.compile(measured.answer_pattern)
    except re.error as error:
        shown = f"{measured.answer_pattern!r} is not a regular expression: {error}"
        raise ConfigError(f"[{place}] answer_pattern: {shown}") from error
