"""The gateway of a run: its server, its sessions, and the episodes that the sessions become.

Its address and key are in `gateway.json` in the run directory, which only the file's owner can read.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np

from headrace.engines.base import Sampler
from headrace.errors import UserError
from headrace.gateway.agent_main import Job
from headrace.gateway.agents import AgentError, AgentPool
from headrace.gateway.base import Chat, Reward
from headrace.gateway.completions import Completions
from headrace.gateway.server import HttpServer
from headrace.gateway.session import Session, Sessions
from headrace.rollouts.base import AnyEpisode, Cancelled, EpisodePlan
from headrace.scoring.base import Span, Stage, Turn
from headrace.types import Ending, Rollout, Score, Trace

KEY_VARIABLE = "HEADRACE_GATEWAY_KEY"


class Gateway:
    """The gateway, which serves from `start` to `close`."""

    def __init__(
        self,
        engine: Sampler,
        chat: Chat,
        *,
        model: str,
        bind: str = "127.0.0.1",
        port: int = 0,
        key: str | None = None,
        max_length: int,
        max_tokens: int,
        max_turns: int,
        stop_token_ids: tuple[int, ...] = (),
        agents: AgentPool | None = None,
        session_seconds: float,
        file: Path | None = None,
        note: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Make a gateway. `key` is random unless given; address and key are written to `file`."""
        self.key = checked_key(key) if key else secrets.token_urlsafe(24).replace(".", "")
        self.sessions = Sessions()
        self.model = model
        self.chat = chat
        self.max_turns = max_turns
        self.agents = agents
        """The run's own agents. None means that sessions are offered to agents from outside."""
        self.session_seconds = session_seconds
        """Seconds in which a session must have its reward."""
        self._file = file
        self._note = note
        completions = Completions(
            engine, chat, max_length=max_length, max_tokens=max_tokens, stop_token_ids=stop_token_ids, note=note
        )
        self._server = HttpServer(
            completions,
            self.sessions,
            chat,
            key=self.key,
            model=model,
            bind=bind,
            port=port,
            session_seconds=session_seconds,
        )

    @property
    def base_url(self) -> str:
        """The base URL for an `openai.OpenAI` client."""
        return self._server.base_url

    async def start(self) -> None:
        """Listen, and report the address. Raises `UserError`."""
        await self._server.start()
        where = ""
        if self._file is not None:
            _write_private(self._file, msgspec.json.encode({"base_url": self.base_url, "api_key": self.key}))
            where = f", its key is in {self._file}"
        self._note(f"the gateway listens at {self.base_url}{where}")

    async def close(self) -> None:
        """End every session and stop listening. Idempotent."""
        self.sessions.close()
        await self._server.close()
        if self._file is not None:
            self._file.unlink(missing_ok=True)

    def episode(self, plan: EpisodePlan, scoring: Stage | None = None) -> AgentEpisode:
        """See `EpisodeMaker.episode`."""
        return AgentEpisode(plan, self, scoring)

    def job(self, session: Session) -> Job:
        """Return what an agent is told about its session."""
        return Job(
            id=session.id,
            base_url=self.base_url,
            api_key=self._server.session_key(session),
            model=self.model,
            prompt=session.prompt.id,
            messages=session.prompt.messages or [],
            text=session.prompt.text,
            data=session.prompt.data,
        )


class AgentEpisode(AnyEpisode):
    """One running rollout whose turns an agent takes.

    It ends with the agent's reward, and fails if no reward comes in time. It has the interface of `rollouts.Episode`,
    so groups, ledgers, admission and training see no difference.
    """

    def __init__(self, plan: EpisodePlan, gateway: Gateway, scoring: Stage | None = None) -> None:
        """Make an episode. `scoring` gets the tokens of every turn; None if no scorer listens."""
        super().__init__(plan)
        self._gateway = gateway
        self._chat = gateway.chat
        self._timeout = gateway.session_seconds
        self._scoring = scoring
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
            self._gateway.sessions.remove(session)
        return self._ended(session, outcome)

    async def discard(self) -> None:
        """Close an episode that will not be run. Idempotent."""
        if self._session is not None:
            self._gateway.sessions.remove(self._session)
        if self._scoring is not None:
            self._scoring.forget(self.id)

    def _open(self) -> Session:
        stops = tuple(dict.fromkeys((*self._chat.stop_token_ids, *self.plan.sampling.stop_token_ids)))
        return Session(
            chat=self._chat,
            prompt=self.prompt,
            sampling=msgspec.structs.replace(self.plan.sampling, stop_token_ids=stops),
            max_turns=self._gateway.max_turns,
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
        agents = self._gateway.agents
        if agents is None:
            return await self._offer(session)
        async with agents.places:
            self._gateway.sessions.add(session)
            session.begin(self._timeout)
            try:
                async with asyncio.timeout(self._timeout):
                    done = await agents.run(self._gateway.job(session))
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
        self._gateway.sessions.add(session, offered=True)
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


def checked_key(key: str) -> str:
    """Return a key that the user chose. Raises `UserError` if it is not a valid key."""
    if len(key) < 16 or "." in key or any(c.isspace() for c in key) or not key.isascii():
        raise UserError(f"{KEY_VARIABLE}: a key is at least 16 characters, without dots and spaces")
    return key


def _write_private(path: Path, content: bytes) -> None:
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:  # noqa: PTH123
        file.write(content + b"\n")
