"""The task of agents: prompts from a dataset, on which agents work through the gateway."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from headrace.errors import HeadraceError
from headrace.gateway.agents import AgentPool
from headrace.types import Prompt


class AgentTask:
    """A `Task` whose episodes are sessions of the gateway. The task owns its agents: closing the task ends them."""

    def __init__(
        self,
        train: Sequence[Prompt],
        heldout: Sequence[Prompt],
        agents: AgentPool | None,
        *,
        timeout: float,
        demonstration_field: str | None = None,
    ) -> None:
        """Make a task. Without `agents`, agents from outside take the sessions."""
        self.train = train
        self.heldout = heldout
        self.agents = agents
        self.timeout = timeout
        """Seconds in which a session must have its reward."""
        self._demonstration_field = demonstration_field

    def episode(self, prompt: Prompt) -> NoReturn:
        """Raise `HeadraceError`: there is no environment, because agents take their turns through the gateway."""
        raise HeadraceError("the rollouts of agents come from the gateway, not from an environment")

    def demonstration(self, prompt: Prompt) -> str | None:
        """Return the correct answer from the prompt's data, if there is one as text or as a number."""
        value = prompt.data.get(self._demonstration_field) if self._demonstration_field is not None else None
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            return None
        return str(value)

    async def start(self) -> None:
        """Start the agents' workers."""
        if self.agents is not None:
            await self.agents.start()

    async def close(self) -> None:
        """End the agents. Idempotent."""
        if self.agents is not None:
            await self.agents.close()
