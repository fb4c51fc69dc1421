"""The run's own agents, in worker processes: foreign code that hangs, raises or dies costs its rollouts, never the run.

A worker runs several agents at a time. One with an agent that overran its time gets no new ones, and is killed with all
that it started when its other agents have ended; a fresh one takes its place.
"""

from __future__ import annotations

from pathlib import Path

from headrace.channel.frames import encode
from headrace.channel.pipes import CLOSE_SECONDS
from headrace.channel.worker_pool import PoolClosed, WorkerDied, WorkerPool
from headrace.errors import ConfigError
from headrace.gateway.messages import AgentResult, AgentSetup, Job


class AgentError(Exception):
    """An agent ended without a reward; the text is the reason, in one line."""


class AgentPool:
    """Runs agents, `workers` processes with `concurrency` agents each; more wait for their turn."""

    def __init__(self, setup: AgentSetup, *, workers: int, concurrency: int, log: Path | None = None) -> None:
        """What agents print goes to `log`, or to this process's standard error."""
        self._pool = WorkerPool(
            "headrace.gateway.agent_main",
            setup,
            workers=workers,
            concurrency=concurrency,
            grace=CLOSE_SECONDS,  # A worker of commands ends them when its pipe ends.
            log=log,
        )
        self.places = self._pool.places
        """Room for so many agents; whoever is ahead in it holds its place no longer than its session may last."""

    async def start(self) -> None:
        """Start every worker; raises `ConfigError` if the agent cannot be used."""
        try:
            await self._pool.start()
        except ConfigError as error:
            raise ConfigError(_refusal(error)) from error

    async def run(self, job: Job) -> AgentResult:
        """Run an agent, in a place, to its end; cancelling this gives it up. Raises `AgentError`.

        The caller owns this wait: a session has its deadline.
        """
        try:
            question = encode(job)
        except (TypeError, ValueError) as error:
            raise AgentError(f"the prompt's data cannot be sent to an agent: {error}") from error
        try:
            done = await self._pool.ask(question, AgentResult)
        except WorkerDied as error:
            raise AgentError(f"the agent's process {error}") from error
        except PoolClosed:
            raise AgentError("the agents are closed") from None
        except ConfigError as error:
            raise AgentError(f"an agent's worker could not be started again: {_refusal(error)}") from error
        if done.error:
            raise AgentError(done.error)
        return done

    async def close(self) -> None:
        """End all workers and their agents. Idempotent."""
        await self._pool.close()


def _refusal(error: ConfigError) -> str:
    return f"[task] agent: {error}"
