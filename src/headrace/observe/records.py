"""The rows of journal.db as plain data. The journal's reader returns them, and reports are drawn from them.

The fields of a record are the columns of its table (`buffer/schema.sql`), in the order in which users see them.
"""

import msgspec


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """An optimizer step (table `steps`)."""

    step: int
    version: int
    """The version that was being trained."""
    objective: str
    groups: int
    rollouts: int
    tokens: int
    trained_tokens: int
    reward_mean: float | None = None
    loss: float | None = None
    grad_norm: float | None = None
    learning_rate: float | None = None
    seconds: float | None = None
    ended: float | None = None


class VersionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Published weights (table `versions`)."""

    id: int
    step: int
    """The number of optimizer steps behind these weights."""
    digest: str
    """The digest of the weights, as 16 hexadecimal digits."""
    published: float


class DeliveryRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One engine's proof of one version (table `deliveries`)."""

    version: int
    engine: str
    accepted: bool
    quarantined: bool = False
    reason: str = ""
    staged_digest: str = ""
    """The digest of the weights before they became live, as 16 hexadecimal digits."""
    live_digest: str = ""
    canary_error: float = 0.0
    stage_seconds: float = 0.0
    swap_seconds: float = 0.0
    time: float

    @property
    def proved(self) -> bool:
        """Whether the engine serves this version from now on."""
        return self.accepted and not self.quarantined


ENGINES = "engines"
"""The key under which the journal has the ranks of the engines that a run was scaled to."""
STRETCHES = "train_stretches"
"""The key under which the journal has the beginnings and ends of training in the processes before the last one."""
SKIPPED_EVALUATION = "evaluation skipped "
"""The beginning of a key of table `meta` whose value is an evaluation that was due and has no result."""


ADVICE = "advice "
"""The beginning of a key of table `meta` whose value is advice: its cause, its line, and the last step before it."""


class EvaluationRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Held-out prompts answered under one version (table `evaluations`)."""

    version: int
    moment: str
    """When the evaluation ran: `before`, `during` or `after` training."""
    prompts: int
    samples: int
    pass_1: float
    pass_k: float
    reward_mean: float
    tokens_mean: float
    started: float
    ended: float
    versions: str = "{}"
    """The sampled tokens by version, as JSON: `{"15": 636}`. There is one entry, for `version`."""
    tasks: str = "{}"
    """The figures of each task as JSON, by name, if the run has several: `{"math": {"prompts": 20, "pass_1": 0.5,
    ...}}`."""
    passes: str = "{}"
    """pass@k and majority@k as JSON, for the numbers k that the configuration names: `{"pass_at_4": 0.7,
    "majority_at_4": 0.6}`."""
    sets: str = "{}"
    """The figures of each `[evaluate.sets.NAME]` as JSON, by name: `{"hard": {"prompts": 20, "pass_1": 0.5, ...}}`."""


class SampleRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A held-out answer to read (table `samples`)."""

    version: int
    moment: str
    prompt: str
    question: str
    answer: str
    reward: float | None


class RolloutRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout without its tokens (table `rollouts`)."""

    id: str
    group_id: int
    prompt: str | None
    """The id of its group's prompt."""
    task: str | None
    """The name of the prompt's task if the run has several tasks."""
    state: str
    reason: str
    ending: str | None
    reward: float | None
    step: int | None
    tokens: int
    sampled_tokens: int
    oldest_version: int | None
    newest_version: int | None
    segment: str | None
    """The file with the rollout's tokens; None if they were not kept or are not written yet."""
    offset: int | None
    length: int | None
    trained_as: int | None
    """The version that was being trained when this rollout was trained."""


class EndedGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A group that has ended, with the means over its rollouts that ended."""

    id: int
    state: str
    reason: str
    seconds: float | None
    """Seconds from the group's admission to its end."""
    tokens: float | None
    """The mean number of sampled tokens."""
    reward: float | None
    age: int | None
    """The number of versions between the group's admission and its step; None if the group was not trained."""
