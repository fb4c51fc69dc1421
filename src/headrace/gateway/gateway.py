"""The gateway of a run: its server, its sessions, and the episodes that the sessions become.

Its address and key are in `gateway.json` in the run directory, which only the file's owner can read.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from pathlib import Path

import msgspec

from headrace.engines.base import Sampler
from headrace.errors import UserError
from headrace.gateway.agents import AgentPool
from headrace.gateway.base import Chat
from headrace.gateway.completions import Completions
from headrace.gateway.episode import AgentEpisode, AgentEquipment
from headrace.gateway.messages import Job
from headrace.gateway.server import HttpServer
from headrace.gateway.session import Session, Sessions
from headrace.rollouts.base import EpisodePlan
from headrace.scoring.base import Scoring

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
        self._chat = chat
        self._max_turns = max_turns
        self._agents = agents
        self._session_seconds = session_seconds
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

    def episode(self, plan: EpisodePlan, scoring: Scoring | None = None) -> AgentEpisode:
        """See `EpisodeMaker.episode`."""
        equipment = AgentEquipment(
            session_host=self,
            chat=self._chat,
            agents=self._agents,
            max_turns=self._max_turns,
            timeout=self._session_seconds,
            scoring=scoring,
        )
        return AgentEpisode(plan, equipment)

    def admit(self, session: Session, *, offered: bool) -> None:
        """See `SessionHost.admit`."""
        self.sessions.add(session, offered=offered)

    def dismiss(self, session: Session) -> None:
        """See `SessionHost.dismiss`."""
        self.sessions.remove(session)

    def job(self, session: Session) -> Job:
        """See `SessionHost.job`."""
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


def checked_key(key: str) -> str:
    """Return a key that the user chose. Raises `UserError` if it is not a valid key."""
    if len(key) < 16 or "." in key or any(c.isspace() for c in key) or not key.isascii():
        raise UserError(f"{KEY_VARIABLE}: a key is at least 16 characters, without dots and spaces")
    return key


def _write_private(path: Path, content: bytes) -> None:
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:  # noqa: PTH123
        file.write(content + b"\n")
