"""A run without processes: the real controller, window, journal and rollouts over fake engines and a fake trainer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from headrace.buffer.journal import Journal, open_readonly
from headrace.channel.events import Died, Events, Heard, Returned
from headrace.config import Config, make_config
from headrace.delivery.base import Manifest
from headrace.engines.fake import FakeEngine
from headrace.engines.fake_policy import FakePolicy
from headrace.engines.pool import EnginePool
from headrace.errors import PeerDied, first_cause
from headrace.observe.metrics import MetricsLog
from headrace.observe.progress import NoProgress
from headrace.observe.spans import RunClock
from headrace.pipeline.controller import Controller
from headrace.pipeline.elastic import Crew
from headrace.pipeline.parts import Parts
from headrace.pipeline.recording import Outputs
from headrace.pipeline.waits import Waits
from headrace.tasks.base import EnvironmentStep
from headrace.training.base import Checkpoint, StepReport
from headrace.training.remote import Published
from headrace.types import Batch, Int32Array, Prompt


class PlainChat:
    """One token a character; no end token."""

    stop_token_ids = (63,)
    end_token_id = 63

    def open(self, messages: Any) -> Int32Array:
        return self.encode(messages[-1]["content"])

    def continue_(self, messages: Any, *, ended: bool) -> Int32Array:
        return self.encode(messages[-1]["content"])

    def open_text(self, text: str) -> Int32Array:
        return self.encode(text)

    def encode(self, text: str) -> Int32Array:
        return np.array([ord(letter) % 60 for letter in text], np.int32)

    def decode(self, token_ids: Int32Array) -> str:
        return "".join(chr(97 + int(token) % 26) for token in token_ids)

    def token_id(self, token: str) -> int:
        return ord(token[0]) % 60


class OneTurn:
    """An environment that judges by a function of the prompt."""

    def __init__(self, prompt: Prompt, judge: Callable[[Prompt, str], float]) -> None:
        self.prompt = prompt
        self._judge = judge

    async def reset(self) -> list[dict[str, str]]:
        return self.prompt.messages or []

    async def step(self, completion: str) -> EnvironmentStep:
        return EnvironmentStep(done=True, reward=self._judge(self.prompt, completion))

    async def close(self) -> None:
        pass


class PlainTask:
    def __init__(self, judge: Callable[[Prompt, str], float], heldout: int) -> None:
        self._judge = judge
        self.train = [Prompt(id=str(n), messages=[{"role": "user", "content": f"q{n}"}]) for n in range(50)]
        self.heldout = [Prompt(id=f"h{n}", messages=[{"role": "user", "content": f"h{n}"}]) for n in range(heldout)]

    def episode(self, prompt: Prompt) -> OneTurn:
        return OneTurn(prompt, self._judge)

    def demonstration(self, prompt: Prompt) -> str | None:
        return "abc"

    async def close(self) -> None:
        pass


class FakeTrainer:
    """Keeps the batches it is given, and publishes what the fake policy calls a version."""

    name = "trainer-0"

    def __init__(self, policy: FakePolicy, seconds: float, events: Events) -> None:
        self._policy = policy
        self._seconds = seconds
        self._events = events
        self.on_batch: Callable[[], None] = lambda: None
        self.batches: list[Batch] = []
        self.acknowledged: list[int] = []
        self.resent: list[int] = []
        self.saved: list[int] = []
        self._turn = asyncio.Lock()
        self.step = 0
        """Of the last batch."""
        self.died_in: list[int] = []
        """Steps in which it dies, once each."""
        self.dead = False
        self.deaths = 0
        self.on_death: Callable[[], None] = lambda: None

    async def train(
        self, batch: Batch, *, publish: int | None = None, parent: int = -1, save: bool = False
    ) -> StepReport:
        asked_of = self.deaths
        async with self._turn:
            await asyncio.sleep(self._seconds)
            if not self.dead and batch.step in self.died_in:
                self.died_in.remove(batch.step)
                self.dead = True
                self.deaths += 1
                self.on_death()
            # What was asked of a process that died is never answered by the next one.
            if self.dead or asked_of != self.deaths:
                raise PeerDied(self.name, "killed by the test")
        self.batches.append(batch)
        self.step = batch.step
        self.on_batch()
        if publish is not None:
            await self.publish(publish, parent)
        return StepReport(
            step=batch.step, loss=0.0, grad_norm=1.0, learning_rate=0.1, tokens=1, micro_batches=1,
            seconds=self._seconds,
        )  # fmt: skip

    async def publish(self, version: int, parent: int) -> None:
        manifest = self._policy.manifest(version, parent=parent, step=max(0, self.step))
        announcement = Heard(self.name, Published(manifest=manifest, snapshot_seconds=0.0))
        asyncio.get_running_loop().call_later(self._seconds / 2, self._events.put, announcement)

    async def resend(self, manifest: Manifest) -> Manifest:
        self.resent.append(manifest.version)
        return manifest

    async def acknowledge(self, version: int) -> None:
        self.acknowledged.append(version)

    async def save(self, version: int) -> Path:
        self.saved.append(version)
        return Path(f"checkpoint-{version}")

    async def fetch(self, path: Path) -> Path:
        return path


class FakeRun:
    """Everything of a run that needs no process."""

    def __init__(
        self,
        path: Path,
        *settings: str,
        judge: Callable[[Prompt, str], float] = lambda prompt, completion: float(len(completion) % 2),
        engine: dict[str, Any] | None = None,
        engines: int = 1,
        train_seconds: float = 0.005,
        heldout: int = 0,
        checkpoint_step: int | None = None,
        crew: Crew | None = None,
    ) -> None:
        """On a path with the journal of an earlier run, that one goes on from `checkpoint_step`."""
        base = ["rollouts.group_size=2", "rollouts.max_tokens=8", "buffer.groups=2", "run.versions=5"]
        self.config: Config = make_config(
            {"model": {"path": "-"}, "task": {"kind": "gym", "name": "-"}}, [*base, *settings]
        )
        config = self.config
        self.path = path
        policy = FakePolicy(64)
        options: dict[str, Any] = {"slots": 16, "token_seconds": 0.0005, **(engine or {})}
        self.engines = [FakeEngine(name=f"engine-{n}", policy=policy, **options) for n in range(engines)]
        self.events = Events()
        self.trainer = FakeTrainer(policy, train_seconds, self.events)
        journal = Journal(path / "journal.db")
        before = journal.recover(step=checkpoint_step or 0, publish_every=config.delivery.publish_every)
        self.waits = Waits()
        parts = Parts(
            config,
            task=PlainTask(judge, heldout),
            chat=PlainChat(),
            pool=EnginePool(self.engines),
            trainer=self.trainer,
            outputs=Outputs(journal, MetricsLog(path / "metrics.jsonl"), NoProgress(), RunClock.now()),
            before=before,
            checkpoint=Checkpoint(step=checkpoint_step or 0, found=checkpoint_step is not None),
            waits=self.waits,
            events=self.events,
            crew=crew,
        )
        self.controller = Controller(parts)
        self.window, self.recorder = self.controller.window, self.controller.recorder
        self.unfinished = self.controller.recovery.unfinished
        self.generated: dict[str, int] = {}

    async def run(self) -> None:
        """The phases in order, with a deadline."""
        try:
            async with asyncio.timeout(30), asyncio.TaskGroup() as guard:
                serving = guard.create_task(self.controller.serve())
                await self.controller.begin()
                await self.controller.train()
                await self.controller.finish()
                serving.cancel()
        except BaseExceptionGroup as failures:
            raise first_cause(failures) from None
        finally:
            for engine in self.engines:
                self.generated[engine.name] = engine.counters().generated_tokens
                await engine.close()
            self.recorder.abandon("test over")
            self.recorder.close("finished")

    def trainer_dies(self) -> None:
        """Supervision has noticed that the trainer is gone."""
        self.events.put(Died(PeerDied(self.trainer.name, "killed by the test"), restarts=True))

    def trainer_returns(self, checkpoint_step: int | None) -> None:
        """Supervision has started it again, and it found this checkpoint, or none."""
        self.trainer.dead = False
        facts = {
            "policy_steps": checkpoint_step or 0,
            "version": 0 if checkpoint_step else -1,
            "resumed_from": "checkpoint" if checkpoint_step is not None else "",
            "notes": "",
        }
        self.events.put(Returned(self.trainer.name, facts))

    def journal(self, sql: str) -> list[dict[str, Any]]:
        with open_readonly(self.path / "journal.db") as journal:
            return journal.rows(sql)
