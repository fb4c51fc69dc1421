"""One episode: the policy speaks and the environment answers, until one of them ends the episode.

The episode is one growing token stream. Sampled tokens are appended exactly as the engine reported them, the
environment's answers are appended as untrained tokens, and nothing in the stream is ever tokenised again. An episode
always becomes a `Rollout`: a failure of the engine or of the environment is a value with a reason. In this package,
only `foreign` catches every exception.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TypeVar

import msgspec
import numpy as np

from headrace.engines.base import FinishReason, Request, Sampler, closing_deltas
from headrace.errors import HeadraceError, UserError
from headrace.rollouts.base import TOO_LONG, AnyEpisode, Cancelled, ChatFormat, EpisodePlan
from headrace.rollouts.stream import SavedTurns, TokenStream
from headrace.scoring.base import Span, Stage, Turn
from headrace.tasks.base import Environment, EnvironmentStep
from headrace.types import LOW_SCORE, NO_VERSION, Ending, Float64Array, Int32Array, Rollout, Score, Trace

T = TypeVar("T")

CLOSE_SECONDS = 10.0
FRUITLESS_RESUMES = 100
"""The number of aborts in a row without a new token after which an episode fails instead of asking its engine again."""


class EpisodeFailed(Exception):
    """An episode failed. The text is the reason, in one line."""


@contextmanager
def foreign(what: str) -> Iterator[None]:
    """Run code of users: environments, reward functions, chat templates.

    Such code may raise anything, and no exception of it may end a loop that serves other rollouts. The cancellation of
    a task is not an error and passes.
    """
    try:
        yield
    except UserError as error:
        raise EpisodeFailed(_describe(error)) from error
    except Exception as error:
        raise EpisodeFailed(f"{what}: {_describe(error)}") from error


def _describe(error: Exception) -> str:
    name, line = type(error).__name__, _first_line(str(error))
    if isinstance(error, HeadraceError) and line:
        return line  # It is written for people, who need not know the class of the error.
    return f"{name}: {line}" if line else name


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


class Episode(AnyEpisode):
    """One rollout in the making whose turns an environment answers.

    Two phases keep a synchronous run deterministic. First all episodes are prepared, since environments may take any
    time. Then `run` submits its request before it first yields to the event loop, so engines see requests in the order
    in which episodes are run.
    """

    def __init__(
        self,
        plan: EpisodePlan,
        environment: Environment,
        engine: Sampler,
        chat: ChatFormat,
        scoring: Stage | None = None,
    ) -> None:
        """`scoring` is told about tokens as they arrive."""
        super().__init__(plan)
        self._environment = environment
        self._engine = engine
        self._chat = chat
        self._scoring = scoring
        stops = dict.fromkeys((*self._chat.stop_token_ids, *plan.sampling.stop_token_ids))
        self._sampling = msgspec.structs.replace(plan.sampling, stop_token_ids=tuple(stops))
        self._saved = SavedTurns(plan.saved)
        self.discarded = self._saved.discarded
        self._stream = TokenStream()
        self._max_length = math.inf if plan.max_length is None else plan.max_length
        self._opening_tokens = 0
        self._metrics: dict[str, float] = {}
        self._turns: list[Turn] = []
        self._requests = 0
        self._request: str | None = None
        """The id of the request that the engine is working on."""
        self._prepared = False
        self._closed = False
        self._failed: str | None = None

    @property
    def traces(self) -> Sequence[Trace]:
        """The tokens so far, in one trace."""
        return [self._stream.trace()]

    @property
    def turns(self) -> Sequence[Turn]:
        """The policy's turns so far, for scorers."""
        return self._turns

    @property
    def answer(self) -> str:
        """Everything after the opening, as text for people to read. Each turn of a conversation begins a new line."""
        trace = self._stream.trace().part(self._opening_tokens, len(self._stream.trace()))
        changes = np.flatnonzero(np.diff(trace.versions != NO_VERSION)) + 1
        return "\n".join(self._chat.decode(turn) for turn in np.split(trace.token_ids, changes))

    def since(self, start: int) -> Trace | None:
        """Return the tokens after the first `start`, or None if there are none."""
        return self._stream.since(start)

    async def prepare(self) -> None:
        """Reset the environment and render its opening. A failure is kept for `run` to report. Idempotent."""
        if self._prepared:
            return
        self._prepared = True
        try:
            messages = await self._ask("environment.reset", self._environment.reset)
            text = self.prompt.text
            if not messages and text is None:
                raise EpisodeFailed("the environment opened without a message and the prompt has no text")
            with foreign("the opening"):
                opening = self._chat.open(messages) if messages else self._chat.open_text(text or "")
            if len(opening) >= self._max_length:
                # Without the numbers of this prompt, so that the ledger counts all such prompts under one reason.
                raise EpisodeFailed(f"{TOO_LONG} of {self._max_length} tokens ([engine] max_length)")
            self._opening_tokens = len(opening)
            self._expect(opening)
            prefix = self.plan.prefix
            if prefix is None:
                self._tell(self._stream.append_context(opening))
            elif np.array_equal(prefix.token_ids[: len(opening)], opening):
                self._tell(self._stream.append_recorded(prefix))
            else:
                why = "the environment opens with other tokens than those that the episode is to go on from"
                raise EpisodeFailed(why)
        except EpisodeFailed as failure:
            self._failed = str(failure)
        except Cancelled:
            pass

    async def run(self) -> Rollout:
        """Take turns until the episode ends. The environment is closed in any case."""
        try:
            rollout = await self._take_turns()
        except EpisodeFailed as failure:
            rollout = self._rollout("failed", reason=str(failure))
        except Cancelled:
            rollout = self._rollout("aborted", reason=self.cancelled or "")
        finally:
            closing = await self._close()
        if closing and rollout.ending != "failed":
            rollout = self._rollout("failed", reason=closing)
        return rollout

    async def discard(self) -> None:
        """Close an episode that will not be run, or not be run any more. Idempotent."""
        await self._close()
        if self._scoring is not None:
            self._scoring.forget(self.id)

    async def _take_turns(self) -> Rollout:
        if not self._prepared:
            raise EpisodeFailed("the episode was run before it was prepared")
        if self._failed is not None:
            raise EpisodeFailed(self._failed)
        while True:
            turn_ids, finish = await self._sample_turn()
            stopped = finish == "stop"
            end = len(self._stream)
            # A token of `[rollouts] stop`, such as a closing tag, is part of what was said; the end of the turn is not.
            ended = stopped and not {*turn_ids[-1:].tolist()}.isdisjoint(self._chat.stop_token_ids)
            with foreign("chat.decode"):
                text = self._chat.decode(turn_ids[:-1] if ended else turn_ids)
            self._turns.append(Turn(0, end - len(turn_ids), end, partial(str, text)))
            step = await self._step(text)
            self._metrics |= step.metrics
            if step.done or not stopped or len(self._turns) >= self.plan.max_turns or self._budget == 0:
                ending: Ending = "finished" if stopped and step.done else "truncated"
                return self._rollout(ending, reward=_reward(step))
            with foreign("chat.continue_"):
                context = self._chat.continue_(step.messages, ended=ended)
            if len(self._stream) + len(context) >= self._max_length:
                # The environment's words leave no room for an answer, so nobody reads them.
                return self._rollout("truncated", reward=_reward(step))
            self._expect(context)
            self._tell(self._stream.append_context(context))

    def _expect(self, context: Int32Array) -> None:
        self._saved.expect(context)
        self.discarded = self._saved.discarded

    def _tell(self, tokens: Trace, times: Float64Array | None = None) -> None:
        """Tell the scorers about tokens that were just appended to the stream."""
        if self._scoring is not None and self._scoring.listening and len(tokens):
            start = len(self._stream) - len(tokens)
            self._scoring.span(Span(self.id, 0, len(self._turns), start, tokens, self._chat.decode, times))

    async def _sample_turn(self) -> tuple[Int32Array, FinishReason]:
        """Sample the policy's next turn. A request that is aborted is resumed from its prefix."""
        self.check_cancelled()
        start = len(self._stream) if self._turns else self._opening_tokens
        saved, whole = self._saved.next_turn()
        if saved is not None:
            self._tell(self._stream.append_recorded(saved))
            ids = self._stream.trace().token_ids[start:]
            if whole or int(ids[-1]) in self._sampling.stop_token_ids:
                return ids, "stop"
            if self._budget <= 0:
                return ids, "length"
        fruitless = 0
        while True:
            before = len(self._stream)
            finish = await self._sample()
            self.check_cancelled()
            if finish != "aborted":
                return self._stream.trace().token_ids[start:], finish
            fruitless = fruitless + 1 if len(self._stream) == before else 0
            if fruitless > FRUITLESS_RESUMES:
                raise EpisodeFailed(f"{self._engine.name} aborted {fruitless} times in a row without a token")

    async def _sample(self) -> FinishReason:
        """Send one request to the engine, and keep its tokens as they arrive."""
        self.check_cancelled()
        request = Request(
            id=f"{self.id}/{self._requests}",
            token_ids=self._stream.trace().token_ids,
            sampling=msgspec.structs.replace(self._sampling, max_tokens=self._budget),
            group=self.plan.group,
            priority=self.plan.priority,
            version=self.plan.version,
        )
        self._requests += 1
        self._request = request.id
        try:
            async with closing_deltas(self._engine.generate(request)) as deltas:
                async for delta in deltas:
                    routing = delta.routing if self.plan.keep_routing else None
                    records = delta.logprobs, delta.versions, delta.kept, routing
                    temperature = self._sampling.recorded_temperature
                    new = self._stream.append_sampled(delta.token_ids, *records, temperature=temperature)
                    self._tell(new, None if delta.times is None else np.array(delta.times))
                    if delta.finish == "failed":
                        reason = _first_line(delta.error) or "failed without a reason"
                        raise EpisodeFailed(f"{self._engine.name}: {reason}")
                    if delta.finish is not None:
                        return delta.finish
                    # A held-out rollout, which only one version may sample, is never ended for its scores.
                    if self._scoring is not None and self.plan.version == NO_VERSION and self._scoring.doomed(self.id):
                        await self.cancel(LOW_SCORE)
                    if self.cancelled is not None:
                        # Abort again: the first abort may have reached the engine before the request did.
                        await self.abort_requests()
        except HeadraceError as error:
            raise EpisodeFailed(f"{self._engine.name}: {_describe(error)}") from error
        finally:
            self._request = None
        raise EpisodeFailed(f"{self._engine.name}: the stream ended without a finish")

    async def abort_requests(self) -> None:
        """See `AnyEpisode.abort_requests`."""
        if self._request is not None:
            # An engine that cannot be reached is dead or dying, so its stream ends by itself.
            with suppress(HeadraceError):
                await self._engine.abort([self._request])

    async def _step(self, text: str) -> EnvironmentStep:
        """Return the environment's answer to a turn. Numbers of any type become plain ones."""
        step = await self._ask("environment.step", lambda: self._environment.step(text))
        with foreign("environment.step"):
            return EnvironmentStep(
                messages=step.messages,
                done=bool(step.done),
                reward=None if step.reward is None else float(step.reward),
                metrics={name: float(value) for name, value in step.metrics.items()},
            )

    async def _ask(self, what: str, call: Callable[[], Awaitable[T]]) -> T:
        """Return the environment's answer to this call, unless the episode is told to end meanwhile."""

        async def guarded() -> T:
            with foreign(what):
                return await call()

        try:
            return await self.interruptible(guarded())
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
            raise EpisodeFailed(f"{what}: cancelled by the environment itself") from None

    async def _close(self) -> str:
        """Close the environment, once. Return the reason if closing failed, otherwise an empty text."""
        if self._closed:
            return ""
        self._closed = True
        try:
            with foreign("environment.close"):
                async with asyncio.timeout(CLOSE_SECONDS):
                    await self._environment.close()
        except EpisodeFailed as failure:
            return str(failure)
        return ""

    def _rollout(self, ending: Ending, *, reward: float | None = None, reason: str = "") -> Rollout:
        return Rollout(
            id=self.id,
            index=self.index,
            traces=[self._stream.trace()],
            ending=ending,
            reward=reward,
            reason=reason,
            metrics={"turns": float(len(self._turns)), **self._metrics},
            scores=[] if reward is None else [Score(value=reward, scorer="environment")],
        )

    @property
    def _budget(self) -> int:
        return self._sampling.max_tokens - self._stream.sampled


def _reward(step: EnvironmentStep) -> float | None:
    """Return the environment's own reward, or 0 if the episode was cut off before the environment gave one.

    Return None if the environment ended the episode without a reward: then scorers give one.
    """
    if step.reward is None:
        return None if step.done else 0.0
    if not math.isfinite(step.reward):
        raise EpisodeFailed(f"the reward is {step.reward}, not a finite number")
    return step.reward
