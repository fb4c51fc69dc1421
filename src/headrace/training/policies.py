"""The policies beside the one in training: reference, proximal, teacher. They score the same rows, without gradient.

None of them is changed by training: the reference is what the first policy step began with, also after a restart, or
the base of an adapter; the proximal one what the version in training began with. A model whose weights are exchanged
for a while has them back, to the bit, whatever happens meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from headrace.config.declared import Needs
from headrace.errors import UserError
from headrace.training.logprobs import row_logprobs
from headrace.training.packing import MicroBatch
from headrace.training.routing import following
from headrace.training.sharding import bring_to_rest
from headrace.types import Batch


class StoredWeights:
    """A copy of a model's weights, wherever those are, that can take their place for a while.

    Of a sharded model it is this rank's part: all ranks exchange theirs at the same point between passes.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        bring_to_rest(model)
        # What is not trained does not change.
        self._live = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
        self._copies = {name: tensor.clone() for name, tensor in self._live.items()}

    def take(self) -> None:
        """Copy the weights as they are now."""
        for name, copy in self._copies.items():
            copy.copy_(self._live[name])

    def tensors(self) -> dict[str, torch.Tensor]:
        """The copies by name: what is written to them is held."""
        return self._copies

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Inside, the model has the stored weights. Nothing is reallocated, so sharded weights may be exchanged too."""
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
    """Scores rows with a model, in a context that makes it the wanted policy."""

    def __init__(
        self, model: Any, context: Callable[[], AbstractContextManager[Any]] = nullcontext, *, follows: bool = True
    ) -> None:
        """`follows`: it has the experts of the policy in training, and takes those that were recorded."""
        self._model = model
        self._context = context
        self._follows = follows

    @torch.no_grad()
    def logprobs(self, rows: Sequence[MicroBatch], batch: Batch) -> list[torch.Tensor]:
        """For each row the log-probabilities of its targets, [M], as the loss takes the policy's own."""
        with self._context():
            return [self._row(row, batch) for row in rows]

    def _row(self, row: MicroBatch, batch: Batch) -> torch.Tensor:
        kept = None if batch.kept is None else batch.kept.at(row.sources)
        with following(self._model, row) if self._follows else nullcontext():
            return row_logprobs(self._model, row, temperature=batch.temperature, kept=kept)


class Policies:
    """The policies that a loss asks for, kept beside the model that it trains.

    A model with an adapter has its reference in itself: the adapter switched off.
    """

    def __init__(
        self,
        model: Any,
        needs: Needs,
        *,
        teacher: Any = None,
        switched_off: Callable[[], AbstractContextManager[Any]] | None = None,
    ) -> None:
        """`switched_off` is a context in which a model with an adapter is its base."""
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
        """The reference's weights, once there are any of its own; a checkpoint's are written to them."""
        return None if self._reference is None else self._reference.tensors()

    def hold_reference(self) -> None:
        """The present weights are the reference."""
        if self._needs.reference and self._switched_off is None:
            self._reference = StoredWeights(self._model)

    def of(self, batch: Batch) -> dict[str, FrozenPolicy]:
        """Those that score this batch before it is trained, by their names in `TokenInputs`."""
        found = {}
        if self._needs.reference:
            if self._reference is None:
                self.hold_reference()
            context = self._switched_off if self._reference is None else self._reference.installed
            assert context is not None
            found["reference"] = FrozenPolicy(self._model, context)
        if self._needs.proximal:
            found["proximal"] = FrozenPolicy(self._model, self._begun(batch.version).installed)
        if self._needs.teacher:
            found["teacher"] = FrozenPolicy(self._teacher, follows=False)
        return found

    def _begun(self, version: int) -> StoredWeights:
        """The weights that this version began with: those of its first batch, before it is trained."""
        if self._proximal is None:
            self._proximal = StoredWeights(self._model)
        elif version != self._version:
            self._proximal.take()
        self._version = version
        return self._proximal
