"""A process-reward model as a scorer: every step of a rollout is judged while the next steps are sampled.

    engine ──tokens──▶ span ──steps──▶ one message a moment ──▶ the model's process ──values──▶ scores

A step goes to the model's process as soon as its marker has arrived, together with the steps of other rollouts that
ended at about the same time. The process keeps the keys and values of every rollout, so only new tokens are sent and
computed. A process that was restarted meanwhile asks for the whole rollout again. A rollout whose steps the process
held when it died is sent again too, as often as `retries` says, and then fails. While the process is away, rollouts
wait for `patience` seconds.
"""

import asyncio
import math
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from headrace.config.scorers import ServedScorerSection
from headrace.engines.step_values import ForgetSteps, ReadSteps, StepAnswer, StepsRead, StepTokens
from headrace.reference import describe
from headrace.scoring.asking import Unreachable
from headrace.scoring.base import CLOSE_SECONDS, Ended, ScoreError, Scorer, Span
from headrace.scoring.limits import FIRST_PAUSE, longest_reading
from headrace.scoring.model_process import ModelProcess
from headrace.scoring.steps import Step, StepCutter
from headrace.types import Score, Trace

GATHER_SECONDS = 0.003
"""The steps of rollouts that end within this time are sent together."""
LIMITS = ServedScorerSection()
CLOSED = "the scorer was closed"

Whole = Literal["none", "last", "min", "mean", "product"]
"""How the scores of the steps become a score of the whole rollout."""


@dataclass(eq=False)
class _Reading:
    """One trace that is being read: its tokens for the model, and the steps found so far."""

    key: str
    cutter: StepCutter
    tokens: list[int] = field(default_factory=list)
    """The tokens of the trace, as the model reads them: with a tag after every step, if there is one."""
    sent: int = 0
    """The number of tokens that were sent."""
    steps: list[Step] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    """Where in `tokens` the verdict on each step stands."""
    values: list[float] = field(default_factory=list)
    """The verdicts so far. Those on the steps after them are still awaited."""
    arrived: list[float] = field(default_factory=list)
    """When each verdict arrived."""
    versions: list[str] = field(default_factory=list)
    """The version of the model that gave each verdict."""
    asked: int = 0
    """The number of steps whose verdicts were asked for."""
    attempt: int = 0
    """How often everything was asked for again. Answers to earlier attempts are ignored."""
    failures: int = 0
    away_since: float | None = None
    """Since when the process is away; None if it was there the last time."""
    told: bool = False
    """Whether the process may hold keys and values of the trace."""
    over: bool = False
    """Whether nobody waits for verdicts any more."""
    error: str = ""
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def settled(self) -> bool:
        """Whether all verdicts are here, or none will come."""
        return bool(self.error) or len(self.values) == len(self.steps)


class ProcessRewardScorer(Scorer):
    """Judges every step of a rollout by a process-reward model, which runs in a process of its own."""

    keeps_deadlines = True

    def __init__(
        self,
        process: ModelProcess,
        markers: Collection[int],
        *,
        tag: int | None = None,
        whole: Whole = "none",
        cancel_below: float = 0.0,
        streaming: bool = True,
        limits: ServedScorerSection = LIMITS,
    ) -> None:
        """`markers` are the ids of the tokens that end a step. The model reads a `tag` after each of them, if given.

        Without `streaming`, a rollout is judged after its last token, in one pass. Of the `limits`, `process` keeps the
        timeout.
        """
        self.process = process
        self.step_token_ids = tuple(sorted(markers)) if streaming else ()
        self._process = process
        self._markers = frozenset(markers)
        self._tag = tag
        self._whole = whole
        self._cancel_below = cancel_below
        self._streaming = streaming
        self._limits = limits
        self.answers_within = longest_reading(limits)
        self._readings: dict[str, _Reading] = {}
        """The rollouts that are being sampled, by id."""
        self._due: dict[str, _Reading] = {}
        """The readings with steps that were not sent yet."""
        self._forgotten: list[str] = []
        """The keys of readings whose keys and values the process may free, and was not told yet."""
        self._timer: asyncio.TimerHandle | None = None
        self._pause_ends = 0.0
        """When steps are sent again after a failure, by the monotonic clock."""
        self._asking: dict[asyncio.Task[None], list[_Reading]] = {}
        """The questions that are under way, and what they are about."""
        self._closed = False

    def span(self, span: Span) -> None:
        """Find the steps that have ended, and ask about them. The spans of an agent are judged at the end instead."""
        if not self._streaming or span.trace is None:
            return
        reading = self._readings.get(span.rollout)
        if reading is None:
            reading = self._readings[span.rollout] = self._begin(span.rollout)
        self._read(reading, span.tokens, reading.cutter.take(span.tokens, span.times))

    async def score(self, ended: Ended) -> list[Score]:
        """Return a score for every step and, unless `whole` is "none", one for the rollout."""
        rollout = ended.rollout
        streamed = self._readings.pop(rollout.id, None)
        readings = [] if streamed is None else [streamed]
        if streamed is None:
            for number, trace in enumerate(rollout.traces):
                readings.append(self._begin(f"{rollout.id}#{number}"))
                self._read(readings[-1], trace, readings[-1].cutter.take(trace))
        try:
            for reading in readings:
                await self._settled(reading)
        finally:
            self._forget(readings)
        scores = [
            Score(
                value=value,
                version=version,
                level="step",
                trace=number,
                start=step.start,
                end=step.end,
                metrics=_moments(step, arrived),
            )
            for number, reading in enumerate(readings)
            for step, value, arrived, version in zip(
                reading.steps, reading.values, reading.arrived, reading.versions, strict=True
            )
        ]
        if self._whole == "none":
            return scores
        version = scores[-1].version if scores else ""
        return [*scores, Score(value=self._of_rollout([score.value for score in scores]), version=version)]

    def doomed(self, rollout_id: str) -> bool:
        """Return whether a step of this rollout was scored below `cancel_below`."""
        reading = self._readings.get(rollout_id) if self._cancel_below else None
        return reading is not None and any(value < self._cancel_below for value in reading.values)

    def forget(self, rollout_id: str) -> None:
        """Free what is known of a rollout."""
        if (reading := self._readings.pop(rollout_id, None)) is not None:
            self._forget([reading])

    async def close(self) -> None:
        """End the questions that are open. Idempotent."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for reading in self._due.values():
            self._end(reading, CLOSED)
        for task in self._asking:
            task.cancel()
        if self._asking:
            await asyncio.wait(set(self._asking), timeout=CLOSE_SECONDS)

    def _begin(self, key: str) -> _Reading:
        return _Reading(key, StepCutter(self._markers))

    def _read(self, reading: _Reading, trace: Trace, steps: list[Step]) -> None:
        """Append the tokens of a trace, in which these steps end, to those of a reading, and ask about the steps."""
        ids: list[int] = trace.token_ids.tolist()
        tags = 0 if self._tag is None else len(reading.steps)
        first = len(reading.tokens) - tags
        at = 0
        for step in steps:
            end = step.end - first
            reading.tokens += ids[at:end]
            if self._tag is not None:
                reading.tokens.append(self._tag)
            reading.places.append(len(reading.tokens) - 1)
            at = end
        reading.tokens += ids[at:]
        reading.steps += steps
        if steps:
            self._ask_soon(reading)

    def _ask_soon(self, reading: _Reading) -> None:
        if self._closed:
            self._end(reading, CLOSED)
            return
        self._due[reading.key] = reading
        self._send_soon()

    def _send_soon(self) -> None:
        if self._timer is None and not self._closed:
            wait = max(GATHER_SECONDS, self._pause_ends - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(wait, self._send)

    def _send(self) -> None:
        """Ask about all steps that are due, in one message, unless too many messages are under way."""
        self._timer = None
        if len(self._asking) >= self._limits.concurrency or not (self._due or self._forgotten):
            return
        # The tokens are taken now: more of them may come before the task begins.
        asked = [(reading, reading.attempt, self._growth(reading)) for reading in self._due.values()]
        self._due = {}
        forgotten, self._forgotten = self._forgotten, []
        task = asyncio.create_task(self._ask(asked, forgotten), name="steps for a reward model")
        self._asking[task] = [reading for reading, *_ in asked]
        task.add_done_callback(self._answered)

    def _answered(self, task: asyncio.Task[None]) -> None:
        readings = self._asking.pop(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # This is a bug. Its rollouts must fail all the same: without an error they would wait forever.
            for reading in readings:
                self._end(reading, f"{self._process.name}: {describe(error)}")
        if self._due or self._forgotten:
            self._send_soon()

    async def _ask(self, asked: list[tuple[_Reading, int, StepTokens]], forgotten: list[str]) -> None:
        """Ask about new steps of these readings, in these attempts, and note the answers, or why there are none."""
        if forgotten:
            await self._process.tell(ForgetSteps(rollouts=forgotten))
        if not asked:
            return
        problem = ScoreError(CLOSED)
        read: StepsRead | None = None
        try:
            read = await self._process.ask(ReadSteps(growths=[growth for *_, growth in asked]), StepsRead)
            self._check(read, [growth for *_, growth in asked])
        except ScoreError as error:
            read, problem = None, error
            self._pause_ends = time.monotonic() + FIRST_PAUSE
        finally:
            now = time.monotonic()
            for number, (reading, attempt, _) in enumerate(asked):
                if reading.over:
                    self._forget([reading])  # The process may have been told to forget it before it was told of it.
                elif reading.attempt != attempt:
                    continue  # Verdicts on later steps would be taken for those on the steps that are asked for again.
                elif read is None:
                    self._failed(reading, problem)
                else:
                    self._take(reading, read.answers[number], read.version, now)

    def _check(self, read: StepsRead, growths: list[StepTokens]) -> None:
        """Raise `ScoreError` if an answer does not fit its question."""
        said = [
            growth.wanted if one.missing or one.error else one.values
            for one, growth in zip(read.answers, growths, strict=False)
        ]
        if [len(each) for each in said] != [len(growth.wanted) for growth in growths]:
            raise ScoreError(f"{self._process.name} gave another number of verdicts than it was asked for")

    def _growth(self, reading: _Reading) -> StepTokens:
        """Return the tokens up to the last step that were not sent yet, and note that they are sent."""
        start, end = reading.sent, reading.places[-1] + 1
        wanted = [place - start for place in reading.places[reading.asked :]]
        reading.sent, reading.asked, reading.told = end, len(reading.places), True
        return StepTokens(
            rollout=reading.key, start=start, token_ids=np.array(reading.tokens[start:end], np.int32), wanted=wanted
        )

    def _take(self, reading: _Reading, answer: StepAnswer, version: str, now: float) -> None:
        if answer.missing:
            self._again(reading)
            return
        reading.away_since = None
        if answer.error:
            self._end(reading, answer.error)
            return
        reading.values += answer.values
        reading.arrived += [now] * len(answer.values)
        reading.versions += [version] * len(answer.values)
        reading.changed.set()

    def _failed(self, reading: _Reading, problem: ScoreError) -> None:
        now, away = time.monotonic(), isinstance(problem, Unreachable)
        if not away:
            reading.away_since = None
        elif reading.away_since is None:
            reading.away_since = now
        if reading.away_since is None or now - reading.away_since >= self._limits.patience:
            reading.failures += 1
        if reading.failures <= self._limits.retries and not self._closed:
            self._again(reading)
        else:
            self._end(reading, str(problem))

    def _end(self, reading: _Reading, error: str) -> None:
        reading.error = reading.error or error
        reading.changed.set()

    def _again(self, reading: _Reading) -> None:
        """Ask again about all steps of a reading whose verdicts are not here, from its first token."""
        reading.attempt += 1
        reading.sent, reading.asked = 0, len(reading.values)
        self._ask_soon(reading)

    async def _settled(self, reading: _Reading) -> None:
        """Wait for all verdicts on a reading. Raises `ScoreError` if none will come. The process keeps the deadline."""
        while not reading.settled:
            reading.changed.clear()
            await reading.changed.wait()
        if reading.error:
            raise ScoreError(reading.error)

    def _forget(self, readings: list[_Reading]) -> None:
        for reading in readings:
            reading.over = True
            if self._due.get(reading.key) is reading:
                del self._due[reading.key]
            if reading.told:
                self._forgotten.append(reading.key)
        if self._forgotten:
            self._send_soon()

    def _of_rollout(self, values: list[float]) -> float:
        """Return the score of a whole rollout whose steps have these scores. A rollout without steps scores 0."""
        if not values:
            return 0.0
        match self._whole:
            case "last":
                return values[-1]
            case "min":
                return min(values)
            case "product":
                return math.prod(values)
        return math.fsum(values) / len(values)


def _moments(step: Step, arrived: float) -> dict[str, float]:
    """Return when a step was sampled, if the engine tells, and when its score arrived."""
    moments = {"arrived": arrived}
    if step.began is not None and step.ended is not None:
        moments |= {"began": step.began, "ended": step.ended}
    return moments
