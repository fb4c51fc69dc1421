"""An episode whose turns an agent takes. It ends with the agent's reward, and fails if no reward comes in time.

It has the interface of `rollouts.Episode`, so groups, ledgers, admission and training see no difference.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np

from headrace.gateway.agents import AgentError, AgentPool
from headrace.gateway.base import Chat, Reward
from headrace.gateway.messages import Job
from headrace.gateway.session import Session
from headrace.rollouts.base import AnyEpisode, Cancelled, EpisodePlan
from headrace.scoring.base import Scoring, Span, Turn
from headrace.types import Ending, Rollout, Score, Trace


class SessionHost(Protocol):
    """The part of the gateway that an episode uses."""

    def admit(self, session: Session, *, offered: bool) -> None:
        """Open a session."""
        ...

    def dismiss(self, session: Session) -> None:
        """Close a session. Idempotent."""
        ...

    def job(self, session: Session) -> Job:
        """Return what an agent is told about its session."""
        ...


@dataclass(frozen=True, kw_only=True)
class AgentEquipment:
    """The objects and settings that the episodes of agents use, the same for the whole run."""

    session_host: SessionHost
    chat: Chat
    agents: AgentPool | None
    """The run's own agents. None means that sessions are offered to agents from outside."""
    max_turns: int
    timeout: float
    """Seconds in which a session must have its reward."""
    scoring: Scoring | None = None
    """Gets the tokens of every turn; None if no scorer listens."""


class AgentEpisode(AnyEpisode):
    """One running rollout whose turns an agent takes."""

    def __init__(self, plan: EpisodePlan, equipment: AgentEquipment) -> None:
        super().__init__(plan)
        self._session_host = equipment.session_host
        self._agents = equipment.agents
        self._chat = equipment.chat
        self._max_turns = equipment.max_turns
        self._timeout = equipment.timeout
        self._scoring = equipment.scoring
        self._session: Session | None = None
        # An agent's process cannot be resumed, so the tokens that it had in a previous process are of no use.
        self.discarded = sum(trace.trained_tokens for trace in plan.saved)

    @property
    def traces(self) -> Sequence[Trace]:
        """The tokens so far, with one trace for each stream of the agent's turns.

        There is none before the first turn.
        """
        return [] if self._session is None else self._session.conversation.traces()

    @property
    def turns(self) -> Sequence[Turn]:
        """The policy's turns so far, for scorers."""
        return [] if self._session is None else self._session.conversation.placed_turns()

    def since(self, start: int) -> Trace | None:
        """Return None, because an agent cannot be resumed; it starts again."""
        return None

    @property
    def answer(self) -> str:
        """Everything after the openings of the traces, as text for people to read."""
        begins = [(trace, np.flatnonzero(trace.trained)) for trace in self.traces]
        return "\n\n".join(self._chat.decode(trace.token_ids[at[0] :]) for trace, at in begins if len(at))

    async def prepare(self) -> None:
        """Do nothing, because an agent opens its conversation itself."""

    async def run(self) -> Rollout:
        """Run an agent until it has its reward."""
        session = self._session = self._open()
        try:
            outcome = await self.interruptible(self._work(session))
        except Cancelled:
            return self._rollout("aborted", reason=self.cancelled or "")
        finally:
            self._session_host.dismiss(session)
        return self._ended(session, outcome)

    async def discard(self) -> None:
        """Close an episode that will not be run. Idempotent."""
        if self._session is not None:
            self._session_host.dismiss(self._session)
        if self._scoring is not None:
            self._scoring.forget(self.id)

    def _open(self) -> Session:
        stops = tuple(dict.fromkeys((*self._chat.stop_token_ids, *self.plan.sampling.stop_token_ids)))
        return Session(
            chat=self._chat,
            prompt=self.prompt,
            sampling=msgspec.structs.replace(self.plan.sampling, stop_token_ids=stops),
            max_turns=self._max_turns,
            group=self.plan.group,
            priority=self.plan.priority,
            listen=self._tell if self._scoring is not None and self._scoring.listening else None,
        )

    def _tell(self, turn: int, start: int, tokens: Trace) -> None:
        """Pass tokens to the scorers after their turn has ended."""
        if self._scoring is not None and len(tokens):
            self._scoring.span(Span(self.id, None, turn, start, tokens, self._chat.decode))

    async def _work(self, session: Session) -> Reward | str:
        """Return the reward, or the reason why there is none."""
        if self._agents is None:
            return await self._offer(session)
        async with self._agents.places:
            self._session_host.admit(session, offered=False)
            session.begin(self._timeout)
            try:
                async with asyncio.timeout(self._timeout):
                    done = await self._agents.run(self._session_host.job(session))
            except TimeoutError:
                return self._late()
            except AgentError as error:
                return str(error)
        posted = session.reward.result() if session.reward.done() else None
        returned = None if done.reward is None else Reward(reward=done.reward, metrics=done.metrics)
        if posted is not None and returned is not None and posted.reward != returned.reward:
            return f"the agent posted the reward {posted.reward:g} and returned {returned.reward:g}"
        return posted or returned or "the agent ended without a reward"

    async def _offer(self, session: Session) -> Reward | str:
        self._session_host.admit(session, offered=True)
        # This waits without a deadline of its own until an agent takes the session: `[pipeline] stall_seconds` ends the
        # wait.
        await session.taken.wait()
        try:
            async with asyncio.timeout(session.seconds_left()):
                return await asyncio.shield(session.reward)
        except TimeoutError:
            return self._late()

    def _ended(self, session: Session, outcome: Reward | str) -> Rollout:
        turns = session.conversation.turns
        if isinstance(outcome, Reward) and not turns:
            return self._rollout("failed", reason="the agent has a reward, but made no request in its session")
        if isinstance(outcome, Reward):
            ending: Ending = "truncated" if session.exhausted else "finished"
            return self._rollout(ending, outcome)
        if session.failure:
            return self._rollout("failed", reason=session.failure)
        if session.exhausted and turns:
            # As in every episode, one that was cut before it earned anything gets a reward of 0 and is trained.
            return self._rollout("truncated", Reward(reward=0.0))
        return self._rollout("failed", reason=outcome)

    def _rollout(self, ending: Ending, outcome: Reward | None = None, *, reason: str = "") -> Rollout:
        traces = list(self.traces)
        turns = len(self._session.conversation.turns) if self._session is not None else 0
        return Rollout(
            id=self.id,
            index=self.index,
            traces=traces or [Trace.of_context(np.zeros(0, np.int32))],
            ending=ending,
            reward=None if outcome is None else outcome.reward,
            reason=reason,
            scores=[] if outcome is None else [Score(value=outcome.reward, scorer="agent")],
            metrics={"turns": float(turns), "traces": float(len(traces)), **(outcome.metrics if outcome else {})},
        )

    def _late(self) -> str:
        return f"no reward within {self._timeout:g} s ([task] timeout)"
