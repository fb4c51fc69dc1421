"""The trainer: it holds one model and one optimizer, and makes one step at a time.

The trainer knows batches, but no algorithm's name. A step depends only on the weights, the optimizer and the batch, so
continuing from a checkpoint gives the same bits as never having stopped.

`accumulate` runs forward and backward over a whole batch: afterwards the gradients are those of `sum(weights *
token_loss)`. How the batch is cut into rows, and over how many ranks, changes memory and speed but never the gradient.
Nothing in it waits for the device: loss and metrics stay on the device and are read once, at the end of the step.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from headrace.algorithms.losses.base import Loss, TokenInputs, build_loss, given, imitation, with_entropy
from headrace.config.algorithm import MOST_ENTROPY_WEIGHT
from headrace.config.declared import needs
from headrace.config.schema import AlgorithmConfig, TrainingConfig, WarmStartConfig
from headrace.config.scorers import TeacherConfig
from headrace.errors import HeadraceError, UserError
from headrace.observe.spans import SpanRecorder
from headrace.training.attention import PackedAttention
from headrace.training.base import StepReport
from headrace.training.checkpoints.base import TrainerState, read_state
from headrace.training.checkpoints.saving import Saver
from headrace.training.critic import Critic
from headrace.training.devices import compute_dtype, input_device, upload
from headrace.training.finite import check_numbers
from headrace.training.followers import exchanged
from headrace.training.layers import compiled_layers, uncompiled, warm_up_batches
from headrace.training.logprobs import EntropyOf, Readings, read_row
from headrace.training.lora import TrainedAdapter
from headrace.training.optimizer import Applied, HalfWeights, Optimizer, learning_rate
from headrace.training.policies import Policies, Remembered, RowScorer
from headrace.training.ranks import Ranks, reduce_gradients, reshard
from headrace.training.routing import following
from headrace.training.rows import JOIN_COST, MicroBatch, passes, plan, plan_scoring
from headrace.training.teaching import Lesson
from headrace.types import NO_VERSION, Batch, Float32Array, Int32Array

LOSS = "loss"
PART = "loss/"
"""The beginning of the names of the components of the loss."""
REROUTED = "rerouted"
"""The metric for forced routing: the share of layers, per trained token, in which the record changed the choice."""


class Trainer:
    """The trainer of one model, which it changes in place.

    The model stays in eval mode, also in training, so there is no dropout. If an adapter is given, it must belong to
    this model. Then only the adapter is trained, published and saved, and the adapter's own dropout is active only
    while gradients are computed.
    """

    def __init__(
        self,
        model: Any,
        algorithm: AlgorithmConfig,
        training: TrainingConfig,
        *,
        total_steps: int,
        warm_start: WarmStartConfig,
        teacher: Any = None,
        teacher_recorded: bool = False,
        ranks: Ranks | None = None,
        spans: SpanRecorder | None = None,
        adapter: TrainedAdapter | None = None,
        chunk_elements: int | None = None,
        correct_above: int | None = None,
        followers: Mapping[str, TeacherConfig] | None = None,
        steps_per_version: int = 1,
    ) -> None:
        """Build the trainer. `teacher_recorded` says that batches have the scores of a teacher outside of the trainer.

        `chunk_elements` limits how many logits exist at once, if the default does not suit. `followers` are the
        teachers that follow the policy, by name.
        """
        self.model = model.eval()
        if adapter is not None:
            # The adapter must find its tensors after sharding, and before 16-bit copies replace the master weights.
            adapter.find_weights()
        half = compute_dtype(training, input_device(model)) == "bfloat16"
        # With several ranks there is no second copy: sharding makes 16-bit weights only while it gathers them.
        self._half = HalfWeights(model) if half and ranks is None else None
        self._warm = compiled_layers(model) is None
        self._adapter = adapter
        self._ranks = ranks
        self._algorithm = algorithm
        self._loss = build_loss(algorithm, correct_above)
        self._needs = needs(algorithm)
        self._policies = Policies(
            self.model,
            self._needs,
            teacher=teacher,
            recorded=teacher_recorded,
            switched_off=adapter.disabled if adapter is not None else None,
        )
        self._critic = Critic(model, algorithm, training, ranks) if algorithm.critic else None
        self._saver = Saver(
            model,
            self._policies,
            ranks=ranks,
            half=self._half,
            adapter=adapter,
            critic=self._critic,
            followers=followers,
            steps_per_version=steps_per_version,
        )
        self._accumulate = partial(
            accumulate,
            model,
            micro_batch_tokens=training.micro_batch_tokens,
            share_prefixes=training.share_prefixes,
            ranks=ranks,
            chunk_elements=chunk_elements,
        )
        self._training = training
        self._warm_start = warm_start
        self._total_steps = total_steps
        self._spans = spans
        self._state = TrainerState()
        self._optimizer = self._new_optimizer()

    @property
    def steps_done(self) -> int:
        """The number of optimizer steps behind the weights, of both objectives, skipped steps included."""
        return self._state.steps_done

    @property
    def policy_steps(self) -> int:
        """The number of steps of the policy objective. The learning rate schedule counts these steps."""
        return self._state.policy_steps

    def step(self, batch: Batch) -> StepReport:
        """Make one optimizer step, with a new optimizer if the objective differs from that of the previous batch.

        The step has an update of the weights for each minibatch of the batch, in each of its epochs. The reported
        figures are then means over the updates. Raises `HeadraceError` if a number of the batch is not finite.
        """
        if not self._policies.learn_from_record:
            # Rollouts of a resumed run may have scores of a teacher that nothing learns from any more.
            batch = msgspec.structs.replace(batch, teacher=None)
        check_numbers(batch)
        self.warm_up()
        started = time.monotonic()
        policy = batch.objective == "policy"
        if self._state.objective not in ("", batch.objective):
            self._optimizer = self._new_optimizer()
        rate = self._rate(batch)
        bonus = {"entropy_weight": self._entropy_weight} if policy and self._algorithm.entropy_target else {}
        updates = self._updates(batch, rate)
        changed = any(update.applied.changed for update in updates)
        finite = all(update.applied.finite for update in updates)
        # Updates that were skipped say nothing about the others.
        told = [update for update in updates if update.applied.changed == changed]
        metrics = _means([update.gradients.metrics for update in told])
        self._state = TrainerState(
            steps_done=self._state.steps_done + 1,
            policy_steps=self._state.policy_steps + policy,
            skipped_steps=self._state.skipped_steps + (not changed),
            skipped_in_a_row=0 if changed else self._state.skipped_in_a_row + (not finite),
            objective=batch.objective,
            entropy_weight=self._next_entropy_weight(metrics if policy and changed else {}),
        )
        for follower in self._saver.followers.values():
            if policy:
                follower.follow(self._state.policy_steps, self.weights())
            else:
                follower.begin(self.weights())
        norm = _mean([update.applied.norm for update in told])
        row = self._state.skipped_in_a_row
        if row >= self._training.max_skipped:
            raise HeadraceError(
                f"the last {row} steps were skipped because their losses or gradients are not finite "
                f"(norm {norm}); "
                f"[training] max_skipped = {self._training.max_skipped} ends the run"
            )
        return StepReport(
            step=batch.step,
            loss=_mean([update.gradients.loss for update in told]),
            grad_norm=norm,
            learning_rate=rate,
            tokens=sum(update.gradients.tokens for update in updates),
            micro_batches=sum(update.gradients.micro_batches for update in updates),
            seconds=time.monotonic() - started,
            skipped=not changed,
            skipped_steps=self._state.skipped_steps,
            metrics=metrics | {"update_ratio": _mean([update.applied.update_ratio for update in told])} | bonus,
        )

    def _updates(self, batch: Batch, rate: float) -> list["_Update"]:
        """Update the weights for each minibatch of each epoch. The frozen policies score a minibatch only once."""
        policy, parts = batch.objective == "policy", batch.parts()
        policies: Mapping[str, RowScorer] = self._policies.of(batch) if policy else {}
        if batch.epochs > 1:
            policies = {name: Remembered(each) for name, each in policies.items()}
        found = []
        for number, part in enumerate(parts * batch.epochs):
            gradients = self._accumulate(
                part,
                self._policy_loss() if policy else imitation,
                policies=policies,
                entropy=self._needs.entropy if policy else "none",
                critic=self._critic if policy else None,
                half=self._half,
                dropout=partial(self._dropout, number),
                spans=self._spans,
            )
            with self._spans.span("optimize") if self._spans else nullcontext():
                read = self._optimizer.begin(rate, gradients.sums.get(LOSS))
                if self._half is not None:
                    self._half.refresh()
                # This is the only place in an update where the host waits for the device.
                found.append(_Update(gradients, read()))
                if self._critic is not None and policy:
                    self._critic.step(changed=found[-1].applied.changed)
        return found

    def warm_up(self) -> None:
        """Compile the layers, if they are to be compiled, by two passes whose gradients are dropped. Idempotent."""
        layers = compiled_layers(self.model)
        if self._warm or layers is None:
            return
        self._warm = True
        try:
            vocabulary = int(self.model.get_output_embeddings().weight.shape[0])
            for batch in warm_up_batches(vocabulary, self._training.micro_batch_tokens):
                self._accumulate(batch, imitation)
        except layers.failure as error:
            layers.give_up(error)
        finally:
            self.model.zero_grad(set_to_none=True)

    def score(self, token_ids: Int32Array) -> Float32Array:
        """Return the log-probabilities of tokens 1..n given their prefix, [n - 1], at temperature 1."""
        if len(token_ids) < 2:
            return np.zeros(0, np.float32)
        with torch.no_grad(), uncompiled(self.model):
            logprobs = read_row(self.model, plan_scoring(token_ids)).logprobs.float().cpu().numpy()
        reshard(self.model)
        return logprobs

    def reference_score(self, token_ids: Int32Array) -> Float32Array:
        """Return `score` under the base model, with the adapter switched off. Raises if there is no adapter."""
        if self._adapter is None:
            raise UserError("reference log-probabilities need [lora]: without an adapter the base model is not kept")
        with self._adapter.disabled():
            return self.score(token_ids)

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the live trained weights, all or the adapter's, by canonical name. The next step changes them."""
        return self._saver.weights()

    @contextmanager
    def taught_by(self, follower: str) -> Iterator[dict[str, torch.Tensor]]:
        """Give the model the weights of a teacher that follows it inside this context, and return them."""
        held, live = self._saver.followers[follower].weights(), self.weights()
        try:
            with exchanged(live, held):
                if self._half is not None:
                    self._half.refresh()
                yield {name: live[name] for name in held}
        finally:
            if self._half is not None:
                self._half.refresh()

    def save(self, directory: str | Path, *, version: int = NO_VERSION, source: str | Path | None = None) -> Path:
        """Write a checkpoint `step-XXXXXXXX` below this directory, and return its path once the checkpoint is complete.

        `version` is the id under which these weights were published. `source` is the model directory whose tokenizer
        and other companion files are copied into the checkpoint, by default the one that the model was loaded from.
        """
        return self.begin_save(directory, version=version, source=source).result()

    def begin_save(
        self,
        directory: str | Path,
        *,
        version: int = NO_VERSION,
        source: str | Path | None = None,
        chat_template: str | None = None,
    ) -> Future[Path]:
        """Start a checkpoint like `save`, but return as soon as everything is copied: training continues meanwhile.

        A second call waits until the first checkpoint is written, and raises the error if that write failed.
        `chat_template` takes the place of the one in `source`.
        """
        companions = Path(source if source is not None else self.model.name_or_path)
        optimizer = self._training.optimizer if self._state.objective else ""
        state = msgspec.structs.replace(self._state, version=version, optimizer=optimizer)
        return self._saver.begin(Path(directory), state, self._optimizer, companions, chat_template)

    def load(self, checkpoint: str | Path) -> None:
        """Continue from a checkpoint, which may have been written by any number of ranks.

        Weights, optimizer and counters become those of the checkpoint. Call this method on a trainer that has not made
        a step: its current weights become the reference, unless the checkpoint holds a reference.
        """
        checkpoint = Path(checkpoint)
        state = read_state(checkpoint)
        if state.optimizer not in ("", self._training.optimizer):
            raise UserError(
                f'[training] optimizer = "{self._training.optimizer}": {checkpoint} holds the state of '
                f'"{state.optimizer}"; resume with that one, or begin a new run with its model'
            )
        self._optimizer = self._new_optimizer()
        self._saver.load(checkpoint, state, self._optimizer if state.objective else None)
        self._state = state

    def close(self) -> None:
        """Wait until a checkpoint in progress is written. Raise the error if writing it failed."""
        self._saver.close()

    @property
    def _entropy_weight(self) -> float:
        """The weight of the entropy bonus in the next step, if it follows a target."""
        weight = self._state.entropy_weight
        return (self._algorithm.entropy_weight or 0.0) if weight is None else weight

    def _policy_loss(self) -> Loss:
        return self._loss if self._algorithm.entropy_target is None else with_entropy(self._loss, self._entropy_weight)

    def _next_entropy_weight(self, metrics: Mapping[str, float]) -> float | None:
        """Return the weight after a step with these metrics, which are empty if the step does not count."""
        target = self._algorithm.entropy_target
        if target is None or "entropy" not in metrics:
            return self._state.entropy_weight
        weight = self._entropy_weight + self._algorithm.entropy_rate * (target - metrics["entropy"])
        return min(max(weight, 0.0), MOST_ENTROPY_WEIGHT)

    def _new_optimizer(self) -> Optimizer:
        return Optimizer(self.model, self._training, self._ranks, self._half.masters if self._half else None)

    def _dropout(self, update: int) -> AbstractContextManager[None]:
        share = self._ranks.data if self._ranks else 0
        return self._adapter.dropout(self._state.steps_done, share, update) if self._adapter else nullcontext()

    def _rate(self, batch: Batch) -> float:
        if batch.objective == "imitation":
            return self._warm_start.learning_rate
        return learning_rate(
            self._state.policy_steps + 1,
            peak=self._training.learning_rate,
            warmup_steps=self._training.warmup_steps,
            schedule=self._training.schedule,
            total_steps=self._total_steps,
        )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _means(each: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: _mean([metrics[name] for metrics in each if name in metrics]) for name in dict.fromkeys(chain(*each))}


@dataclass
class Gradients:
    """The results of `accumulate` beside the gradients on the parameters.

    The first read of `figures`, `loss` or `metrics` waits for the device and for the other ranks, so every
    rank must read.
    """

    sums: dict[str, torch.Tensor]
    """Sums over this rank's rows in float64: the loss under `LOSS`, its components under names that begin with `PART`,
    and each metric summed over trained tokens."""
    trained_tokens: int
    tokens: int
    micro_batches: int
    ranks: Ranks | None = None

    @cached_property
    def figures(self) -> dict[str, float]:
        """The sums over the rows of all ranks, taken from the device and summed over the ranks at the first read."""
        if not self.sums:
            return {LOSS: 0.0}
        values = torch.stack(list(self.sums.values())).tolist()
        if self.ranks:
            values = self.ranks.sum_over_data(values)
        return dict(zip(self.sums, values, strict=True))

    @property
    def loss(self) -> float:
        """The loss of the batch."""
        return self.figures[LOSS]

    @property
    def metrics(self) -> dict[str, float]:
        """The mean of each metric over the trained tokens of the batch, and the components of the loss."""
        count = max(self.trained_tokens, 1)
        figures = {name: value for name, value in self.figures.items() if name != LOSS}
        return {name: value if name.startswith(PART) else value / count for name, value in figures.items()}


class _Update(NamedTuple):
    """One update of the weights."""

    gradients: Gradients
    applied: Applied


def accumulate(
    model: Any,
    batch: Batch,
    loss: Loss,
    *,
    micro_batch_tokens: int,
    share_prefixes: bool,
    policies: Mapping[str, RowScorer] | None = None,
    entropy: EntropyOf = "none",
    critic: Critic | None = None,
    ranks: Ranks | None = None,
    half: HalfWeights | None = None,
    dropout: Callable[[], AbstractContextManager[None]] = nullcontext,
    chunk_elements: int | None = None,
    spans: SpanRecorder | None = None,
) -> Gradients:
    """Add the batch's gradients to the model's parameters. The figures of the result are equal on all ranks.

    `policies` are the frozen policies that the loss needs, by their names in `TokenInputs`. They score all rows before
    the first gradient is computed. `half` holds the master weights, where the passes use a narrower copy: the masters
    then get the gradients. A `critic` gives the advantages, and its value head gets gradients too. `dropout` is active
    while gradients are computed, and not while policies score.
    `chunk_elements` limits how many logits exist at once.
    """
    rank, shares = (ranks.data, ranks.data_ranks) if ranks else (0, 1)
    on_host = input_device(model).type == "cpu"
    rows = plan(
        batch,
        micro_batch_tokens=micro_batch_tokens,
        share_prefixes=share_prefixes,
        ranks=shares,
        join_cost=0.0 if on_host else JOIN_COST,
    )
    mine = passes(rows, rank, shares) if ranks else [(row, True) for row in rows]
    ordered = deterministic if on_host else nullcontext
    with spans.span("score") if spans and policies else nullcontext(), ordered():
        scores = {name: policy.readings([row for row, _ in mine], batch) for name, policy in (policies or {}).items()}
    sums: dict[str, torch.Tensor] = {}
    with dropout():
        # A row does not count if it is only computed again to keep this rank in step with the others; see `passes`.
        for number, (row, counts) in enumerate(mine):
            reduce_gradients(model, number + 1 == len(mine))
            others = {name: found[number] for name, found in scores.items()}
            with spans.span("train") if spans else nullcontext(), ordered():
                with following(model, row) as forced:
                    found = _backward(
                        model, batch, row, loss, others, entropy, critic, chunk_elements, share=float(counts)
                    )
                if forced is not None:
                    # A position that predicts the first token of several answers counts once for each answer.
                    places = upload(row.predictors, input_device(model))
                    changed = torch.stack([tokens[places].sum() for tokens in forced.values()])
                    found[REROUTED] = changed.sum() / len(forced)
            if half is not None:
                half.collect()
            for name, value in found.items():
                value = value.detach().double() * counts
                sums[name] = sums[name] + value if name in sums else value
    return Gradients(
        sums=sums,
        trained_tokens=batch.trained_tokens,
        tokens=sum(len(row) for row in rows),
        micro_batches=len(rows),
        ranks=ranks,
    )


def _backward(
    model: Any,
    batch: Batch,
    row: MicroBatch,
    loss: Loss,
    others: Mapping[str, Readings],
    entropy: EntropyOf,
    critic: Critic | None,
    chunk_elements: int | None,
    *,
    share: float,
) -> dict[str, torch.Tensor]:
    """Run one row forward and backward, and return its loss and the sums of its metrics.

    `share` is the factor on the gradient: 1, or 0 for a row that does not count. The backward pass runs in both cases,
    because the other ranks wait for this rank in it. The returned values are not multiplied by `share`.
    """
    kept = None if batch.kept is None else batch.kept.at(row.sources)
    attention = PackedAttention(row)
    others = dict(others)
    lesson = Lesson.read(others.pop("teacher")) if "teacher" in others else None
    if batch.teacher is not None:
        lesson = Lesson.recorded(batch.teacher, row, input_device(model))
    readings = read_row(
        model,
        row,
        temperature=batch.temperature_at(row.sources),
        kept=kept,
        entropy=entropy,
        top=None if lesson is None else lesson.top_ids,
        hidden_states=critic is not None,
        attention=attention,
        chunk_elements=chunk_elements,
    )
    logprobs = readings.logprobs

    def gathered(values: Any) -> torch.Tensor:
        return upload(values[row.sources], logprobs.device, logprobs.dtype)

    inputs = TokenInputs(
        logprobs=logprobs,
        behaviour=gathered(batch.logprobs),
        advantages=gathered(batch.advantages),
        sequences=upload(row.sequences, logprobs.device),
        lags=gathered(batch.token_lags()),
        entropy=readings.entropy,
        teacher=None if lesson is None else lesson.logprobs.to(logprobs),
        top=None if lesson is None else lesson.beside(readings),
        **{name: scored.logprobs.to(logprobs) for name, scored in others.items()},
    )
    judgement = None
    if critic is not None:
        judgement = critic.judge(given(readings.hidden), inputs, gathered(given(batch.rewards)))
        inputs = inputs._replace(advantages=judgement.advantages)
    result = loss(inputs)
    weights = gathered(batch.weights)
    objective = total = (weights * result.values).sum()
    parts = {f"{PART}{name}": (weights * values).sum() for name, values in result.parts.items()}
    sums = result.sums
    if critic is not None and judgement is not None:
        # The critic's error is a mean over the tokens that it judges, however the policy's loss is normalised.
        error = judgement.losses.sum() / batch.trained_tokens
        objective, sums = total + error, sums | judgement.sums
        parts = (parts or {f"{PART}policy": total}) | {f"{PART}value": critic.trunk_weight * error}
        total = total + critic.trunk_weight * error
    (objective * share).backward()  # type: ignore[no-untyped-call]
    # The attention context must live until here, because compiled layers look it up in their backward pass.
    del attention
    return {LOSS: total, **parts, **sums}


@contextmanager
def deterministic() -> Iterator[None]:
    """Make equal inputs give equal bits inside this context, by accumulating into memory in a fixed order."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    fill = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Filling new memory finds bugs but costs time. It changes no result that is read.
    memory.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        memory.fill_uninitialized_memory = fill
