"""One episode: the policy speaks, the environment answers, until one of them ends it.

The episode is one growing token stream. What was sampled is appended exactly as the engine reported it, what the
environment says is appended as untrained tokens, and nothing that is in the stream is ever tokenised again. An
episode always becomes a `Rollout`: a failure of the engine or of the environment is a value with a reason.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
import numpy as np

from headrace.engines.base import FinishReason, Request, Sampler, Sampling, closing_deltas
from headrace.errors import HeadraceError
from headrace.rollouts.base import ChatFormat
from headrace.rollouts.failures import Cancelled, Failure, describe, first_line, foreign
from headrace.rollouts.saved import SavedTurns
from headrace.rollouts.stream import TokenStream
from headrace.tasks.base import Environment, EnvironmentStep
from headrace.types import Ending, Int32Array, Prompt, Rollout, Trace

T = TypeVar("T")

CLOSE_SECONDS = 10.0
FRUITLESS_RESUMES = 100
"""Aborts in a row without a token between them, after which an episode no longer asks its engine again."""


class Episode:
    """One rollout in the making, used once: `prepare`, then `run`.

    The two phases keep a synchronous run deterministic: all episodes are prepared first (environments may take any
    time), and `run` submits its request before it first yields to the event loop, so engines see requests in the order
    in which episodes are run. `sampling.max_tokens` is the budget over all turns.
    """

    def __init__(
        self,
        *,
        id: str,
        index: int,
        prompt: Prompt,
        environment: Environment,
        chat: ChatFormat,
        engine: Sampler,
        sampling: Sampling,
        max_turns: int = 1,
        keep_routing: bool = False,
        group: str = "",
        priority: int = 0,
        deadline: float | None = None,
        prefix: Trace | None = None,
        saved: Trace | None = None,
        on_discard: Callable[[int], None] = lambda tokens: None,
    ) -> None:
        """`deadline` is in seconds, for preparing and for running each; None leaves it to the caller's own.

        With `prefix`, the first turn goes on from these tokens of an earlier attempt, opening included, as they are.
        `saved` is what an earlier life of this episode had come to, a prefix of it included: its turns are taken as
        they are and told to the environment again, as long as that answers as it did. `on_discard` hears of sampled
        tokens that are of no use.
        """
        self.id = id
        self.index = index
        self.prompt = prompt
        self._environment = environment
        self._chat = chat
        self._engine = engine
        stops = dict.fromkeys((*chat.stop_token_ids, *sampling.stop_token_ids))
        self._sampling = msgspec.structs.replace(sampling, stop_token_ids=tuple(stops))
        self._max_turns = max_turns
        self._keep_routing = keep_routing
        self._group = group
        self._priority = priority
        self._deadline = deadline
        self._prefix = prefix

        self._saved = SavedTurns(saved, on_discard)
        self._stream = TokenStream()
        self._opening_tokens = 0
        self._metrics: dict[str, float] = {}
        self._turns = 0
        self._requests = 0
        self._request: str | None = None
        """The id of the request that the engine is working on."""
        self._calling: asyncio.Task[Any] | None = None
        """The environment's method that is being waited for."""
        self._doing = "waiting to be prepared"
        self._prepared = False
        self._closed = False
        self._cancelled: str | None = None
        self._failed: str | None = None

    @property
    def partial(self) -> Trace:
        """The tokens so far."""
        return self._stream.trace()

    @property
    def cancelled(self) -> bool:
        """Whether it was told to end."""
        return self._cancelled is not None

    @property
    def answer(self) -> str:
        """All that follows the opening, as text for people to read."""
        return self._chat.decode(self._stream.token_ids()[self._opening_tokens :])

    def since(self, start: int) -> Trace | None:
        """Its tokens after the first `start`, if there are any."""
        return self._stream.since(start)

    async def prepare(self) -> None:
        """Reset the environment and render its opening. A failure is kept for `run` to report. Idempotent."""
        if self._prepared:
            return
        self._prepared = True
        try:
            async with asyncio.timeout(self._deadline):
                messages = await self._ask("environment.reset", self._environment.reset)
            self._begin(self._open(messages))
        except TimeoutError:
            self._failed = self._late()
        except Failure as failure:
            self._failed = str(failure)
        except Cancelled:
            pass

    def _begin(self, opening: Int32Array) -> None:
        self._opening_tokens = len(opening)
        self._saved.expect(opening)
        if self._prefix is None:
            self._stream.append_context(opening)
            return
        if not np.array_equal(self._prefix.token_ids[: len(opening)], opening):
            raise Failure("the environment opens with other tokens than those that the episode is to go on from")
        self._stream.append_recorded(self._prefix)

    async def run(self) -> Rollout:
        """Take turns until the episode ends; the environment is closed whatever happens."""
        try:
            rollout = await self._run()
        finally:
            closing = await self._close()
        if closing and rollout.ending != "failed":
            rollout = self._rollout("failed", reason=closing)
        return rollout

    async def cancel(self, reason: str) -> None:
        """End the episode now: its request is aborted at the engine and `run` returns what there is."""
        if self._cancelled is not None:
            return
        self._cancelled = reason
        if self._calling is not None:
            self._calling.cancel()
        await self._abort_request()

    async def discard(self) -> None:
        """Close an episode that will not be run."""
        await self._close()

    async def _run(self) -> Rollout:
        if not self._prepared:
            self._failed = "the episode was run before it was prepared"
        if self._failed is not None:
            return self._rollout("failed", reason=self._failed)
        try:
            async with asyncio.timeout(self._deadline):
                return await self._take_turns()
        except TimeoutError:
            return self._rollout("failed", reason=self._late())
        except Failure as failure:
            return self._rollout("failed", reason=str(failure))
        except Cancelled:
            return self._rollout("aborted", reason=self._cancelled or "")

    async def _take_turns(self) -> Rollout:
        while True:
            turn_ids, finish = await self._sample_turn()
            self._turns += 1
            stopped = finish == "stop"
            step = await self._step(turn_ids[:-1] if stopped else turn_ids)
            self._metrics |= step.metrics
            if step.done or not stopped or self._turns >= self._max_turns or self._budget == 0:
                ending: Ending = "finished" if stopped and step.done else "truncated"
                return self._rollout(ending, reward=_reward(step))
            ended = int(turn_ids[-1]) in self._chat.stop_token_ids
            with foreign("chat.continue_"):
                context = self._chat.continue_(step.messages, ended=ended)
            self._saved.expect(context)
            self._stream.append_context(context)

    async def _sample_turn(self) -> tuple[Int32Array, FinishReason]:
        """The policy's next turn, over as many requests as it takes: an aborted one is resumed by its prefix."""
        self._check_cancelled()
        start = len(self._stream) if self._turns else self._opening_tokens
        saved, whole = self._saved.next_turn()
        if saved is not None:
            self._stream.append_recorded(saved)
            ids = self._stream.token_ids()[start:]
            if whole or int(ids[-1]) in self._sampling.stop_token_ids:
                return ids, "stop"
            if self._budget <= 0:
                return ids, "length"
        fruitless = 0
        while True:
            before = len(self._stream)
            finish = await self._sample()
            self._check_cancelled()
            if finish != "aborted":
                return self._stream.token_ids()[start:], finish
            fruitless = fruitless + 1 if len(self._stream) == before else 0
            if fruitless > FRUITLESS_RESUMES:
                raise Failure(f"{self._engine.name} aborted {fruitless} times in a row without a token")

    async def _sample(self) -> FinishReason:
        """One request to the engine; its tokens are kept as they come."""
        self._check_cancelled()
        request = Request(
            id=f"{self.id}/{self._requests}",
            token_ids=self._stream.token_ids(),
            sampling=msgspec.structs.replace(self._sampling, max_tokens=self._budget),
            group=self._group,
            priority=self._priority,
        )
        self._requests += 1
        self._request = request.id
        self._doing = f"waiting for tokens from {self._engine.name}"
        try:
            async with closing_deltas(self._engine.generate(request)) as deltas:
                async for delta in deltas:
                    routing = delta.routing if self._keep_routing else None
                    self._stream.append_sampled(delta.token_ids, delta.logprobs, delta.versions, delta.kept, routing)
                    if delta.finish == "failed":
                        raise Failure(f"{self._engine.name}: {first_line(delta.error) or 'failed without a reason'}")
                    if delta.finish is not None:
                        return delta.finish
                    if self.cancelled:
                        # The first abort may have overtaken the request on its way to the engine.
                        await self._abort_request()
        except HeadraceError as error:
            raise Failure(f"{self._engine.name}: {describe(error)}") from error
        finally:
            self._request = None
        raise Failure(f"{self._engine.name}: the stream ended without a finish")

    async def _abort_request(self) -> None:
        if self._request is not None:
            # An engine that cannot be told is dead or dying, and then its stream ends by itself.
            with suppress(HeadraceError):
                await self._engine.abort([self._request])

    async def _step(self, spoken: Int32Array) -> EnvironmentStep:
        """The environment's answer to a turn, in plain numbers whatever number types it likes."""
        with foreign("chat.decode"):
            text = self._chat.decode(spoken)
        step = await self._ask("environment.step", lambda: self._environment.step(text))
        with foreign("environment.step"):
            return EnvironmentStep(
                messages=step.messages,
                done=bool(step.done),
                reward=None if step.reward is None else float(step.reward),
                metrics={name: float(value) for name, value in step.metrics.items()},
            )

    def _open(self, messages: list[dict[str, str]]) -> Int32Array:
        with foreign("the opening"):
            if messages:
                return self._chat.open(messages)
            if self.prompt.text is not None:
                return self._chat.encode(self.prompt.text)
        raise Failure("the environment opened without a message and the prompt has no text")

    async def _ask(self, what: str, call: Callable[[], Awaitable[T]]) -> T:
        """What the environment answers; in a task of its own, so that `cancel` reaches it."""
        self._check_cancelled()

        async def guarded() -> T:
            with foreign(what):
                return await call()

        self._doing = f"waiting for {what}"
        self._calling = asyncio.create_task(guarded())
        try:
            answer: T = await self._calling
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
            if not self.cancelled:
                raise Failure(f"{what}: cancelled by the environment itself") from None
            raise Cancelled from None
        finally:
            self._calling = None
        self._check_cancelled()
        return answer

    async def _close(self) -> str:
        """Close the environment, once; the reason if that failed."""
        if self._closed:
            return ""
        self._closed = True
        try:
            with foreign("environment.close"):
                async with asyncio.timeout(CLOSE_SECONDS):
                    await self._environment.close()
        except Failure as failure:
            return str(failure)
        return ""

    def _rollout(self, ending: Ending, *, reward: float | None = None, reason: str = "") -> Rollout:
        return Rollout(
            id=self.id,
            index=self.index,
            traces=[self.partial],
            ending=ending,
            reward=reward,
            reason=reason,
            metrics={"turns": float(self._turns), **self._metrics},
        )

    def _check_cancelled(self) -> None:
        if self.cancelled:
            raise Cancelled

    @property
    def _budget(self) -> int:
        return self._sampling.max_tokens - self._stream.sampled

    def _late(self) -> str:
        return f"{self._deadline:g} s passed while {self._doing}"


def _reward(step: EnvironmentStep) -> float:
    """The episode's reward: what the environment gave, or 0 where it was cut off before it gave any."""
    if step.reward is None:
        if step.done:
            raise Failure("the environment ended the episode without a reward")
        return 0.0
    if not math.isfinite(step.reward):
        raise Failure(f"the reward is {step.reward}, not a finite number")
    return step.reward
