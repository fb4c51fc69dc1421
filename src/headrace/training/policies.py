"""The policies beside the policy in training: reference, proximal, teacher. They score the same rows, without gradient.

Training changes none of them. The reference is the policy before the first policy step, also after a restart, or the
base model of an adapter. The proximal policy has the weights with which the version in training began. When the weights
of a model are exchanged for a while, the model gets its own weights back to the bit, also after an error.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch

from headrace.config.declared import Needs
from headrace.errors import HeadraceError, UserError
from headrace.training.logprobs import Likeliest, Readings, read_row
from headrace.training.ranks import bring_to_rest
from headrace.training.routing import following
from headrace.training.rows import MicroBatch
from headrace.types import NO_VERSION, Batch, without_republished


class StoredWeights:
    """A copy of a model's trained weights, on the same device, that can take their place for a while.

    For a sharded model the copy holds this rank's part. All ranks exchange their parts at the same point between
    passes.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        bring_to_rest(model)
        # Weights that are not trained do not change, so they need no copy.
        self._live = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
        self._copies = {name: tensor.clone() for name, tensor in self._live.items()}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the copies by name. Writing into them changes the stored weights."""
        return self._copies

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Give the model the stored weights inside this context.

        The weights are exchanged in place, one tensor at a time, so this works for a sharded model too and needs the
        memory of one more tensor.
        """
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        bring_to_rest(self._model)
        for name, live in self._live.items():
            held = self._copies[name].clone()
            self._copies[name].copy_(live)
            live.copy_(held)


class RowScorer(Protocol):
    """What scores the rows of a batch."""

    def readings(self, rows: Sequence[MicroBatch], batch: Batch) -> list[Readings]:
        """Return the readings of each row's targets."""


class FrozenPolicy:
    """A policy that scores rows with a model, inside a context that turns the model into that policy."""

    def __init__(
        self,
        model: Any,
        context: Callable[[], AbstractContextManager[Any]] = nullcontext,
        *,
        follows: bool = True,
        top: Likeliest | None = None,
    ) -> None:
        """Set up the policy. If it `follows`, its experts are those of the policy in training: it uses the record.

        `top` asks for the policy's likeliest tokens at every target too.
        """
        self._model = model
        self._context = context
        self._follows = follows
        self._top = top

    def logprobs(self, rows: Sequence[MicroBatch], batch: Batch) -> list[torch.Tensor]:
        """Return the log-probabilities of each row's targets, [M]."""
        return [found.logprobs for found in self.readings(rows, batch)]

    @torch.no_grad()
    def readings(self, rows: Sequence[MicroBatch], batch: Batch) -> list[Readings]:
        """Return the readings of each row's targets, computed as those of the trained policy."""
        found = []
        with self._context():
            for row in rows:
                kept = None if batch.kept is None else batch.kept.at(row.sources)
                temperature = batch.temperature_at(row.sources)
                with following(self._model, row) if self._follows else nullcontext():
                    found.append(read_row(self._model, row, temperature=temperature, kept=kept, top=self._top))
        return found


class Remembered:
    """A frozen policy that scores each batch once. All batches must live as long as this object."""

    def __init__(self, policy: RowScorer) -> None:
        self._policy = policy
        self._found: dict[int, list[Readings]] = {}

    def readings(self, rows: Sequence[MicroBatch], batch: Batch) -> list[Readings]:
        """Return the readings of each row's targets. The rows of a batch must always be the same."""
        if id(batch) not in self._found:
            self._found[id(batch)] = self._policy.readings(rows, batch)
        return self._found[id(batch)]


class Policies:
    """The policies that a loss needs, kept beside the model that it trains.

    A model with an adapter contains its own reference: the model with the adapter switched off.
    """

    def __init__(
        self,
        model: Any,
        needs: Needs,
        *,
        teacher: Any = None,
        recorded: bool = False,
        switched_off: Callable[[], AbstractContextManager[Any]] | None = None,
    ) -> None:
        """Set up the policies. `recorded` says that batches have the scores of a teacher outside of the trainer.

        `switched_off` is a context in which a model with an adapter computes as its base.
        """
        self._model = model
        self._switched_off = switched_off
        self._needs = needs
        self._teacher = teacher
        self._reference: StoredWeights | None = None
        self._proximal: StoredWeights | None = None
        self._version: int | None = None
        self._recorded = recorded
        if needs.teacher and teacher is None and not recorded:
            raise UserError("[algorithm] teacher: this loss needs the model to learn from")

    @property
    def learn_from_record(self) -> bool:
        """Whether the loss learns from the recorded scores of a teacher outside of the trainer."""
        return self._needs.teacher and self._recorded

    @property
    def reference(self) -> Mapping[str, torch.Tensor] | None:
        """The stored weights of the reference, if there are any. A checkpoint is loaded by writing into them."""
        return None if self._reference is None else self._reference.tensors()

    def hold_reference(self) -> None:
        """Store the current weights as the reference, if the loss needs a reference and no adapter provides it."""
        if self._needs.reference and self._switched_off is None:
            self._reference = StoredWeights(self._model)

    def of(self, batch: Batch) -> dict[str, FrozenPolicy]:
        """Return the policies that must score this batch before it is trained, by their names in `TokenInputs`.

        Raises `HeadraceError` if a teacher outside of the trainer should have scored the batch, and has not.
        """
        found = {}
        if self._needs.reference:
            if self._reference is None:
                self.hold_reference()
            context = self._switched_off if self._reference is None else self._reference.installed
            assert context is not None
            found["reference"] = FrozenPolicy(self._model, context)
        if self._needs.proximal:
            found["proximal"] = FrozenPolicy(self._model, self._begun(batch).installed)
        if self.learn_from_record:
            _check_recorded(batch, self._needs.top_k)
        elif self._needs.teacher:
            found["teacher"] = FrozenPolicy(self._teacher, follows=False, top=self._likeliest())
        return found

    def _likeliest(self) -> Likeliest | None:
        """Return which of the teacher's tokens are compared: none that the policy has no row for."""
        if not self._needs.top_k:
            return None
        return Likeliest(self._needs.top_k, int(self._model.get_output_embeddings().weight.shape[0]))

    def _begun(self, batch: Batch) -> StoredWeights:
        """Return the weights with which the version in training began: those before its first batch was trained."""
        # A trainer that restarts inside a version publishes the same weights under another id: no version begins then.
        version = int(without_republished(batch.version, batch.republished))
        if self._proximal is None or version != self._version:
            self._proximal = None  # its memory is free before the next copy is made
            self._proximal = StoredWeights(self._model)
        self._version = version
        return self._proximal


def _check_recorded(batch: Batch, top_k: int) -> None:
    """Raise `HeadraceError` unless every trained token has the scores of a proved version of a teacher."""
    scores = batch.teacher
    if scores is None or (scores.versions[batch.trained] == NO_VERSION).any():
        raise HeadraceError(f"step {batch.step}: the batch lacks the scores of a teacher that its loss needs")
    if scores.k != top_k:
        raise HeadraceError(
            f"step {batch.step}: its tokens were scored with {scores.k} likeliest tokens of a teacher, and the loss "
            f"needs {top_k} (resume with the [algorithm] teacher_divergence and teacher_top_k of before)"
        )
