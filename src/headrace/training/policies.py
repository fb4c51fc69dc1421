"""The policies beside the policy in training: reference, proximal, teacher. They score the same rows, without gradient.

Training changes none of them. The reference is the policy before the first policy step, also after a restart, or the
base model of an adapter. The proximal policy has the weights with which the version in training began. When the weights
of a model are exchanged for a while, the model gets its own weights back to the bit, also after an error.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from headrace.config.declared import Needs
from headrace.errors import UserError
from headrace.training.logprobs import read_row
from headrace.training.ranks import bring_to_rest
from headrace.training.routing import following
from headrace.training.rows import MicroBatch
from headrace.types import Batch, without_republished


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


class FrozenPolicy:
    """A policy that scores rows with a model, inside a context that turns the model into that policy."""

    def __init__(
        self, model: Any, context: Callable[[], AbstractContextManager[Any]] = nullcontext, *, follows: bool = True
    ) -> None:
        """Set up the policy. If it `follows`, its experts are those of the policy in training: it uses the record."""
        self._model = model
        self._context = context
        self._follows = follows

    @torch.no_grad()
    def logprobs(self, rows: Sequence[MicroBatch], batch: Batch) -> list[torch.Tensor]:
        """Return the log-probabilities of each row's targets, [M], computed as those of the trained policy."""
        found = []
        with self._context():
            for row in rows:
                kept = None if batch.kept is None else batch.kept.at(row.sources)
                temperature = batch.temperature_at(row.sources)
                with following(self._model, row) if self._follows else nullcontext():
                    found.append(read_row(self._model, row, temperature=temperature, kept=kept).logprobs)
        return found


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
        switched_off: Callable[[], AbstractContextManager[Any]] | None = None,
    ) -> None:
        """Set up the policies. `switched_off` is a context in which a model with an adapter computes as its base."""
        self._model = model
        self._switched_off = switched_off
        self._needs = needs
        self._teacher = teacher
        self._reference: StoredWeights | None = None
        self._proximal: StoredWeights | None = None
        self._version: int | None = None
        if needs.teacher and teacher is None:
            raise UserError("[algorithm] teacher: this loss needs the model to learn from")

    @property
    def reference(self) -> Mapping[str, torch.Tensor] | None:
        """The stored weights of the reference, if there are any. A checkpoint is loaded by writing into them."""
        return None if self._reference is None else self._reference.tensors()

    def hold_reference(self) -> None:
        """Store the current weights as the reference, if the loss needs a reference and no adapter provides it."""
        if self._needs.reference and self._switched_off is None:
            self._reference = StoredWeights(self._model)

    def of(self, batch: Batch) -> dict[str, FrozenPolicy]:
        """Return the policies that must score this batch before it is trained, by their names in `TokenInputs`."""
        found = {}
        if self._needs.reference:
            if self._reference is None:
                self.hold_reference()
            context = self._switched_off if self._reference is None else self._reference.installed
            assert context is not None
            found["reference"] = FrozenPolicy(self._model, context)
        if self._needs.proximal:
            found["proximal"] = FrozenPolicy(self._model, self._begun(batch).installed)
        if self._needs.teacher:
            found["teacher"] = FrozenPolicy(self._teacher, follows=False)
        return found

    def _begun(self, batch: Batch) -> StoredWeights:
        """Return the weights with which the version in training began: those before its first batch was trained."""
        # A trainer that restarts inside a version publishes the same weights under another id: no version begins then.
        version = int(without_republished(batch.version, batch.republished))
        if self._proximal is None or version != self._version:
            self._proximal = None  # its memory is free before the next copy is made
            self._proximal = StoredWeights(self._model)
        self._version = version
        return self._proximal
