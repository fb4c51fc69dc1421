"""The trainer: one model, one optimizer, one step at a time. It knows batches, and no algorithm's name.

What it does is a function of its weights, its optimizer and the batch alone: continuing from a checkpoint gives the
same bits as never having stopped.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from safetensors.torch import load_file, save_file

from headrace.algorithms.losses.base import build_loss
from headrace.algorithms.losses.imitation import imitation
from headrace.config.schema import AlgorithmConfig, TrainingConfig, WarmStartConfig
from headrace.models.loading import load_model, named_weights
from headrace.observe.spans import SpanRecorder
from headrace.training.checkpoint import TrainerState, copy_companions, read_state, write_checkpoint
from headrace.training.logprobs import row_logprobs
from headrace.training.optimizer import Optimizer, learning_rate
from headrace.training.packing import plan_scoring
from headrace.training.report import StepReport
from headrace.training.step import accumulate
from headrace.types import NO_VERSION, Batch, Float32Array, Int32Array

OPTIMIZER_FILE = Path("trainer") / "optimizer.safetensors"


class Trainer:
    """Trains the model that it is given, in place. The model stays in eval mode: no dropout, in training either."""

    def __init__(
        self,
        model: Any,
        algorithm: AlgorithmConfig,
        training: TrainingConfig,
        *,
        total_steps: int,
        warm_start: WarmStartConfig,
        spans: SpanRecorder | None = None,
    ) -> None:
        self.model = model.eval()
        self._policy_loss = build_loss(algorithm)
        self._training = training
        self._warm_start = warm_start
        self._total_steps = total_steps
        self._spans = spans
        self._state = TrainerState()
        self._optimizer: Optimizer | None = None

    @property
    def steps_done(self) -> int:
        """Optimizer steps behind the weights, of both objectives, skipped ones included."""
        return self._state.steps_done

    @property
    def policy_steps(self) -> int:
        """Steps of the policy objective: those that the schedule counts."""
        return self._state.policy_steps

    def step(self, batch: Batch) -> StepReport:
        """One optimizer step. The first batch of another objective than the last one's starts a fresh optimizer."""
        started = time.monotonic()
        policy = batch.objective == "policy"
        optimizer = self._optimizer
        if optimizer is None or batch.objective != self._state.objective:
            optimizer = self._optimizer = Optimizer(self.model, self._training)
        gradients = accumulate(
            self.model,
            batch,
            self._policy_loss if policy else imitation,
            micro_batch_tokens=self._training.micro_batch_tokens,
            share_prefixes=self._training.share_prefixes,
            spans=self._spans,
        )
        rate = self._rate(batch)
        with self._spans.span("optimize") if self._spans else nullcontext():
            norm, changed = optimizer.apply(rate)
        self._state = TrainerState(
            steps_done=self._state.steps_done + 1,
            policy_steps=self._state.policy_steps + policy,
            skipped_steps=self._state.skipped_steps + (not changed),
            objective=batch.objective,
        )
        return StepReport(
            step=batch.step,
            version=batch.version,
            objective=batch.objective,
            loss=gradients.loss,
            grad_norm=norm,
            learning_rate=rate,
            tokens=gradients.tokens,
            sequence_tokens=len(batch.token_ids),
            trained_tokens=batch.trained_tokens,
            micro_batches=gradients.micro_batches,
            seconds=time.monotonic() - started,
            skipped=not changed,
            skipped_steps=self._state.skipped_steps,
            metrics=gradients.metrics,
        )

    def score(self, token_ids: Int32Array) -> Float32Array:
        """Log-probabilities of tokens 1..n given their prefix, untempered ([n - 1])."""
        if len(token_ids) < 2:
            return np.zeros(0, np.float32)
        with torch.no_grad():
            return row_logprobs(self.model, plan_scoring(token_ids)).float().cpu().numpy()

    def weights(self) -> dict[str, torch.Tensor]:
        """The live weights by canonical name: not copies, the next step changes them."""
        return named_weights(self.model)

    def save(self, directory: str | Path, *, version: int = NO_VERSION, source: str | Path | None = None) -> Path:
        """Write a checkpoint `step-XXXXXXXX` below this directory; its path, once it is whole.

        `version` is the id under which these weights were published, `source` the model directory whose tokenizer and
        other companions belong to it (by default the one that the model was loaded from).
        """
        companions = Path(source if source is not None else self.model.name_or_path)

        def write(path: Path) -> None:
            self.model.save_pretrained(path)
            # What the source has beside config and weights; the model's own generation config gives way to it.
            copy_companions(companions, path)
            tensors = self._optimizer.tensors() if self._optimizer else {}
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / OPTIMIZER_FILE)

        return write_checkpoint(Path(directory), msgspec.structs.replace(self._state, version=version), write)

    def load(self, checkpoint: str | Path) -> None:
        """Go on from a checkpoint: weights, optimizer and counts become those that were saved."""
        checkpoint = Path(checkpoint)
        state = read_state(checkpoint)
        saved = load_model(checkpoint, dtype=str(next(self.model.parameters()).dtype).removeprefix("torch."))
        with torch.no_grad():
            theirs = named_weights(saved)
            for name, tensor in self.weights().items():
                tensor.copy_(theirs[name])
        self._optimizer = None
        if state.objective:
            self._optimizer = Optimizer(self.model, self._training)
            self._optimizer.restore(load_file(checkpoint / OPTIMIZER_FILE))
        self._state = state

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
