"""A worker that runs agents: `python -m headrace.gateway.agent_main`. It runs several at a time, each in a thread.

An agent is a function, which is called by the names of its parameters, or a command, which finds its session in its
environment and the rest as JSON on its standard input. docs/gateway.md lists what each of them gets. A function returns
its reward: a number, or a dict with "reward" and further numbers. A function that posts its reward returns None, and a
command always posts it.
"""

import asyncio
import contextlib
import inspect
import math
import os
import signal
import subprocess
import threading
from collections.abc import Mapping
from typing import Any

import msgspec

from headrace.channel.worker_side import Owner, die_with_parent, end_descendants
from headrace.errors import ConfigError
from headrace.reference import describe, import_function

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class AgentSetup(msgspec.Struct, kw_only=True):
    """The first frame to a worker, which says what its agents are. Either `function` or `command` is given."""

    function: str | None = None
    command: list[str] | None = None


class Job(msgspec.Struct, kw_only=True):
    """A job for a worker: one agent to run."""

    base_url: str
    api_key: str
    model: str
    session: str
    """The id of the agent's session."""
    prompt: str
    """The prompt's id."""
    messages: list[dict[str, str]]
    text: str | None = None
    data: dict[str, Any] = {}


class AgentResult(msgspec.Struct, kw_only=True):
    """How an agent ended: with a reward, without one (because the agent posted it), or with an error."""

    reward: float | None = None
    metrics: dict[str, float] = {}
    error: str = ""


class _AgentProblem(Exception):
    """A function raised an exception, or has a parameter for which there is no value."""


class _FunctionAgent:
    """The user's function. An `async` function gets an event loop of its own."""

    def __init__(self, reference: str) -> None:
        self._function = import_function(reference)
        self._reference = reference
        try:
            self._parameters = inspect.signature(self._function).parameters
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{reference!r}: its parameters cannot be read: {error}") from error

    def run(self, id: int, job: Job) -> AgentResult:
        try:
            return _done(self._call(_bind(self._parameters, job)))
        except _AgentProblem as error:
            return AgentResult(error=str(error))

    def _call(self, arguments: dict[str, Any]) -> Any:
        try:
            result = self._function(**arguments)
            return asyncio.run(_finish(result)) if inspect.isawaitable(result) else result
        except BaseException as error:  # Foreign code: also `SystemExit` and `asyncio.CancelledError` need an answer.
            raise _AgentProblem(f"the agent raised {describe(error)}") from error

    def halt(self, id: int) -> None:
        """Do nothing, because a thread cannot be ended. Its session is closed, and its worker is replaced."""

    def end(self) -> None:
        """Do nothing, because the threads end with the process."""


class _CommandAgent:
    """The user's program. Each session starts one process, in a process group of its own."""

    def __init__(self, command: list[str]) -> None:
        self._command = command
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._halted: set[int] = set()
        self._turn = threading.Lock()

    def run(self, id: int, job: Job) -> AgentResult:
        environment = {"OPENAI_BASE_URL": job.base_url, "OPENAI_API_KEY": job.api_key, "HEADRACE_SESSION": job.session}
        try:
            with self._turn:
                if id in self._halted:
                    return AgentResult(error="the agent was ended before it began")
                process = self._processes[id] = subprocess.Popen(
                    self._command,
                    stdin=subprocess.PIPE,
                    env={**os.environ, **environment},
                    start_new_session=True,
                )
            # A program need not read its standard input.
            with contextlib.suppress(BrokenPipeError):
                process.communicate(msgspec.json.encode(_fields(job)))
            code = process.wait()
        except OSError as error:
            return AgentResult(error=f"the agent's command cannot be started: {error.strerror}")
        finally:
            self.halt(id)
        return AgentResult(error=f"the agent's command ended with exit code {code}" if code else "")

    def halt(self, id: int) -> None:
        """Kill the program of this session and everything that it started."""
        with self._turn:
            self._halted.add(id)
            process = self._processes.pop(id, None)
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def end(self) -> None:
        for id in list(self._processes):
            self.halt(id)


def _bind(parameters: Mapping[str, inspect.Parameter], job: Job) -> dict[str, Any]:
    """Return the arguments of a function, chosen by the names of its parameters. Raises `_AgentProblem`."""
    fields = _fields(job)
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return fields
    named = {name: parameter for name, parameter in parameters.items() if parameter.kind in _NAMED}
    missing = [n for n, parameter in named.items() if n not in fields and parameter.default is parameter.empty]
    if missing:
        raise _AgentProblem(f"the agent wants {missing[0]!r}, which is neither given nor a field of the prompt")
    return {name: fields[name] for name in named if name in fields}


def _fields(job: Job) -> dict[str, Any]:
    return {**job.data, **msgspec.structs.asdict(job)}


async def _finish(result: Any) -> Any:
    return await result


def _done(result: Any) -> AgentResult:
    if result is None:
        return AgentResult()
    given = dict(result) if isinstance(result, Mapping) else {"reward": result}
    try:
        numbers = {str(name): float(value) for name, value in given.items()}
        if odd := [name for name, value in numbers.items() if not math.isfinite(value)]:
            return AgentResult(error=f"the agent's {odd[0]} is {numbers[odd[0]]}, not a finite number")
        return AgentResult(reward=numbers.pop("reward"), metrics=numbers)
    except (TypeError, ValueError, OverflowError):
        return AgentResult(error=f"the agent returned {str(result)[:80]!r}, not a reward")
    except KeyError:
        return AgentResult(error='the agent returned a dict without "reward"')


def main() -> None:
    """Greet the owner, then run agents until the owner closes the pipe."""
    owner = Owner()
    agent = owner.greet(AgentSetup, _load)
    if agent is None:
        return
    for id, job in owner.questions(Job):
        if job is None:
            agent.halt(id)
        else:
            threading.Thread(target=_run, args=(owner, agent, id, job), name=job.session, daemon=True).start()
    agent.end()
    end_descendants()


def _load(setup: AgentSetup) -> _FunctionAgent | _CommandAgent:
    if setup.command is not None:
        # No foreign code runs in this process, and the process must outlive its owner to end the commands.
        return _CommandAgent(setup.command)
    die_with_parent()
    return _FunctionAgent(setup.function or "")


def _run(owner: Owner, agent: _FunctionAgent | _CommandAgent, id: int, job: Job) -> None:
    result = AgentResult(error="the agent's worker failed, and its output says why")
    try:
        result = agent.run(id, job)
    finally:
        owner.answer(id, result)


if __name__ == "__main__":
    main()
