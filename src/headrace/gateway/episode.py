"""One rollout whose turns an agent takes: a session of the gateway, and the agent that works in it."""

import asyncio
from collections.abc import Sequence

import msgspec
import numpy as np

from headrace.gateway.agents import AgentError
from headrace.gateway.base import Reward
from headrace.gateway.relay import AgentSession, Relay
from headrace.gateway.session import NOTHING
from headrace.rollouts.base import AnyEpisode, Cancelled, EpisodePlan
from headrace.scoring.base import Span, Stage, Turn
from headrace.types import Ending, Rollout, Score, Trace


class AgentEpisode(AnyEpisode):
    """One running rollout whose turns an agent takes.

    It ends with the agent's reward, and fails if no reward comes in time. It has the interface of
    `rollouts.turns.Episode`, so groups, ledgers, admission and training see no difference.
    """

    def __init__(self, plan: EpisodePlan, scoring: Stage | None = None, *, relay: Relay) -> None:
        super().__init__(plan)
        self._relay = relay
        self._chat = relay.chat
        self._timeout = relay.session_seconds
        self._scoring = scoring
        stops = tuple(dict.fromkeys((*self._chat.stop_token_ids, *plan.sampling.stop_token_ids)))
        self._session = AgentSession(
            chat=self._chat,
            prompt=plan.prompt,
            sampling=msgspec.structs.replace(plan.sampling, stop_token_ids=stops),
            group=plan.group,
            priority=plan.priority,
            version=plan.version,
            offered=relay.agents is None,
            listen=self._tell if scoring is not None and scoring.listening else None,
        )
        # An agent's process cannot be resumed, so the tokens that it had in a previous process are of no use.
        self.discarded = sum(trace.trained_tokens for trace in plan.saved)

    @property
    def traces(self) -> Sequence[Trace]:
        """The tokens so far, with one trace for each stream of the agent's turns."""
        return self._session.traces()

    @property
    def turns(self) -> Sequence[Turn]:
        """See `AnyEpisode.turns`."""
        return self._session.conversation.placed_turns()

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
        try:
            outcome = await self.interruptible(self._work(self._session))
        except Cancelled:
            return self._rollout("aborted", reason=self.cancelled or "")
        finally:
            self._relay.forget(self._session)
        return self._ended(self._session, outcome)

    async def discard(self) -> None:
        """See `AnyEpisode.discard`."""
        self._relay.forget(self._session)
        if self._scoring is not None:
            self._scoring.forget(self.id)

    def _tell(self, turn: int, start: int, tokens: Trace) -> None:
        """Pass tokens to the scorers after their turn has ended."""
        if self._scoring is not None and len(tokens):
            self._scoring.span(Span(self.id, None, turn, start, tokens, self._chat.decode))

    async def _work(self, session: AgentSession) -> Reward | str:
        """Return the reward, or the reason why there is none."""
        outcome = await (self._work_outside(session) if self._relay.agents is None else self._work_inside(session))
        # What was recorded arrives before the gateway's answer. A reward may come another way, and faster.
        await self._relay.settle(session)
        return session.lost or outcome

    async def _work_outside(self, session: AgentSession) -> Reward | str:
        """Offer the session to agents from outside."""
        self._relay.open(session)
        # This waits without a deadline of its own until an agent takes the session: `[pipeline] stall_seconds` ends
        # the wait.
        await session.taken.wait()
        try:
            async with asyncio.timeout(self._timeout):
                return await asyncio.shield(session.outcome)
        except TimeoutError:
            return self._late()

    async def _work_inside(self, session: AgentSession) -> Reward | str:
        """Run one of the run's own agents. If the gateway dies, the agent's requests fail, and it ends by itself."""
        agents = self._relay.agents
        assert agents is not None
        self._relay.open(session)  # The gateway has opened it when there is a place.
        async with agents.places:
            await session.opened.wait()
            session.taken.set()
            try:
                async with asyncio.timeout(self._timeout):
                    done = await agents.run(self._relay.job(session))
            except TimeoutError:
                return self._late()
            except AgentError as error:
                return str(error)
        await self._relay.settle(session)
        posted = session.outcome.result() if session.outcome.done() else None
        returned = None if done.reward is None else Reward(reward=done.reward, metrics=done.metrics)
        if isinstance(posted, Reward) and returned is not None and posted.reward != returned.reward:
            return f"the agent posted the reward {posted.reward:g} and returned {returned.reward:g}"
        return posted or returned or "the agent ended without a reward"

    def _late(self) -> str:
        return f"no reward within {self._timeout:g} s ([task] timeout)"

    def _ended(self, session: AgentSession, outcome: Reward | str) -> Rollout:
        turns = session.conversation.turns
        if isinstance(outcome, Reward):
            if not turns:
                return self._rollout("failed", reason="the agent has a reward, but made no request in its session")
            return self._rollout("truncated" if session.exhausted else "finished", outcome)
        if session.lost or session.failure:
            return self._rollout("failed", reason=session.lost or session.failure)
        if session.exhausted and turns:
            # As in every episode, one that was cut before it earned anything gets a reward of 0 and is trained.
            return self._rollout("truncated", Reward(reward=0.0))
        return self._rollout("failed", reason=outcome)

    def _rollout(self, ending: Ending, outcome: Reward | None = None, *, reason: str = "") -> Rollout:
        conversation = self._session.conversation
        traces, turns = self._session.traces(), len(conversation.turns)
        return Rollout(
            id=self.id,
            index=self.index,
            traces=traces or [NOTHING],
            ending=ending,
            reward=None if outcome is None else outcome.reward,
            reason=reason,
            scores=[] if outcome is None else [Score(value=outcome.reward, scorer="agent")],
            metrics={"turns": float(turns), "traces": float(len(traces)), **(outcome.metrics if outcome else {})},
        )
