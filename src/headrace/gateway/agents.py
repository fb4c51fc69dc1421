"""The task of agents, and the worker processes that run the run's own agents.

An agent that hangs, raises or dies fails its rollouts, never the run. A worker runs several agents at a time. When one
of them exceeds its time, the worker gets no new agents. Once its other agents have ended, the worker is killed together
with everything that it started, and a new worker replaces it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import msgspec

from headrace.channel.worker_pool import CLOSE_SECONDS, PoolClosed, WorkerDied, WorkerPool
from headrace.errors import ConfigError, HeadraceError
from headrace.gateway.agent_main import AgentResult, AgentSetup, Job
from headrace.tasks.base import written_answer
from headrace.types import Prompt


class AgentError(Exception):
    """An agent ended without a reward. The text is the reason, in one line."""


class AgentPool(WorkerPool):
    """A pool of `workers` processes that run `concurrency` agents each. Further agents wait for a place.

    A caller waits for a place at most as long as the sessions before it may last.
    """

    def __init__(self, setup: AgentSetup, *, workers: int, concurrency: int) -> None:
        """Make a pool without starting workers. What agents print goes to this process's standard error."""
        super().__init__(
            "headrace.gateway.agent_main",
            setup,
            workers=workers,
            concurrency=concurrency,
            grace=CLOSE_SECONDS,  # When its pipe closes, a worker first ends the commands that its agents run.
        )

    async def start(self) -> None:
        """Start every worker. Raises `ConfigError` if the agent cannot be used."""
        try:
            await super().start()
        except ConfigError as error:
            raise ConfigError(_refusal(error)) from error

    async def run(self, job: Job) -> AgentResult:
        """Run an agent to its end. Raises `AgentError`. Cancelling this call abandons the agent.

        The caller must hold one of the `places`. It waits for a place itself, because a session has its own deadline.
        """
        try:
            question = msgspec.json.encode(job)
        except (TypeError, ValueError) as error:
            raise AgentError(f"the prompt's data cannot be sent to an agent: {error}") from error
        try:
            done = await self.ask(question, AgentResult)
        except WorkerDied as error:
            raise AgentError(f"the agent's process {error}") from error
        except PoolClosed:
            raise AgentError("the agents are closed") from None
        except ConfigError as error:
            raise AgentError(f"an agent's worker could not be started again: {_refusal(error)}") from error
        if done.error:
            raise AgentError(done.error)
        return done


def _refusal(error: ConfigError) -> str:
    return f"[task] agent: {error}"


@dataclass
class AgentTask:
    """A `Task` whose episodes are sessions of the gateway. The task owns its agents: closing the task ends them."""

    train: Sequence[Prompt]
    heldout: Sequence[Prompt]
    agents: AgentPool | None
    """The run's own agents. If None, agents from outside take the sessions."""
    timeout: float
    """Seconds in which a session must have its reward."""
    demonstration_field: str | None = None

    def episode(self, prompt: Prompt) -> NoReturn:
        """Raise `HeadraceError`: there is no environment, because agents take their turns through the gateway."""
        raise HeadraceError("the rollouts of agents come from the gateway, not from an environment")

    def demonstration(self, prompt: Prompt) -> str | None:
        """Return the correct answer from the prompt's data, if there is one as text or as a number."""
        return written_answer(prompt, self.demonstration_field)

    async def start(self) -> None:
        """Start the agents' workers."""
        if self.agents is not None:
            await self.agents.start()

    async def close(self) -> None:
        """End the agents. Idempotent."""
        if self.agents is not None:
            await self.agents.close()
