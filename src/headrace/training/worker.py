"""The trainer role of a worker process: batches in, reports and published versions out.

The main thread trains; a second one passes messages, so that an acknowledgement frees a segment while a step runs. A
publish takes a snapshot from the main thread; digesting and announcing it do not.

Every rank of a trainer is such a process and is sent the same messages in the same order; the first one answers.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from headrace.channel.beats import Stop
from headrace.channel.desk import Desk
from headrace.channel.spoke import Incoming
from headrace.config import Config
from headrace.delivery.base import Manifest
from headrace.delivery.digest import digest_as
from headrace.delivery.plan import dtype_of
from headrace.delivery.publisher import Publisher
from headrace.delivery.setup import make_sender
from headrace.delivery.sharded_publisher import ShardedPublisher
from headrace.errors import HeadraceError
from headrace.models.loading import load_model, named_weights
from headrace.models.rounding import rounded
from headrace.training.checkpoint import latest, prune, read_state
from headrace.training.lora import TrainedAdapter, keep_base
from headrace.training.messages import (
    RENDEZVOUS,
    Acknowledged,
    Publish,
    Published,
    Resend,
    Resent,
    Save,
    Saved,
    Train,
    Trained,
)
from headrace.training.ranks import Ranks, join
from headrace.training.sharding import prepare_model
from headrace.training.trainer import Trainer
from headrace.types import NO_VERSION, Float32Array, Int32Array

T = TypeVar("T")


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
            self.base_digest = digest_as(named_weights(model), config.model.dtype) if config.lora is not None else 0
            self.ranks = join_ranks(desk, config)
            self.trainer = Trainer(
                prepare_model(model, config.training, self.ranks),
                config.algorithm,
                config.training,
                total_steps=config.run.versions * config.delivery.publish_every,
                warm_start=config.warm_start,
                teacher=_teacher(config, model),
                ranks=self.ranks,
                spans=desk.spans,
                adapter=self._adapter(model),
            )
            self.resumed_from = latest(self.checkpoints)
            if self.resumed_from is not None:
                self.trainer.load(self.resumed_from)
        self.publisher = make_publisher(desk, config, self.ranks, model.config.vocab_size, self.base_digest)
        self.first = self.ranks is None or self.ranks.rank == 0
        """Whether this rank speaks for the trainer."""
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
            self.trainer.close()
        # In good order only: a rank that failed must not wait for others before it says why.
        if self.ranks is not None:
            self.ranks.leave()

    def _adapter(self, model: Any) -> TrainedAdapter | None:
        config, base = self.config, Path(self.config.model.path)
        if config.lora is None:
            return None
        if config.model.weights == "random":
            base = keep_base(model, self.checkpoints, base)
        return TrainedAdapter(model, config.lora, base=base, seed=config.run.seed)

    def _pass_messages(self) -> None:
        while True:
            incoming = self.desk.next_message()
            if incoming is None:
                continue
            if isinstance(incoming.message, Acknowledged):
                self.publisher.acknowledged(incoming.message.version)
                continue
            if isinstance(incoming.message, Resend):
                self._resend(incoming, incoming.message.manifest)
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
                if self.first:
                    self.desk.spoke.reply(incoming, Trained(report=report))
                if publish is not None:
                    self._publish(publish, parent)
                if save and publish is not None:
                    self._save(publish, self.desk.spoke.send)
            case Publish(version=version, parent=parent):
                self._publish(version, parent)
            case Save(version=version):
                self._save(version, lambda saved: self.desk.spoke.reply(incoming, saved))
            case other:
                raise HeadraceError(f"the trainer was sent a {type(other).__name__}")

    def _save(self, version: int, tell: Callable[[Saved], None]) -> None:
        self.desk.phase = "saving"
        with self.desk.spans.span("checkpoint"):
            future = self.trainer.begin_save(self.checkpoints, version=version, source=Path(self.config.model.path))

        def announce(path: Path) -> None:
            prune(self.checkpoints, self.config.training.keep_checkpoints)
            tell(Saved(version=version, path=str(path)))

        self._when_done(future, announce)

    def _when_done(self, future: Future[T], announce: Callable[[T], None]) -> None:
        """Announce what a background thread made; the first rank's to do."""

        def done(future: Future[T]) -> None:
            error = future.exception()
            if error is not None:
                # In a callback an exception would be lost, and everybody would wait for what never comes.
                self.failure = self.failure or error
                self.work.put(error)
            elif self.failure is None and self.first:
                announce(future.result())

        future.add_done_callback(done)

    def _resend(self, incoming: Incoming, manifest: Manifest) -> None:
        def answer(done: Future[Manifest]) -> None:
            if error := done.exception():
                self.desk.spoke.fail(incoming, str(error))
            else:
                self.desk.spoke.reply(incoming, Resent(manifest=done.result()))

        self.publisher.resend(manifest).add_done_callback(answer)

    def _score_canary(self, token_ids: Int32Array) -> Float32Array:
        """As the engines will, from the weights that they are sent."""
        served = dtype_of(self.config.delivery.dtype or self.config.model.dtype)
        with rounded(self.trainer.model, served):
            return self.trainer.score(token_ids)

    def _publish(self, version: int, parent: int) -> None:
        if self.failure is not None:
            raise self.failure
        self.desk.phase = "publishing"
        with self.desk.spans.span("publish"):
            future: Future[Any] = self.publisher.publish(
                version, parent, self.trainer.policy_steps, self.trainer.weights(), self._score_canary
            )
        snapshot_seconds = self.publisher.last_snapshot_seconds

        def announce(manifest: Manifest | None) -> None:
            if manifest is not None:
                self.desk.spoke.send(Published(manifest=manifest, snapshot_seconds=snapshot_seconds))

        self._when_done(future, announce)


def join_ranks(desk: Desk, config: Config) -> Ranks | None:
    """This process's place among the trainer's ranks; None where it is the only one."""
    training, pipeline = config.training, config.pipeline
    if training.ranks == 1 and not training.offload:
        return None
    desk.phase = "meeting the other ranks"
    return join(
        desk.run_dir / RENDEZVOUS,
        int(desk.name.removeprefix("trainer-")),
        training.ranks,
        tensor_parallel=training.tensor_parallel,
        device="cpu",
        timeout=max(pipeline.start_seconds, pipeline.stall_seconds, config.delivery.deadline),
    )


def make_publisher(
    desk: Desk, config: Config, ranks: Ranks | None, vocabulary: int, base_digest: int
) -> Publisher | ShardedPublisher:
    """The end of delivery that is this process's: of the whole model, or of this rank's part."""
    canary = canary_sequence(vocabulary, config.delivery.canary_tokens)
    tolerance, deadline = config.delivery.canary_tolerance, config.delivery.deadline
    rank = ranks.rank if ranks else 0
    sender = make_sender(config.delivery, desk.run_dir, rank, receivers=config.engine.count)
    if ranks:
        return ShardedPublisher(
            sender, ranks.publishing, ranks.coordinate, published_dtype(config), tolerance, canary, deadline=deadline
        )
    return Publisher(
        sender,
        published_dtype(config),
        tolerance,
        canary,
        send="adapter" if config.lora is not None else config.delivery.send,
        base_digest=base_digest,
        deadline=deadline,
    )


def published_dtype(config: Config) -> str:
    """What weights travel in. A merged adapter is kept apart in float32 and rounded once it is merged."""
    if config.lora is not None and config.lora.serve == "merged":
        return "float32"
    return config.delivery.dtype or config.model.dtype


def _teacher(config: Config, model: Any) -> Any:
    """The frozen model to learn from, beside the one in training; 16 bits are enough for it on a GPU."""
    if config.algorithm.teacher is None:
        return None
    device = next(model.parameters()).device
    dtype = "float32" if device.type == "cpu" else "bfloat16"
    return load_model(config.algorithm.teacher, dtype=dtype, device=str(device)).requires_grad_(False)


def canary_sequence(vocabulary: int, length: int) -> Int32Array:
    """A fixed, arbitrary sequence of token ids: the same in every run of a model."""
    return np.random.default_rng(0).integers(0, vocabulary, length, dtype=np.int32)
