"""Scorers, and the stage that asks all scorers of a run, between rollouts and the buffer.

A scorer sees the tokens of rollouts as they arrive, and gives scores as soon as a rollout has ended. A rollout never
waits for its group.

The smallest scorer implements one method:

    class Brevity(Scorer):
        async def score(self, ended: Ended) -> list[Score]:
            return [Score(value=-float(ended.rollout.sampled_tokens))]

A scorer that works while tokens arrive also overrides `span`, and `forget` for rollouts that end unscored. A scorer
serves all rollouts of a run at the same time, in the controller's event loop, so it must never block that loop.
"""

import asyncio
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, get_args

import msgspec

from headrace.channel.codec import Message
from headrace.channel.hub import Hub
from headrace.delivery.base import Manifest, Proof
from headrace.errors import ConfigError, DeadlineError, HeadraceError
from headrace.reference import describe
from headrace.scoring.open_questions import OpenQuestions
from headrace.types import Float64Array, Int32Array, Level, Prompt, Rollout, Score, Trace

CLOSE_SECONDS = 10.0
RELEASE_SECONDS = 30.0
"""Seconds in which a scorer must close. Reward workers may take 20 of them until all are killed."""
LEVELS = get_args(Level)


class ScoreError(Exception):
    """A rollout cannot be scored, and fails. The text is the reason, in one line."""


def number(value: Any, said: str) -> float:
    """Return this value as a plain number. Raises `ScoreError`, which begins with `said`, if it is not a finite one."""
    if not hasattr(value, "__float__"):
        raise ScoreError(f"{said} a {type(value).__name__}, not a number")
    try:
        found = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise ScoreError(f"{said} a {type(value).__name__}, not a number") from error
    if not math.isfinite(found):
        raise ScoreError(f"{said} {found}, not a finite number")
    return found


class Judgement(msgspec.Struct, kw_only=True):
    """A reward function's judgement of one answer."""

    reward: float | None
    """None if the function does not judge answers to this prompt. Only functions in list style can say so."""
    metrics: dict[str, float] = {}
    version: str = ""
    """The version of the reward function; empty if it is not known."""


@dataclass(eq=False)
class Span:
    """Tokens by which a rollout has just grown: sampled tokens, or context such as a prompt or a tool's answer.

    Every token of a rollout is in exactly one span. `tokens` also has the records of the tokens: if `tokens.versions`
    is `NO_VERSION`, nobody sampled the token. The tokens of an agent are sent when their turn has ended, and a token
    that is in several of its traces is sent once.
    """

    rollout: str
    """The id of the rollout."""
    trace: int | None
    """The index of the trace that the tokens belong to. None in an agent's session, whose traces are known only at its
    end."""
    turn: int
    """The number of the policy's turn, counted from 0. Context belongs to the turn that follows it."""
    start: int
    """The position of the first of these tokens in the trace."""
    tokens: Trace
    decode: Callable[[Int32Array], str]
    times: Float64Array | None = None
    """When the engine sampled each token, in seconds of its monotonic clock; None if it does not tell."""

    @property
    def token_ids(self) -> Int32Array:
        """The token ids."""
        return self.tokens.token_ids

    @cached_property
    def text(self) -> str:
        """The tokens as text. A character may be cut in two where one span ends and the next begins."""
        return self.decode(self.tokens.token_ids)


@dataclass(eq=False)
class Turn:
    """One turn of the policy in a rollout that has ended."""

    trace: int
    start: int
    """The position of the first token of the turn in the trace."""
    end: int
    """The position after the last token of the turn. The last token is an end token if the policy ended the turn
    itself."""
    decode: Callable[[], str]

    @cached_property
    def text(self) -> str:
        """The words of the policy, without the end token."""
        return self.decode()


@dataclass(eq=False)
class Ended:
    """A rollout that has ended by itself or at its length limit, with everything that a scorer may need."""

    prompt: Prompt
    rollout: Rollout
    turns: Sequence[Turn]
    """The turns in the order in which they were taken."""
    heldout: bool = False
    """Whether the rollout answers a held-out prompt, which nothing is trained on."""

    @property
    def completion(self) -> str:
        """The text of the last turn, which is the policy's answer."""
        return self.turns[-1].text if self.turns else ""


class ScorerProcess(Protocol):
    """The worker process in which the model of a scorer runs. Supervision starts, watches and restarts it."""

    name: str
    """The name of the process: `scorer-0`, `scorer-1`, ..."""

    @property
    def hangs(self) -> bool:
        """Whether the process should be ended and restarted, because it lives but answers nothing."""

    def connect(self, hub: Hub) -> None:
        """Use this hub from now on. The process is ready."""

    def hear(self, message: Message) -> None:
        """Take a message of the process that answers no question."""

    def lost(self, reason: str) -> None:
        """Note that the process is gone. What it held fails with this reason."""

    def back(self) -> None:
        """Note that the process was restarted and is ready."""


@dataclass(eq=False)
class Taught:
    """What a teacher says about a rollout that has ended."""

    traces: list[Trace]
    """The traces of the rollout, with the teacher's scores of their tokens."""
    score: Score
    """The mean of log(teacher / sampler) over the trained tokens. It is the reward only if there is no other score."""


class MovingProcess(ScorerProcess, Protocol):
    """The process of a teacher that follows the policy. It takes versions, and proves them, as engines do."""

    proved: int
    """The version that the process has proved; `NO_VERSION` before the first one and after a death."""

    async def load(self, manifest: Manifest) -> Proof:
        """Bring this version to the process, and return its answer. Raises `ScoreError` if the process is away."""


class Teaching(Protocol):
    """The teachers of a run (see `teachers`)."""

    questions: OpenQuestions
    """The book in which the teachers count their open questions."""

    @property
    def processes(self) -> Sequence[ScorerProcess]:
        """The processes of the teachers' models."""

    @property
    def moving(self) -> Mapping[str, MovingProcess]:
        """The processes of the teachers that follow the policy, by the names of the teachers."""

    async def start(self) -> None:
        """Prepare the teachers, before the first rollout."""

    async def close(self) -> None:
        """Release everything that the teachers hold. Idempotent."""

    async def teach(self, ended: Ended) -> Taught:
        """Return what the teacher of this rollout's prompt says about it. Raises `ScoreError`."""


class Scorer(ABC):
    """The base class of all scorers. The configuration gives a scorer its name."""

    version: str = ""
    """The version that is recorded with every score. Change it when the scorer would judge differently than before."""
    process: ScorerProcess | None = None
    """The process of the scorer's model, if it has one."""
    step_token_ids: tuple[int, ...] = ()
    """The tokens that end a step, if the scorer judges steps. Engines send tokens at once when they sample one."""
    keeps_deadlines: bool = False
    """Whether `score` keeps its own time limit. Otherwise `[scoring] timeout` counts from the call of `score`.

    A scorer that keeps its own limit is never interrupted. But a run that waits for such a scorer alone is a stall if
    no call of `score` has ended for `answers_within` seconds, and then nothing happens for `[pipeline] stall_seconds`.
    """
    answers_within: float | None = None
    """Of a scorer that keeps its own time limit: the seconds within which at least one open call of `score` ends. None
    means `[scoring] timeout`."""

    async def start(self) -> None:  # noqa: B027
        """Prepare the scorer, before the first rollout. Raises `ConfigError` if the scorer cannot be used."""

    def span(self, span: Span) -> None:  # noqa: B027
        """Take note of tokens that have just arrived. Must return at once. The spans of one rollout come in order."""

    @abstractmethod
    async def score(self, ended: Ended) -> Sequence[Score]:
        """Return the scores of a rollout that has ended, at any levels.

        The stage fills in the scorer's name and version.

        Any exception fails the rollout. This is the last call about the rollout, even if the call is cancelled.
        """

    def doomed(self, rollout_id: str) -> bool:
        """Return whether a rollout that is being sampled should end now, because its scores so far are too low."""
        return False

    def forget(self, rollout_id: str) -> None:  # noqa: B027
        """Forget a rollout whose spans were seen, because `score` will not be called for it. Must return at once."""

    async def close(self) -> None:  # noqa: B027
        """Release everything that the scorer holds. Idempotent. After 30 seconds the call is cancelled."""


class Stage:
    """Named scorers and their weights. Without scorers, the environment or the agent gives the reward of a rollout.

    The reward is the weighted sum of all scores of the whole rollout; finer scores are recorded beside them. A scorer
    that raises, takes too long or gives no number fails that rollout and nothing else.
    """

    def __init__(
        self,
        scorers: Mapping[str, Scorer] | None = None,
        weights: Mapping[str, float] | None = None,
        *,
        tasks: Mapping[str, str] | None = None,
        timeout: float = 30.0,
        teachers: Teaching | None = None,
    ) -> None:
        """A scorer has weight 1 unless a weight is given. The same holds for the reward of an environment or an agent.

        `tasks` names, for some of the scorers, the only task whose rollouts they judge. `timeout` applies to scorers
        that keep no deadlines themselves.
        """
        self.scorers = dict(scorers or {})
        self._weights = dict(weights or {})
        self._tasks = dict(tasks or {})
        self._timeout = timeout
        self._listeners = {name: one for name, one in self.scorers.items() if type(one).span is not Scorer.span}
        self.processes = {one.process.name: one.process for one in self.scorers.values() if one.process is not None}
        """The processes of the models of scorers and teachers, by name."""
        self._teachers = teachers
        self.moving: Mapping[str, MovingProcess] = {} if teachers is None else teachers.moving
        """The processes of the teachers that follow the policy, by the names of the teachers."""
        if teachers is not None:
            self.processes |= {process.name: process for process in teachers.processes}
        self.listening = bool(self._listeners)
        """Whether any scorer wants spans."""
        self.questions = OpenQuestions() if teachers is None else teachers.questions
        """The open questions to scorers and teachers."""
        self._told: dict[str, str] = {}
        """The rollouts whose spans were sent to scorers, by id. The value is the first error that a scorer raised about
        a span; empty if there was none."""

    def judges(self, prompt: Prompt) -> list[str]:
        """Return the names of the scorers that judge answers to this prompt."""
        return [name for name in self.scorers if self._tasks.get(name, prompt.task) == prompt.task]

    def connect(self, hub: Hub) -> None:
        """Connect the scorers to the processes of their models, which are ready."""
        for process in self.processes.values():
            process.connect(hub)

    async def start(self) -> None:
        """Start every scorer. Raises `ConfigError`. After an error, no scorer is left open."""
        async with AsyncExitStack() as unless_started:
            unless_started.push_async_callback(self._close_after_error)
            for name, scorer in self.scorers.items():
                await _started(name, scorer)
            if self._teachers is not None:
                await self._teachers.start()
            unless_started.pop_all()

    async def close(self) -> None:
        """Close every scorer, whatever another one does meanwhile. Idempotent.

        Raises the first error of a scorer, and `DeadlineError` if a scorer does not close in time.
        """
        closing = {asyncio.create_task(one.close()): f"the scorer {name!r}" for name, one in self.scorers.items()}
        if self._teachers is not None:
            closing[asyncio.create_task(self._teachers.close())] = "the teachers"
        if not closing:
            return
        try:
            done, late = await asyncio.wait(closing, timeout=RELEASE_SECONDS)
        finally:
            for task in closing:
                task.cancel()
        if late:
            await asyncio.wait(late, timeout=CLOSE_SECONDS)
        errors = [task.exception() for task in closing if task in done and not task.cancelled()]
        for error in filter(None, errors):
            raise error
        if late:
            names = ", ".join(who for task, who in closing.items() if task in late)
            raise DeadlineError(f"{names} did not close within {RELEASE_SECONDS:g} s")

    async def _close_after_error(self) -> None:
        # The error tells why there is no run. A scorer that was not started may raise anything when it is closed.
        with suppress(Exception):
            await self.close()

    def span(self, span: Span) -> None:
        """Tell the scorers about tokens that have arrived."""
        if not self._listeners:
            return
        self._told.setdefault(span.rollout, "")
        for name, scorer in self._listeners.items():
            try:
                with _foreign(name):
                    scorer.span(span)
            except ScoreError as error:
                self._told[span.rollout] = self._told[span.rollout] or str(error)

    @property
    def step_token_ids(self) -> tuple[int, ...]:
        """The tokens that end a step for any of the scorers."""
        return tuple(sorted({token for scorer in self.scorers.values() for token in scorer.step_token_ids}))

    def doomed(self, rollout_id: str) -> bool:
        """Return whether a scorer wants this rollout, which is being sampled, to end now."""
        for name, scorer in self._listeners.items():
            try:
                with _foreign(name):
                    if scorer.doomed(rollout_id):
                        return True
            except ScoreError as error:
                self._told[rollout_id] = self._told.get(rollout_id) or str(error)
        return False

    def forget(self, rollout_id: str) -> None:
        """Tell the scorers that a rollout whose spans they have seen will not be scored. Idempotent."""
        if self._told.pop(rollout_id, None) is None:
            return
        for scorer in self._listeners.values():
            # This is a user's code, and the rollout can no longer be marked as failed.
            with suppress(Exception):
                scorer.forget(rollout_id)

    async def score(self, ended: Ended) -> Rollout:
        """Return the rollout with its scores and reward, or as failed with the reason."""
        rollout, judges = ended.rollout, self.judges(ended.prompt)
        alone = not judges and not rollout.scores
        lesson = self._begin_lesson(ended) if alone or not ended.heldout else None
        try:
            scores = await self._scores(ended, judges)
            taught = await lesson if lesson is not None else None
            if taught is not None and alone:
                reward = taught.score.value
            else:
                reward = self._reward([*rollout.scores, *scores], judges)
        except ScoreError as error:
            return msgspec.structs.replace(rollout, ending="failed", reward=None, reason=str(error))
        finally:
            if lesson is not None:
                lesson.cancel()
                await asyncio.wait([lesson], timeout=CLOSE_SECONDS)
        return msgspec.structs.replace(
            rollout,
            traces=rollout.traces if taught is None else taught.traces,
            reward=reward,
            scores=[*rollout.scores, *scores, *([] if taught is None else [taught.score])],
            metrics=_merged(rollout.metrics, scores),
        )

    def _begin_lesson(self, ended: Ended) -> asyncio.Task[Taught] | None:
        """Let the teacher score the rollout while scorers judge it. None if there is no teacher."""
        if self._teachers is None:
            return None
        lesson = asyncio.create_task(self._teachers.teach(ended), name=f"teach {ended.rollout.id}")
        # If a scorer fails first, the rollout has failed already, and nobody asks for this error.
        lesson.add_done_callback(lambda task: task.cancelled() or task.exception())
        return lesson

    async def _scores(self, ended: Ended, judges: Sequence[str]) -> list[Score]:
        if problem := self._told.get(ended.rollout.id):
            self.forget(ended.rollout.id)
            raise ScoreError(problem)
        self._told.pop(ended.rollout.id, None)
        if len(judges) <= 1:
            return [score for name in judges for score in await self._ask(name, ended)]
        asked = [asyncio.create_task(self._ask(name, ended), name=f"{name}: {ended.rollout.id}") for name in judges]
        try:
            # A task that is cancelled before its first step never runs, and its scorer would keep the rollout forever.
            await asyncio.sleep(0)
            return [score for scores in await asyncio.gather(*asked) for score in scores]
        finally:
            for task in asked:
                task.cancel()
            await asyncio.wait(asked, timeout=CLOSE_SECONDS)

    async def _ask(self, name: str, ended: Ended) -> list[Score]:
        """Return one scorer's scores, in plain numbers and under its name. Raises `ScoreError`."""
        scorer = self.scorers[name]
        keeps = scorer.keeps_deadlines
        timeout = None if keeps else self._timeout
        within = scorer.answers_within if keeps and scorer.answers_within is not None else self._timeout
        try:
            async with asyncio.timeout(timeout):
                with _foreign(name), self.questions.ask(f"the scorer {name!r}", within):
                    given = await scorer.score(ended)
        except TimeoutError:
            raise ScoreError(f"the scorer {name!r} took more than {timeout:g} s") from None
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
            raise ScoreError(f"the scorer {name!r} cancelled itself") from None
        if not isinstance(given, Sequence) or not all(isinstance(score, Score) for score in given):
            raise ScoreError(f"the scorer {name!r} gave a {type(given).__name__}, not a list of scores")
        with _foreign(name):
            return [_plain(name, scorer.version, score, ended.rollout) for score in given]

    def _reward(self, scores: Sequence[Score], judges: Sequence[str]) -> float:
        parts = [self._weights.get(one.scorer, 1.0) * one.value for one in scores if one.level == "rollout"]
        if not parts:
            if judges:
                raise ScoreError(f"no score of the whole rollout came from {', '.join(map(repr, judges))}")
            raise ScoreError("the environment ended the episode without a reward")
        # Neither `sum`, which adds in another way from Python 3.12 on, nor a start at 0.0, which would change -0.0.
        total = parts[0]
        for part in parts[1:]:
            total += part
        if not math.isfinite(total):
            raise ScoreError(f"the reward is {total}, not a finite number")
        return total


async def _started(name: str, scorer: Scorer) -> None:
    try:
        with _foreign(name):
            await scorer.start()
    except ScoreError as error:
        if isinstance(error.__cause__, HeadraceError):
            raise error.__cause__ from None
        raise ConfigError(f"{error}, so it cannot be started") from error


def _plain(name: str, version: str, score: Score, rollout: Rollout) -> Score:
    value = number(score.value, f"the scorer {name!r} gave, as value,")
    metrics = {str(key): number(value, f"the scorer {name!r} gave, as {key},") for key, value in score.metrics.items()}
    if score.level not in LEVELS:
        raise ScoreError(f"the scorer {name!r} gave a score of level {score.level!r}, not {', '.join(LEVELS)}")
    if score.level != "rollout":
        tokens = len(rollout.traces[score.trace]) if 0 <= score.trace < len(rollout.traces) else 0
        if not 0 <= score.start < score.end <= tokens:
            where = f"tokens {score.start} to {score.end} of trace {score.trace}"
            raise ScoreError(f"the scorer {name!r} gave a score for {where}, which has {tokens} tokens")
    return msgspec.structs.replace(score, value=value, metrics=metrics, scorer=name, version=score.version or version)


def _merged(metrics: Mapping[str, float], scores: Sequence[Score]) -> dict[str, float]:
    """Return all metrics of a rollout. A name that two scorers use is prefixed with the later scorer's name."""
    merged = dict(metrics)
    for score in scores:
        if score.level == "rollout":
            merged |= {key if key not in merged else f"{score.scorer}/{key}": n for key, n in score.metrics.items()}
    return merged


@contextmanager
def _foreign(name: str) -> Iterator[None]:
    """Run a scorer, which may be the user's code. Any exception of it becomes a `ScoreError`."""
    try:
        yield
    except ScoreError:
        raise
    except Exception as error:
        raise ScoreError(f"the scorer {name!r} raised {describe(error)}") from error
