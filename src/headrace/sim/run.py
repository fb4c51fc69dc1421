"""One simulated run: the real controller, window and rollouts over fake engines and a simulated trainer.

The event loop has a virtual clock: when nothing is ready to run, the clock jumps to the next timer. Only sleeping takes
time, so a run under this loop is a function of its inputs. The loop never waits for a file descriptor, so everything
that runs under it must live in this process.
"""

import asyncio
import selectors
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from headrace.buffer.journal import Journal
from headrace.buffer.window import Window
from headrace.channel.events import Events, Heard
from headrace.config import Config
from headrace.delivery.base import Manifest
from headrace.engines.fake import FakeEngine, Lengths
from headrace.engines.fake_policy import FakePolicy
from headrace.engines.pool import EnginePool
from headrace.errors import HeadraceError, first_cause
from headrace.observe.metrics import MetricsLog
from headrace.observe.progress import NoProgress
from headrace.observe.spans import RunClock
from headrace.pipeline.controller import Controller
from headrace.pipeline.parts import Parts
from headrace.pipeline.recording import Outputs
from headrace.pipeline.waits import Waits
from headrace.tasks.base import EnvironmentStep
from headrace.tasks.dataset import SingleTurn, SingleTurnTask
from headrace.training.base import Checkpoint, StepReport
from headrace.training.remote import Published
from headrace.types import Batch, Int32Array, Prompt

STOP_TOKEN = 63
VOCABULARY = 64
PROMPTS = 1000

T = TypeVar("T")


class _Jump(selectors.SelectSelector):
    """A selector that moves the clock to the next timer instead of sleeping."""

    time = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise HeadraceError("under a virtual clock everybody waits and nothing is due: this would take for ever")
        self.time += max(0.0, timeout)
        return super().select(0)


class _VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        return self._jump.time


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end under a virtual clock, as `asyncio.run` does under the real one."""
    with asyncio.Runner(loop_factory=_VirtualLoop) as runner:
        return runner.run(main)


class _Chat:
    """A `ChatFormat` with one token per character."""

    stop_token_ids = (STOP_TOKEN,)
    end_token_id = STOP_TOKEN

    def open(self, messages: Sequence[dict[str, str]]) -> Int32Array:
        return self.encode(messages[-1]["content"])

    def continue_(self, messages: Sequence[dict[str, str]], *, ended: bool) -> Int32Array:
        return self.encode(messages[-1]["content"])

    def open_text(self, text: str) -> Int32Array:
        return self.encode(text)

    def encode(self, text: str) -> Int32Array:
        return np.array([ord(letter) % STOP_TOKEN for letter in text], np.int32)

    def token_id(self, token: str) -> int:
        return ord(token[0]) % STOP_TOKEN

    def decode(self, token_ids: Int32Array) -> str:
        return "".join(chr(97 + int(token) % 26) for token in token_ids)


class _Episode(SingleTurn):
    """An episode of one turn, judged by a function of prompt and answer."""

    def __init__(self, prompt: Prompt, judge: Callable[[Prompt, str], float]) -> None:
        super().__init__(prompt)
        self._judge = judge

    async def step(self, completion: str) -> EnvironmentStep:
        return EnvironmentStep(done=True, reward=self._judge(self._prompt, completion))


class _Task(SingleTurnTask):
    """A `Task` whose prompts have no meaning."""

    def __init__(self, judge: Callable[[Prompt, str], float]) -> None:
        questions = (Prompt(id=str(n), messages=[{"role": "user", "content": f"q{n}"}]) for n in range(PROMPTS))
        super().__init__(list(questions), heldout=[])
        self._judge = judge

    def episode(self, prompt: Prompt) -> _Episode:
        return _Episode(prompt, self._judge)


class _Trainer:
    """A `TrainerHandle`. A step takes as long as `seconds` says, and publishes manifests of the fake policy."""

    name = "trainer-0"

    def __init__(self, policy: FakePolicy, seconds: Callable[[Batch], float], events: Events, step: int) -> None:
        """Make a trainer that has already made `step` steps. What it publishes goes to `events`."""
        self._policy = policy
        self._step = step
        self._seconds = seconds
        self._turn = asyncio.Lock()
        self._events = events
        self.on_batch: Callable[[Batch], None] = lambda batch: None

    async def train(
        self, batch: Batch, *, publish: int | None = None, parent: int = -1, save: bool = False
    ) -> StepReport:
        seconds = self._seconds(batch)
        async with self._turn:
            await asyncio.sleep(seconds)
        self._step = max(0, batch.step)
        self.on_batch(batch)
        if publish is not None:
            await self.publish(publish, parent)
        return StepReport(
            step=batch.step,
            loss=0.0,
            grad_norm=1.0,
            learning_rate=0.0,
            tokens=len(batch.token_ids),
            micro_batches=1,
            seconds=seconds,
        )

    async def publish(self, version: int, parent: int) -> None:
        manifest = self._policy.manifest(version, parent=parent, step=self._step)
        self._events.put(Heard(self.name, Published(manifest=manifest, snapshot_seconds=0.0)))

    async def resend(self, manifest: Manifest) -> Manifest:
        return manifest

    async def teacher_answered(self, teacher: str, version: int) -> None:
        """See `TrainerHandle.teacher_answered`. No simulated teacher follows the policy."""

    async def acknowledge(self, version: int) -> None:
        return

    async def save(self, version: int) -> Path:
        return Path(f"checkpoint-{version}")

    async def fetch(self, path: Path) -> Path:
        return path


class SimRun:
    """A simulated run, made and run inside one event loop. Its files go to `path`."""

    def __init__(
        self,
        config: Config,
        path: Path,
        *,
        lengths: Lengths,
        token_seconds: float,
        train_seconds: Callable[[Batch], float],
        judge: Callable[[Prompt, str], float] = lambda prompt, completion: float(len(completion) % 2),
        window: Window | None = None,
        keep_rollouts: bool = False,
    ) -> None:
        """Assemble the run. `window` replaces the configured policy that decides who may start and what is trained.

        If `path` holds the journal of an earlier run, that run is continued, and the trainer has all its steps.
        """
        policy, events = FakePolicy(VOCABULARY), Events()
        journal = Journal(path / "journal.db", keep_rollouts=keep_rollouts)
        before = journal.recover(step=0, publish_every=config.delivery.publish_every, policy=config.policy_name)
        self.engines = [
            FakeEngine(
                name=f"engine-{n}",
                policy=policy,
                slots=config.engine.slots,
                lengths=lengths,
                token_seconds=token_seconds,
                interrupt=config.engine.interrupt,
            )
            for n in range(config.engine.processes)
        ]
        self.trainer = _Trainer(policy, train_seconds, events, before.resume_step)
        known = before.last_version >= 0
        parts = Parts(
            config,
            task=_Task(judge),
            chat=_Chat(),
            pool=EnginePool(self.engines),
            trainer=self.trainer,
            outputs=Outputs(journal, MetricsLog(path / "metrics.jsonl"), NoProgress(), RunClock.now()),
            before=before,
            checkpoint=Checkpoint(step=before.resume_step, version=before.last_version, found=known),
            waits=Waits(asyncio.get_running_loop().time),
            events=events,
            other_window=window,
        )
        self.controller = Controller(parts)
        self.window = self.controller.window
        self.recorder = self.controller.recorder
        self.seconds = 0.0
        """The virtual seconds that training took."""

    async def execute(self) -> None:
        """Run all phases of the run."""
        clock = asyncio.get_running_loop().time
        outcome = "failed"
        try:
            async with asyncio.TaskGroup() as guard:
                serving = guard.create_task(self.controller.serve())
                await self.controller.begin()
                started = clock()
                await self.controller.train()
                self.seconds = clock() - started
                await self.controller.finish()
                serving.cancel()
            outcome = "finished"
        except BaseExceptionGroup as failures:
            raise first_cause(failures) from None
        finally:
            for engine in self.engines:
                await engine.close()
            self.recorder.abandon("run failed")
            self.recorder.close(outcome)
