"""Advice on runs that do not learn: one line for each cause, with the setting to change. Pure: records in, lines out.

A rule looks at the records of the latest steps or groups, as `metrics.jsonl` has them, and needs evidence that lasts:
one bad step says nothing. Each cause is reported once. A rule that may be wrong stays silent, since people stop reading
a run that cries wolf. `docs/not_learning.md` explains every cause.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean, median
from typing import Any

import msgspec

from headrace.errors import one_line

STEPS = 10
"""The number of latest steps that most rules look at."""
SHORT = 5
"""The number of steps at the beginning, and at the end, whose means are compared."""
WAITING_STEPS, WAITING_SECONDS = 20, 120.0
GROUPS, FEWEST_GROUPS = 64, 16
"""The number of latest groups that the rules of groups look at, and the fewest with which they say anything."""
REASON_LENGTH = 200
FAR = 0.2
"""A KL divergence in nats a token that is far too large for one step. Most healthy runs stay below a tenth of it."""
LONG = 64
"""Answers of fewer tokens are not long, however short they were at the beginning."""

Record = Mapping[str, Any]


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """What is wrong with a run, and which setting to change."""

    cause: str
    line: str


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What the rules must know about the configuration."""

    compares: bool = True
    """Whether the loss learns from the differences of rewards within a group."""
    synchronous: bool = False
    """Whether generation and training take turns, so that each waits for the other."""


class EndedAnswers(msgspec.Struct):
    """What the rules of groups look at."""

    group: int
    answers: int
    failed: int
    reason: str
    filtered: str = ""


class Advisor:
    """The adviser of one run. It is told every group and step, and says each cause once."""

    def __init__(self, settings: Settings | None = None) -> None:
        self._settings = settings or Settings()
        self._said: set[str] = set()
        self._history = History()
        self._groups: deque[EndedAnswers] = deque(maxlen=GROUPS)

    def group(self, group: int, answers: int, failed: int, reason: str = "") -> list[Advice]:
        """Take a group whose answers have ended. `failed` of its answers failed, one of them for `reason`."""
        self._groups.append(EndedAnswers(group, answers, failed, reason))
        return self._new(filter(None, [_failing(self._groups)]))

    def filtered(self, group: int, by: str) -> list[Advice]:
        """Take the filter that left out a group, which `group` was told of."""
        for ended in self._groups:
            if ended.group == group:
                ended.filtered = by
        return self._new(filter(None, [_filtered(self._groups)]))

    def step(self, record: Record) -> list[Advice]:
        """Take an optimizer step of the policy, as in `metrics.jsonl`."""
        self._history.add(record)
        return self._new(self._of_steps())

    def told(self, cause: str) -> None:
        """Take a cause that a previous process has reported."""
        self._said.add(cause)

    def _of_steps(self) -> Iterator[Advice]:
        history = self._history
        # Causes before their consequences (EXPLAINED_BY): what is reported first hides what follows from it.
        rules: list[Callable[[History], Advice | None]] = [_skipped, _far, _collapsed, _truncated, _longer]
        if self._settings.compares:
            rules.append(_equal)
        for rule in rules:
            if (advice := rule(history)) is not None:
                yield advice if history.jump is None or history.gained() else _jumped(history, advice)
        if not self._settings.synchronous and (advice := _waiting(history)) is not None:
            yield advice

    def _new(self, found: Iterator[Advice]) -> list[Advice]:
        fresh = []
        for advice in found:
            if advice.cause in self._said:
                continue
            if EXPLAINED_BY.get(advice.cause, frozenset()) & self._said:
                continue
            self._said.add(advice.cause)
            fresh.append(advice)
        return fresh


EXPLAINED_BY = {
    "collapse": frozenset({"learning_rate"}),
    "equal_rewards": frozenset({"learning_rate", "collapse", "truncated"}),
    "constant_reward": frozenset({"learning_rate", "collapse", "truncated"}),
    "no_answer": frozenset({"learning_rate", "collapse", "truncated"}),
    "zero_reward": frozenset({"learning_rate", "collapse", "truncated"}),
    "truncated": frozenset({"learning_rate", "collapse"}),
    "length": frozenset({"learning_rate", "collapse", "truncated"}),
}
"""Cause -> the causes of which it is a consequence. A consequence of what was reported is not reported."""


class History:
    """The records of a run's first and latest steps, and what was seen in all of them."""

    def __init__(self) -> None:
        self.first: list[Record] = []
        self.latest: deque[Record] = deque(maxlen=WAITING_STEPS)
        self.best: float | None = None
        """The largest reward of a single answer so far."""
        self.jump: float | None = None
        """The largest KL divergence from the policy that sampled, if it was far too large for one step.

        It is forgotten when the policy has recovered: when the rewards of SHORT steps are as good as those before it.
        """
        self._before_jump: float | None = None
        self._since_jump: deque[float] = deque(maxlen=SHORT)
        self.varied = False
        """Whether there was ever a step in which most groups had different rewards."""

    def add(self, record: Record) -> None:
        """Take the next step."""
        if len(self.first) < SHORT:
            self.first.append(record)
        self.latest.append(record)
        if (most := record.get("reward_max")) is not None:
            self.best = most if self.best is None else max(self.best, most)
        self._look_for_jump(record.get("kl_k3"), record.get("reward"))
        zero_variance = record.get("zero_variance")
        self.varied = self.varied or (zero_variance is not None and zero_variance < 0.5)

    def _look_for_jump(self, apart: float | None, reward: float | None) -> None:
        if apart is not None and apart >= FAR:
            if self.jump is None:
                self._before_jump = self._mean_reward()
            self.jump = max(apart, self.jump or 0.0)
            self._since_jump.clear()
        elif self.jump is not None and reward is not None and self._before_jump is not None:
            self._since_jump.append(reward)
            if len(self._since_jump) == SHORT and fmean(self._since_jump) >= self._before_jump:
                self.jump = None

    def _mean_reward(self) -> float | None:
        """Return the mean reward of the latest steps, as many as there are."""
        rewards = [record["reward"] for record in list(self.latest)[-SHORT:] if record.get("reward") is not None]
        return fmean(rewards) if rewards else None

    def last(self, key: str, steps: int = STEPS) -> list[float]:
        """Return a number of each of the latest steps; empty if there are fewer, or if one of them has no number."""
        values = [record.get(key) for record in list(self.latest)[-steps:]]
        known = [float(value) for value in values if value is not None]
        return known if len(known) == steps else []

    def start(self, key: str) -> float | None:
        """Return the mean of a number over the first steps; None until they are over."""
        values = [record.get(key) for record in self.first]
        known = [float(value) for value in values if value is not None]
        return fmean(known) if len(known) == SHORT else None

    def gained(self) -> bool:
        """Return whether the latest rewards are clearly above those of the beginning, or near the best possible.

        Without rewards the answer is yes.
        """
        before, now = self.start("reward"), self.last("reward", SHORT)
        if before is None or not now or self.best is None:
            return True
        return fmean(now) > before + 0.05 * max(abs(before), abs(self.best)) or fmean(now) >= 0.9 * self.best > 0


def _skipped(history: History) -> Advice | None:
    skipped = history.last("skipped")
    if sum(skipped) < STEPS / 2:
        return None
    return _too_fast(history, f"{sum(skipped):.0f} of the last {STEPS} steps were skipped")


def _far(history: History) -> Advice | None:
    """Return advice if the policy moves so far within a step that the samples no longer describe it."""
    apart = history.last("kl_k3", SHORT)
    if not apart or median(apart) < FAR:
        return None
    return _too_fast(
        history, f"the KL divergence from the policy that sampled was {median(apart):.2g} in the last {SHORT} steps"
    )


def _jumped(history: History, consequence: Advice) -> Advice:
    """Return the cause of what was found in a run whose policy has jumped before: the jump."""
    if consequence.cause == "learning_rate":
        return consequence
    return _too_fast(history, f"the policy jumped (KL divergence {history.jump:.2g} in a step) and does not recover")


def _too_fast(history: History, sign: str) -> Advice:
    rate = history.latest[-1].get("learning_rate")
    now = "" if rate is None else f" (now {rate:.3g})"
    line = f"{sign}: the policy changes too fast; lower [training] learning_rate{now} by 3 to 10 times"
    return Advice(cause="learning_rate", line=line)


def _collapsed(history: History) -> Advice | None:
    """Return advice if the answers have become all the same, or all worthless, after a better beginning."""
    before, now = history.start("reward"), history.last("reward")
    entropy, first = history.last("sampled_entropy", SHORT), history.start("sampled_entropy")
    if before is None or not now or history.gained():
        return None
    if entropy and first is not None and first > 0.01 and max(entropy) < 0.1 * first:
        said = f"the entropy fell from {first:.2g} to {fmean(entropy):.2g} nats a token and the reward did not rise"
        cure = "lower [training] learning_rate, or set [algorithm] entropy_weight or kl"
        return Advice(cause="collapse", line=f"{said}: all answers become the same; {cure}")
    equal = history.last("zero_variance")
    if history.varied and equal and fmean(equal) >= 0.95 and fmean(now) < 0.5 * before:
        said = f"the reward fell from {before:.2g} to {fmean(now):.2g} and the groups have equal rewards"
        return Advice(cause="collapse", line=f"{said}: the policy has collapsed; lower [training] learning_rate")
    return None


def _truncated(history: History) -> Advice | None:
    share = history.last("truncated")
    if not share or min(share) < 0.5 or history.gained():
        return None
    if fmean(share[SHORT:]) < 0.9 * fmean(share[:SHORT]):
        return None  # A share that falls is a policy that learns to end its answers.
    said = f"{fmean(share):.0%} of the answers of the last {STEPS} steps were cut off at their limit"
    cure = "raise [rollouts] max_tokens (and [engine] max_length), or add the model's end token to [rollouts] stop"
    return Advice(cause="truncated", line=f"{said}; {cure}")


def _longer(history: History) -> Advice | None:
    before, now = history.start("length_mean"), history.last("length_mean", SHORT)
    if not before or not now or min(now) < max(3 * before, LONG) or history.gained():
        return None
    said = f"answers are {fmean(now) / before:.1f} times as long as at the beginning and earn no more"
    return Advice(cause="length", line=f"{said}; set [algorithm] overlong_buffer or length_penalty")


def _equal(history: History) -> Advice | None:
    """Return advice if nearly all groups had equal rewards: they teach nothing."""
    equal, rewards = history.last("zero_variance"), history.last("reward")
    if not equal or not rewards or fmean(equal) < 0.95 or min(equal) < 0.8:
        return None
    low, high = min(history.last("reward_min"), default=None), max(history.last("reward_max"), default=None)
    if history.varied and history.best is not None and fmean(rewards) >= 0.9 * history.best > 0:
        return None  # There was something to learn, and the run has learned it.
    said = f"{fmean(equal):.0%} of the groups had equal rewards in the last {STEPS} steps, so there is no gradient"
    answered = history.last("extra/answered")
    if answered and max(answered) == 0.0:
        cure = "no answer was found in any of them: correct [task] answer_pattern, or ask for the format with suffix"
        return Advice(cause="no_answer", line=f"{said}; {cure}")
    if low is not None and low == high == 0.0:
        cure = "every answer earned 0: read some with `headrace rollouts RUN_DIR --text`; the reward function does not "
        cure += "find the answers, or the task is too hard (easier prompts, partial rewards, [warm_start])"
        return Advice(cause="zero_reward", line=f"{said}; {cure}")
    if low is not None and low == high:
        cure = f"every answer earned {low:.3g}: the reward is a constant, or the prompts are too easy"
        return Advice(cause="constant_reward", line=f"{said}; {cure} ([task] reward, or [scorers])")
    cure = "use prompts that are neither too hard nor too easy ([rollouts] curriculum, "
    cure += '[buffer] filter = ["zero_variance"]), a larger [rollouts] group_size, or a higher temperature'
    return Advice(cause="equal_rewards", line=f"{said}; {cure}")


def _waiting(history: History) -> Advice | None:
    """Return advice if one side of the run has nothing to do most of the time, for minutes."""
    rates, tokens = history.last("tokens_per_second", WAITING_STEPS), history.last("trained_tokens", WAITING_STEPS)
    taken = sum(count / rate for count, rate in zip(tokens, rates, strict=False) if rate > 0)
    if not rates or not tokens or taken < WAITING_SECONDS:
        return None
    trainer, engine = history.last("trainer_idle", WAITING_STEPS), history.last("engine_idle", WAITING_STEPS)
    if trainer and fmean(trainer) >= 0.75:
        said = f"the trainer waited for answers during {fmean(trainer):.0%} of the last {WAITING_STEPS} steps"
        return Advice(cause="trainer_waits", line=f"{said}; raise [engine] count or slots, or [buffer] depth")
    if engine and fmean(engine) >= 0.75:
        said = f"the engines waited for the trainer during {fmean(engine):.0%} of the last {WAITING_STEPS} steps"
        cure = "give the trainer more ([training] ranks), use fewer engines ([engine] count), or raise [buffer] depth"
        return Advice(cause="engine_waits", line=f"{said}; {cure}")
    return None


def _failing(groups: Sequence[EndedAnswers]) -> Advice | None:
    """Return advice if many answers fail, whatever the cause: a reward function, a judge, an environment."""
    answers, failed = sum(group.answers for group in groups), sum(group.failed for group in groups)
    if len(groups) < FEWEST_GROUPS or failed < 0.25 * answers:
        return None
    reasons = Counter(one_line(group.reason, REASON_LENGTH) for group in groups if group.reason)
    why = reasons.most_common(1)[0][0] if reasons else "no reason was given"
    said = f"{failed / answers:.0%} of the answers of the last {len(groups)} groups failed, mostly because: {why}"
    cure = "correct the reward function or start the judge that it calls; [scoring] timeout and workers limit it"
    return Advice(cause="failing", line=f"{said}; {cure}")


def _filtered(groups: Sequence[EndedAnswers]) -> Advice | None:
    """Return advice if a filter leaves nearly all groups out."""
    left = Counter(group.filtered for group in groups if group.filtered)
    if len(groups) < GROUPS // 2 or left.total() < 0.95 * len(groups):
        return None
    filter_ = left.most_common(1)[0][0]
    said = f"the filter {filter_!r} left out {left.total() / len(groups):.0%} of the last {len(groups)} groups"
    cure = (
        "their answers were cut off: raise [rollouts] max_tokens, or remove the filter from [buffer] filter"
        if filter_ == "overlong"
        else "the rewards within a group are equal: use prompts that are neither too hard nor too easy, and read some "
        "(`headrace rollouts RUN_DIR --text`): the reward function may not find what it looks for"
    )
    return Advice(cause="filter", line=f"{said}; {cure}")
