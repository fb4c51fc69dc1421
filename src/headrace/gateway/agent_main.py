"""A worker that runs agents: `python -m headrace.gateway.agent_main`. It runs several at a time, each in a thread."""

from __future__ import annotations

import threading

from headrace.channel.worker_side import Owner, die_with_owner, end_descendants
from headrace.gateway.agent_calls import CommandAgent, FunctionAgent
from headrace.gateway.messages import AgentSetup, Job

Agent = FunctionAgent | CommandAgent


def main() -> None:
    """Greet the owner, then run agents until the owner closes the pipe."""
    owner = Owner()
    agent = owner.greet(AgentSetup, load)
    if agent is None:
        return
    for id, job in owner.questions(Job):
        if job is None:
            agent.halt(id)
        else:
            threading.Thread(target=_run, args=(owner, agent, id, job), name=job.id, daemon=True).start()
    agent.end()
    end_descendants()


def load(setup: AgentSetup) -> Agent:
    """Make the agent that the first frame names. Raises `ConfigError`."""
    if setup.command is not None:
        # No foreign code runs in this process, and the process must outlive its owner to end the commands.
        return CommandAgent(setup.command)
    die_with_owner()
    return FunctionAgent(setup.function or "")


def _run(owner: Owner, agent: Agent, id: int, job: Job) -> None:
    owner.answer(id, agent.run(id, job))


if __name__ == "__main__":
    main()
