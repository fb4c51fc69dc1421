"""The trainer role of a worker process: batches come in, reports and published versions go out.

The main thread trains. A second thread passes messages, so that an acknowledgement can free a segment while a step
runs. Publishing stops the main thread only for a snapshot: the snapshot is digested and announced in the background.

Every rank of a trainer is such a process. All ranks are sent the same messages in the same order, and the first rank
answers.

The module also builds what a configuration describes: the trainer at its first weights, and its publisher. Runs and
replays both use it.
"""

import queue
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
from safetensors import SafetensorError

from headrace.channel.files import FileServer
from headrace.channel.heartbeats import Stop
from headrace.channel.turns import FILE as TURNS
from headrace.channel.turns import TrainerTurns
from headrace.channel.vital import vital_thread
from headrace.channel.worker_link import Incoming, WorkerLink
from headrace.config.hub import model_dir, teacher_dir
from headrace.config.schema import Config, LoraConfig, TrainingConfig
from headrace.delivery.base import Manifest, Score, canary_sequence
from headrace.delivery.digest import digest_as
from headrace.delivery.parts import TrainerRanks
from headrace.delivery.plan import dtype_of
from headrace.delivery.publisher import Publisher
from headrace.delivery.setup import choose, make_sender
from headrace.delivery.shared_base import SharedBase, share_base
from headrace.delivery.transports.segments import sweep
from headrace.errors import DeliveryError, HeadraceError, UserError
from headrace.models.loading import choose_device, hold_weights, load_model, named_weights
from headrace.models.lora import check_shareable, frozen_linears
from headrace.models.rounding import hold_in_four_bits, round_weights, rounded
from headrace.observe.spans import SpanRecorder
from headrace.training import remote
from headrace.training.checkpoints.base import BASES, keep_base, latest, prune, read_state, set_aside
from headrace.training.checkpoints.remote_store import store_of
from headrace.training.devices import engine_device, input_device
from headrace.training.layers import compile_model, decoder_layers, recompute_layers
from headrace.training.lora import TrainedAdapter
from headrace.training.meeting import join_ranks
from headrace.training.ranks import Ranks, shard_model
from headrace.training.trainer import Trainer
from headrace.types import NO_VERSION, Float32Array, Int32Array

T = TypeVar("T")
FIRST_RANK = "trainer-0"
TEACHER_RANKS = 1000
"""The directories of teachers' weights are numbered from here on, after those of the trainer's ranks."""
UNWRITABLE = (OSError, SafetensorError)
"""The exceptions that writing a checkpoint raises if the disk refuses."""


@dataclass(frozen=True)
class Built:
    """A trainer at its first weights."""

    trainer: Trainer
    device: str
    ranks: Ranks | None
    base_digest: int
    """The digest of the base model with [lora]; else 0."""
    shared_base: SharedBase | None = None
    """The base, if the trainer shares it with engines. It must be kept as long as the trainer."""


def build_trainer(
    config: Config,
    checkpoints: Path,
    spans: SpanRecorder | None = None,
    meet: Callable[[str], Ranks | None] = lambda device: None,
    share_in: Path | None = None,
) -> Built:
    """Build the trainer that a configuration describes, before its first step.

    `meet` is called with the device once the model is loaded, and returns this process's place among the ranks, if any.
    With `[lora] share_base`, the base is shared with the engines of the run directory `share_in`, if that is given.
    """
    device = choose_device(config.training.device, "training")
    in_four_bits = config.lora is not None and config.lora.base == "nf4"
    sharded = config.training.offload or config.training.processes > 1
    # Master weights are float32 whatever the serving dtype is, because small updates would vanish in bfloat16.
    model = load_model(
        model_dir(config.model),
        weights=config.model.weights,
        dtype="float32",
        seed=config.run.seed,
        # A GPU may not have room for the whole model, so several ranks shard it, and 4 bits are packed, on the host.
        device="cpu" if sharded or in_four_bits else device,
    )
    adapter, base_digest, shared = None, 0, None
    if config.lora is not None:
        base, base_digest = _freeze(model, config, config.lora, checkpoints)
        if config.lora.share_base and share_in is not None:
            check_shareable(model, config.lora)
            shared = share_base(share_in, named_weights(model), config.model.dtype, base_digest)
            hold_weights(model, shared.weights)
        if in_four_bits and not sharded:
            model.to(device)
        adapter = TrainedAdapter(model, config.lora, base=base, seed=config.run.seed)
    ranks = meet(device)
    trainer = Trainer(
        prepare_model(model, config.training, ranks),
        config.algorithm,
        config.training,
        total_steps=config.run.versions * config.delivery.publish_every,
        warm_start=config.warm_start,
        teacher=_teacher(config, input_device(model)),
        teacher_recorded=bool(config.teachers),
        ranks=ranks,
        spans=spans,
        adapter=adapter,
        correct_above=config.buffer.correct_above,
        followers=config.moving_teachers,
        steps_per_version=config.delivery.publish_every,
    )
    return Built(trainer, device, ranks, base_digest, shared)


def prepare_model(model: Any, training: TrainingConfig, ranks: Ranks | None = None) -> Any:
    """Prepare a model, which every rank holds as a whole, for training as configured. The model is changed in place."""
    device = next(model.parameters()).device if ranks is None else ranks.device
    if training.compile and device.type == "cuda":
        compile_model(model, decoder_layers(model))
    if training.activation_checkpointing:
        # This wraps the compiled layers, so that what is computed again is compiled too.
        recompute_layers(decoder_layers(model))
    if ranks is not None:
        shard_model(model, decoder_layers(model), ranks, training)
    return model


def _freeze(model: Any, config: Config, lora: LoraConfig, checkpoints: Path) -> tuple[Path, int]:
    """Make this model the base of an adapter. Return the directory from which others load it, and its digest."""
    layers = frozen_linears(model, tuple(lora.modules)) if lora.base == "nf4" else {}
    round_weights(layers)
    digest = digest_as(named_weights(model), config.model.dtype)
    base = model_dir(config.model)
    if layers or config.model.weights == "random":
        base = keep_base(model, checkpoints, base, BASES[lora.base])
    hold_in_four_bits(model, layers)
    return base, digest


def _teacher(config: Config, device: torch.device) -> Any:
    """Load the frozen teacher, whole on every rank, on the device of the passes. On a GPU 16 bits are enough for it."""
    if (teacher := teacher_dir(config)) is None:
        return None
    dtype = "float32" if device.type == "cpu" else "bfloat16"
    return load_model(teacher, dtype=dtype, device=str(device)).requires_grad_(False)


def make_publisher(config: Config, built: Built, run_dir: Path, own_address: str = "") -> Publisher:
    """Return the publisher of this process: for the whole model, or for this rank's part of the model.

    `own_address` is where other hosts reach this one, if the run has several.
    """
    delivery, ranks = config.delivery, built.ranks
    sender = make_sender(
        delivery,
        run_dir,
        ranks.rank if ranks else 0,
        trainer=str(ranks.device) if ranks else built.device,
        engines=engine_device(config),
        receivers=config.engine.processes * config.engine.gpus_per_engine,  # every worker of a server receives
        relays=ranks is None,  # an engine can relay the whole model, but not the parts in which it arrived
        own_address=own_address,
        trusted_network=config.cluster.trusted_network,
    )
    return Publisher(
        sender,
        published_dtype(config),
        delivery.canary_tolerance,
        canary_sequence(built.trainer.model.config.vocab_size, delivery.canary_tokens),
        send="adapter" if config.lora is not None else delivery.send,
        base_digest=built.base_digest,
        deadline=delivery.deadline + config.evaluate.longest_hold,
        policy=config.policy_name,
        ranks=TrainerRanks(ranks.publishing, ranks.resending, ranks.coordinate) if ranks else None,
    )


class TeacherPublisher:
    """Publishes the versions of one teacher that follows the policy, to the one process that has it."""

    def __init__(self, config: Config, built: Built, run_dir: Path, name: str, number: int, own_address: str) -> None:
        """`number` tells this teacher's directory of weights from others."""
        plain = config.delivery.transport in ("shm", "file", "tcp")
        delivery = msgspec.structs.replace(
            config.delivery, transport=config.delivery.transport if plain else "auto", send="full"
        )
        self.name = name
        self._every = config.teachers[name].every
        self._wanted = True
        self._newest = NO_VERSION
        self._answered = NO_VERSION
        self._publisher = Publisher(
            make_sender(delivery, run_dir, TEACHER_RANKS + number, relays=False, own_address=own_address),
            published_dtype(config),
            delivery.canary_tolerance,
            canary_sequence(built.trainer.model.config.vocab_size, delivery.canary_tokens),
            deadline=delivery.deadline,
            policy=f"{config.policy_name}/{name}",
        )
        self.canary_token_ids = self._publisher.canary_token_ids

    def due(self, versions: int) -> bool:
        """Return whether the teacher is to be refreshed now, after this many versions of the policy.

        It is not while the last version has no answer, so that the trainer never waits for a teacher. The next version
        of the policy brings it up to date then.
        """
        self._wanted = self._wanted or versions % self._every == 0
        return self._wanted and self._answered >= self._newest

    def publish(self, version: int, step: int, weights: Mapping[str, torch.Tensor], canary: Score) -> Future[Manifest]:
        """See `Publisher.publish`."""
        self._wanted, self._newest = False, version
        return self._publisher.publish(version, NO_VERSION, step, weights, canary)

    def answered(self, version: int) -> None:
        """Record that the teacher's process has answered this version, which may not be the newest one."""
        self._publisher.acknowledged(version)
        self._answered = max(self._answered, version)

    def close(self) -> None:
        """See `Publisher.close`."""
        self._publisher.close()


def published_dtype(config: Config) -> str:
    """Return the dtype in which weights are sent. An adapter that engines merge is rounded only after it is merged."""
    if config.lora is not None and config.lora.serve == "merged":
        return "float32"
    return config.delivery.dtype or config.model.dtype


class TrainerRole:
    """A trainer with its publisher and the queue of requests from the controller."""

    def __init__(self, link: WorkerLink, config: Config, last_step: int | None = None, meet_at: str = "") -> None:
        """Load the model or the newest checkpoint that is whole and has at most `last_step` policy steps.

        `meet_at` is the address of this host at which the other ranks reach this one; empty if all of them share a run
        directory.
        """
        link.phase = "loading"
        self.link = link
        self.config = config
        self.checkpoints = link.run_dir / "checkpoints"
        self.store = store_of(config)
        """Where checkpoints are copied, if `[training] checkpoint_directory` is a URL."""
        self.files = FileServer(link, self.checkpoints)
        self.first = link.name == FIRST_RANK
        """Whether this rank answers for the trainer."""
        with link.spans.span("load"):
            # This comes before the ranks meet, so that all of them find the same newest checkpoint.
            self.notes = set_aside(self.checkpoints, last_step) if self.first else []
            if self.store is not None and self.first:
                self.notes += self.store.fetch_newest(self.checkpoints, last_step)
            built = build_trainer(
                config,
                self.checkpoints,
                link.spans,
                lambda device: join_ranks(link, config, device, meet_at),
                share_in=link.run_dir,
            )
            self.trainer, self.ranks, self.device = built.trainer, built.ranks, built.device
            self.shared_base = built.shared_base
            self.resumed_from = latest(self.checkpoints)
            if self.resumed_from is not None:
                self.trainer.load(self.resumed_from)
        self.publisher = make_publisher(config, built, link.run_dir, link.own_address)
        self.teachers = {
            name: TeacherPublisher(config, built, link.run_dir, name, number, link.own_address)
            for number, name in enumerate(config.moving_teachers)
        }
        self.choice = choose(config.delivery, trainer=self.device, engines=engine_device(config))
        shared = self.device == "cuda" and any(name.startswith("engine") for name in link.neighbours)
        self.turns = TrainerTurns(link.run_dir / TURNS) if shared and config.pipeline.one_gpu == "turns" else None
        link.phase = "compiling"
        with link.spans.span("compile"):
            self.trainer.warm_up()
        self.failure: BaseException | None = None
        """The reason why a version was not announced. No later version is announced either."""
        self.saving: Future[Path] | None = None
        """The newest checkpoint, which may still be in the process of being written."""
        self.work: queue.Queue[Incoming | BaseException] = queue.Queue()

    def run(self) -> None:
        """Handle requests in order until `Stop` arrives."""
        vital_thread(self._pass_messages, name="messages").start()
        if self.first:
            # Remove the segments of a previous process. Engines that needed them have had until now to fetch them.
            sweep()
        self.link.ready(
            policy_steps=self.trainer.policy_steps,
            resumed_from=str(self.resumed_from or ""),
            version=NO_VERSION if self.resumed_from is None else read_state(self.resumed_from).version,
            notes="\n".join(self.notes),
            device=self.device,
            transport=self.choice.transport,
            transport_why=self.choice.why,
        )
        try:
            while not isinstance((incoming := self._next()).message, Stop):
                self.handle(incoming)
        finally:
            self.link.phase = "stopping"
            self.publisher.close()
            for teacher in self.teachers.values():
                teacher.close()
            with self._writing():
                self.trainer.close()
            if self.turns is not None:
                self.turns.close()
        # Ranks leave together only after a normal end: a rank that failed must report its error without waiting.
        if self.ranks is not None:
            self.ranks.leave()

    def _pass_messages(self) -> None:
        while True:
            incoming = self.link.next_message()
            if incoming is None:
                continue
            if isinstance(incoming.message, remote.Acknowledged):
                self.publisher.acknowledged(incoming.message.version)
                continue
            if isinstance(incoming.message, remote.TeacherAnswered):
                self.teachers[incoming.message.teacher].answered(incoming.message.version)
                continue
            if isinstance(incoming.message, remote.Resend):
                self._resend(incoming, incoming.message.manifest)
                continue
            if self.files.answer(incoming):
                continue
            self.work.put(incoming)
            if isinstance(incoming.message, Stop):
                return

    def _next(self) -> Incoming:
        with self.link.spans.span("wait", busy=False):
            while True:
                try:
                    work = self.work.get(timeout=1.0)
                except queue.Empty:
                    writing = self.saving is not None and not self.saving.done()
                    self.link.phase = "writing a checkpoint" if writing else "waiting for a batch"
                    continue
                if isinstance(work, BaseException):
                    raise work
                return work

    def handle(self, incoming: Incoming) -> None:
        """Do what one message of the controller asks for, and answer it."""
        match incoming.message:
            case remote.Train(batch=batch, publish=publish, parent=parent, save=save):
                canary: Score = self._score_canary
                with self._turn():
                    self.link.phase = "stepping"
                    report = self.trainer.step(batch)
                    if publish is not None and self.turns is not None:
                        canary = self._scored_already()
                if self.first:
                    self.link.reply(incoming, remote.Trained(report=report))
                if publish is not None:
                    # Outside the trainer's turn: publishing may wait for engines, which need steps to prove a version.
                    self._publish(publish, parent, canary)
                if save and publish is not None:
                    self._save(publish, self.link.send)
            case remote.Publish(version=version, parent=parent):
                self._publish(version, parent, self._score_canary)
            case remote.Save(version=version):
                self._save(version, lambda saved: self.link.reply(incoming, saved))
            case other:
                raise HeadraceError(f"the trainer was sent a {type(other).__name__}")

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Hold the GPU, if engines share it, until the trainer has finished its step."""
        if self.turns is None:
            yield
            return
        with ExitStack() as stack:
            self.link.phase = "waiting for the GPU"
            with self.link.spans.span("turn", busy=False):
                stack.enter_context(self.turns.held(self.config.pipeline.stall_seconds))
            yield

    def _save(self, version: int, tell: Callable[[remote.Saved], None]) -> None:
        self.link.phase = "saving"
        with self.link.spans.span("checkpoint"), self._writing():
            model = self.config.model
            future = self.trainer.begin_save(
                self.checkpoints, version=version, source=model_dir(model), chat_template=model.chat_template
            )

        def announce(path: Path) -> None:
            keep = self.config.training.keep_checkpoints
            try:
                if self.store is not None:
                    self.store.keep(path, keep)
                prune(self.checkpoints, keep)
            except (*UNWRITABLE, UserError) as error:
                self._fail(self._unwritable(error))
                return
            tell(remote.Saved(version=version, path=str(path)))

        self.saving = future
        self._when_done(future, announce, self._unwritable)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except UNWRITABLE as error:
            raise self._unwritable(error) from error

    def _unwritable(self, error: BaseException) -> BaseException:
        """Turn an error of writing, such as a full disk, into a `UserError`. Other errors stay as they are."""
        if not isinstance(error, UNWRITABLE):
            return error
        return UserError(f"{self.checkpoints} cannot be written: {error}; older checkpoints are whole")

    def _when_done(
        self,
        future: Future[T],
        announce: Callable[[T], None],
        explain: Callable[[BaseException], BaseException] = lambda error: error,
    ) -> None:
        """Call `announce` when a background thread has finished, on the first rank only. A failure ends the trainer."""

        def done(future: Future[T]) -> None:
            error = future.exception()
            if error is not None:
                self._fail(explain(error))
            elif self.failure is None and self.first:
                announce(future.result())

        future.add_done_callback(done)

    def _fail(self, error: BaseException) -> None:
        # An exception in a callback would be lost, and the other processes would wait forever.
        self.failure = self.failure or error
        self.work.put(error)

    def _resend(self, incoming: Incoming, manifest: Manifest) -> None:
        def answer(done: Future[Manifest]) -> None:
            error = done.exception()
            if self.first and error:
                self.link.fail(incoming, str(error))
            elif self.first:
                self.link.reply(incoming, remote.Resent(manifest=done.result()))
            elif error and not isinstance(error, DeliveryError):
                # A part that cannot be sent any more is the first rank's answer. Any other error ends the trainer.
                self._fail(error)

        self.publisher.resend(manifest).add_done_callback(answer)

    def _score_canary(self, token_ids: Int32Array) -> Float32Array:
        """Score the canary as the engines will, with weights rounded to the dtype in which they are served."""
        served = dtype_of(self.config.delivery.dtype or self.config.model.dtype)
        with rounded(self.trainer.model, served):
            return self.trainer.score(token_ids)

    def _scored_already(self) -> Score:
        """Score the canary in the trainer's turn: later, each of its many small kernels would wait for engines."""
        scored = self._score_canary(self.publisher.canary_token_ids)
        return lambda _: scored

    def _publish(self, version: int, parent: int, canary: Score) -> None:
        if self.failure is not None:
            raise self.failure
        self.link.phase = "publishing"
        versions = self.trainer.policy_steps // self.config.delivery.publish_every
        due = [name for name, teacher in self.teachers.items() if teacher.due(versions)]
        with self.link.spans.span("publish"):
            future = self.publisher.publish(version, parent, self.trainer.policy_steps, self.trainer.weights(), canary)
        snapshot_seconds = self.publisher.last_snapshot_seconds

        def announce(manifest: Manifest) -> None:
            if self.publisher.announces:
                self.link.send(remote.Published(manifest=manifest, snapshot_seconds=snapshot_seconds, teachers=due))

        self._when_done(future, announce)
        for name in due:
            self._publish_teacher(self.teachers[name], version)

    def _publish_teacher(self, teacher: TeacherPublisher, version: int) -> None:
        """Publish a teacher that follows the policy as it is at this version of the policy."""
        with self.link.spans.span("publish"), self.trainer.taught_by(teacher.name) as weights:
            scored = self._score_canary(teacher.canary_token_ids)
            future = teacher.publish(version, self.trainer.policy_steps, weights, lambda _: scored)
        self._when_done(
            future,
            lambda manifest: self.link.send(remote.TeacherPublished(teacher=teacher.name, manifest=manifest)),
        )
