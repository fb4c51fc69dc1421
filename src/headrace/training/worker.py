"""The trainer role of a worker process: batches in, reports and published versions out.

The main thread trains; a second one passes messages, so that an acknowledgement frees a segment while a step runs. A
publish takes a snapshot from the main thread; digesting and announcing it do not.
"""

from __future__ import annotations

import queue
import threading
from concurrent.futures import Future
from pathlib import Path

import numpy as np

from headrace.channel.beats import Stop
from headrace.channel.desk import Desk
from headrace.channel.spoke import Incoming
from headrace.config import Config
from headrace.delivery.base import Manifest
from headrace.delivery.publisher import Publisher
from headrace.delivery.setup import make_sender
from headrace.errors import HeadraceError
from headrace.models.loading import load_model
from headrace.training.checkpoint import latest, prune, read_state
from headrace.training.messages import Acknowledged, Publish, Published, Save, Saved, Train, Trained
from headrace.training.trainer import Trainer
from headrace.types import NO_VERSION, Int32Array


def serve(desk: Desk, config: Config) -> None:
    """Load the model or the newest checkpoint, and train until told to stop."""
    TrainerRole(desk, config).run()


class TrainerRole:
    """A trainer, its publisher, and the queue of what the controller asks."""

    def __init__(self, desk: Desk, config: Config) -> None:
        desk.phase = "loading"
        self.desk = desk
        self.config = config
        self.checkpoints = desk.run_dir / "checkpoints"
        with desk.spans.span("load"):
            # Master weights are float32 whatever the serving dtype: small updates would vanish in bfloat16.
            model = load_model(config.model.path, weights=config.model.weights, dtype="float32", seed=config.run.seed)
            self.trainer = Trainer(
                model,
                config.algorithm,
                config.training,
                total_steps=config.run.versions * config.delivery.publish_every,
                warm_start=config.warm_start,
                spans=desk.spans,
            )
            self.resumed_from = latest(self.checkpoints)
            if self.resumed_from is not None:
                self.trainer.load(self.resumed_from)
        self.publisher = Publisher(
            make_sender(config.delivery, desk.run_dir),
            dtype=config.model.dtype,
            tolerance=config.delivery.canary_tolerance,
            canary_token_ids=canary_sequence(model.config.vocab_size, config.delivery.canary_tokens),
            deadline=config.delivery.deadline,
        )
        self.failure: BaseException | None = None
        """Why a version was not announced: none is after it."""
        self.work: queue.Queue[Incoming | BaseException] = queue.Queue()

    def run(self) -> None:
        """Do what is asked, in order."""
        threading.Thread(target=self._pass_messages, name="messages", daemon=True).start()
        self.desk.ready(
            policy_steps=self.trainer.policy_steps,
            resumed_from=str(self.resumed_from or ""),
            version=NO_VERSION if self.resumed_from is None else read_state(self.resumed_from).version,
            parameters=sum(weight.numel() for weight in self.trainer.weights().values()),
        )
        try:
            while not isinstance((incoming := self._next()).message, Stop):
                self._handle(incoming)
        finally:
            self.desk.phase = "stopping"
            self.publisher.close()

    def _pass_messages(self) -> None:
        while True:
            incoming = self.desk.next_message()
            if incoming is None:
                continue
            if isinstance(incoming.message, Acknowledged):
                self.publisher.acknowledged(incoming.message.version)
                continue
            self.work.put(incoming)
            if isinstance(incoming.message, Stop):
                return

    def _next(self) -> Incoming:
        with self.desk.spans.span("wait", busy=False):
            while True:
                try:
                    work = self.work.get(timeout=1.0)
                except queue.Empty:
                    self.desk.phase = "waiting for a batch"
                    continue
                if isinstance(work, BaseException):
                    raise work
                return work

    def _handle(self, incoming: Incoming) -> None:
        match incoming.message:
            case Train(batch=batch, publish=publish, parent=parent, save=save):
                self.desk.phase = "stepping"
                report = self.trainer.step(batch)
                self.desk.spoke.reply(incoming, Trained(report=report))
                if publish is not None:
                    self._publish(publish, parent)
                if save and publish is not None:
                    self.desk.spoke.send(self._save(publish))
            case Publish(version=version, parent=parent):
                self._publish(version, parent)
            case Save(version=version):
                self.desk.spoke.reply(incoming, self._save(version))
            case other:
                raise HeadraceError(f"the trainer was sent a {type(other).__name__}")

    def _save(self, version: int) -> Saved:
        self.desk.phase = "saving"
        with self.desk.spans.span("checkpoint"):
            path = self.trainer.save(self.checkpoints, version=version, source=Path(self.config.model.path))
            prune(self.checkpoints, self.config.training.keep_checkpoints)
        return Saved(version=version, path=str(path))

    def _publish(self, version: int, parent: int) -> None:
        if self.failure is not None:
            raise self.failure
        self.desk.phase = "publishing"
        with self.desk.spans.span("publish"):
            future = self.publisher.publish(
                version, parent, self.trainer.policy_steps, self.trainer.weights(), self.trainer.score
            )
        snapshot_seconds = self.publisher.last_snapshot_seconds

        def announce(done: Future[Manifest]) -> None:
            error = done.exception()
            if error is not None:
                # In a callback an exception would be lost, and everybody would wait for a version that never comes.
                self.failure = self.failure or error
                self.work.put(error)
            if self.failure is not None:
                return
            self.desk.spoke.send(Published(manifest=done.result(), snapshot_seconds=snapshot_seconds))

        future.add_done_callback(announce)


def canary_sequence(vocabulary: int, length: int) -> Int32Array:
    """A fixed, arbitrary sequence of token ids: the same in every run of a model."""
    return np.random.default_rng(0).integers(0, vocabulary, length, dtype=np.int32)
