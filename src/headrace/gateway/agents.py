"""The run's own agents, in worker processes: foreign code that hangs, raises or dies costs its rollouts, never the run.

A worker runs several agents at a time. One with an agent that overran its time gets no new ones, and is killed with all
that it started when its other agents have ended; a fresh one takes its place.
"""

from __future__ import annotations

import asyncio
import contextlib
from asyncio.subprocess import Process
from pathlib import Path

import msgspec

from headrace.channel import pipes
from headrace.errors import ConfigError
from headrace.gateway.frames import LONGEST_LINE, Done, Halt, Hello, Job, Setup, pack

START_SECONDS = 60.0


class AgentError(Exception):
    """An agent ended without a reward; the text is the reason, in one line."""


class AgentPool:
    """Runs agents, `workers` processes with `concurrency` agents each; more wait for their turn."""

    def __init__(self, setup: Setup, *, workers: int, concurrency: int, log: Path | None = None) -> None:
        """What agents print goes to `log`, or to this process's standard error."""
        self._setup = setup
        self._workers = workers
        self._concurrency = concurrency
        self._log = log
        self._directory = Path.cwd()
        self.places = asyncio.Semaphore(workers * concurrency)
        """Room for so many agents; whoever is ahead in it holds its place no longer than its session may last."""
        self._staff: list[_Worker] = []
        self._hiring = asyncio.Lock()
        self._closed = False

    async def start(self) -> None:
        """Start every worker; raises `ConfigError` if the agent cannot be used."""
        for _ in range(self._workers):
            await self._hire()

    async def run(self, job: Job) -> Done:
        """Run an agent, in a place, to its end; cancelling this gives it up. Raises `AgentError`."""
        async with self._hiring:
            worker = self._least_busy() or await self._replace()
        try:
            done = await worker.run(job)
        except asyncio.CancelledError:
            worker.give_up(job.id)
            raise
        if done.error:
            raise AgentError(done.error)
        return done

    async def close(self) -> None:
        """End all workers and their agents. Idempotent."""
        self._closed = True
        await asyncio.gather(*(worker.kill() for worker in self._staff))

    def _least_busy(self) -> _Worker | None:
        able = [worker for worker in self._staff if worker.able]
        self._staff = [worker for worker in self._staff if worker.able or not worker.gone]
        if len(able) < self._workers:
            return None
        return min(able, key=lambda worker: worker.busy)

    async def _replace(self) -> _Worker:
        try:
            return await self._hire()
        except ConfigError as error:
            raise AgentError(f"an agent's worker could not be started again: {error}") from error

    async def _hire(self) -> _Worker:
        if self._closed:
            raise AgentError("the agents are closed")
        worker = await _Worker.spawn(self._directory, self._log)
        self._staff.append(worker)
        try:
            async with asyncio.timeout(START_SECONDS):
                refusal = await worker.greet(self._setup)
        except TimeoutError:
            refusal = f"a worker was not ready after {START_SECONDS:g} s"
        if refusal:
            await worker.kill()
            raise ConfigError(f"[task] agent: {refusal}")
        return worker


class _Worker:
    """One process and the agents in it."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._jobs: dict[str, asyncio.Future[Done]] = {}
        self._listener: asyncio.Task[None] | None = None
        self._retired = False

    @classmethod
    async def spawn(cls, directory: Path, log: Path | None) -> _Worker:
        """Start a process that knows nothing yet, as the leader of a group of its own."""
        return cls(await pipes.spawn("headrace.gateway.agent_main", directory, log, LONGEST_LINE))

    @property
    def able(self) -> bool:
        """Whether it takes agents."""
        return not self._retired and not self.gone

    @property
    def gone(self) -> bool:
        """Whether its process has ended."""
        return self._process.returncode is not None

    @property
    def busy(self) -> int:
        """Agents that run in it."""
        return len(self._jobs)

    async def greet(self, setup: Setup) -> str:
        """Tell it what it runs; the reason if it cannot."""
        assert self._process.stdout is not None
        self._send(pack(setup))
        line = await self._process.stdout.readline()
        if not line:
            return f"its worker died while it started ({await pipes.how_it_ended(self._process)})"
        hello = msgspec.json.decode(line, type=Hello)
        if not hello.error:
            self._listener = asyncio.create_task(self._listen(), name="agents")
        return hello.error

    async def run(self, job: Job) -> Done:
        """Run an agent to its end. The caller owns this wait: a session has its deadline."""
        done: asyncio.Future[Done] = asyncio.get_running_loop().create_future()
        self._jobs[job.id] = done
        try:
            self._send(pack(job))
        except (TypeError, ValueError) as error:
            self._jobs.pop(job.id)
            return Done(id=job.id, error=f"the prompt's data cannot be sent to an agent: {error}")
        return await done

    def give_up(self, id: str) -> None:
        """Nobody waits for this agent any more: its worker serves those it has, and ends."""
        if self._jobs.pop(id, None) is not None and not self.gone:
            self._retired = True
            self._send(pack(Halt(id=id)))
            self._end_if_idle()

    async def kill(self) -> None:
        """End it with all that it started, and wait until it is gone."""
        self._retired = True
        pipes.close_pipe(self._process)  # A worker of commands ends them when its pipe ends.
        await pipes.ended(self._process)
        pipes.kill_group(self._process)
        await pipes.ended(self._process)

    def _send(self, line: bytes) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(ConnectionError, RuntimeError):  # It is gone; its listener says so.
            self._process.stdin.write(line)

    async def _listen(self) -> None:
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            done = msgspec.json.decode(line, type=Done)
            job = self._jobs.pop(done.id, None)
            if job is not None and not job.done():
                job.set_result(done)
            self._end_if_idle()
        how = await pipes.how_it_ended(self._process)
        for id, job in self._jobs.items():
            if not job.done():
                job.set_result(Done(id=id, error=f"the agent's process died ({how})"))
        self._jobs.clear()

    def _end_if_idle(self) -> None:
        if self._retired and not self._jobs:
            pipes.close_pipe(self._process)
