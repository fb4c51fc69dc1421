"""Saving and loading of a trainer: weights, optimizer, and the reference if no model directory holds it.

A checkpoint is the same, whatever the number of ranks that wrote it: a whole model directory, and safetensors files
beside it. Several ranks write their parts into the same files (`regions`). No file is a pickle.

Training continues while a checkpoint is written. Any number of ranks can read it, and the loaded tensors are bit for
bit those that were saved.
"""

import copy
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from headrace.config.scorers import TeacherConfig
from headrace.errors import UserError
from headrace.models.loading import load_model, named_weights
from headrace.training.checkpoints.base import (
    CHAT_TEMPLATE,
    TrainerState,
    begin_checkpoint,
    copy_companions,
    final_path,
    finish_checkpoint,
    partial_path,
    refuse_pickled,
)
from headrace.training.checkpoints.regions import Part, create, own_parts, write_parts
from headrace.training.critic import Critic
from headrace.training.devices import on_host
from headrace.training.eight_bits import spread_file
from headrace.training.followers import Follower, make_follower
from headrace.training.lora import ADAPTER_FILE, TrainedAdapter
from headrace.training.optimizer import HalfWeights, Optimizer
from headrace.training.policies import Policies
from headrace.training.ranks import Ranks, copy_own_part, own_part, placed_like, whole_tensor

OPTIMIZER_FILE = Path("trainer") / "optimizer.safetensors"
REFERENCE_FILE = Path("trainer") / "reference.safetensors"
CRITIC_FILE = Path("trainer") / "critic.safetensors"
GATHERED = Path("trainer") / ".weights"
"""The file in which the ranks put the weights together. The first rank writes the model's own files from it."""
Tensors: TypeAlias = Mapping[str, torch.Tensor]


def follower_file(name: str) -> Path:
    """Return the file of a checkpoint that holds the teacher of this name, which follows the policy."""
    return Path("trainer") / f"teacher-{name}.safetensors"


class Saver:
    """The saver writes checkpoints of one trainer in the background, one at a time, and loads one into a new trainer.

    All ranks must make the same calls.
    """

    def __init__(
        self,
        model: Any,
        policies: Policies,
        *,
        ranks: Ranks | None,
        half: HalfWeights | None,
        adapter: TrainedAdapter | None,
        critic: Critic | None = None,
        followers: Mapping[str, TeacherConfig] | None = None,
        steps_per_version: int = 1,
    ) -> None:
        self._critic = critic
        self._model = model
        self._policies = policies
        self._ranks = ranks
        self._first = ranks is None or ranks.rank == 0
        self._half = half
        self._adapter = adapter
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._last: Future[Path] | None = None
        self.followers: dict[str, Follower] = {
            name: make_follower(section, self.weights(), steps_per_version)
            for name, section in (followers or {}).items()
        }
        """The teachers that follow the policy, by name. A checkpoint holds them too."""

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the live trained weights, all or the adapter's, by canonical name. The next step changes them."""
        if self._adapter is not None:
            return self._adapter.weights()
        masters = {} if self._half is None else {name: p.detach() for name, p in self._half.masters.items()}
        return named_weights(self._model) | masters

    def begin(
        self,
        directory: Path,
        state: TrainerState,
        optimizer: Optimizer,
        companions: Path,
        chat_template: str | None = None,
    ) -> Future[Path]:
        """Start writing a checkpoint below this directory, as `Trainer.begin_save` says.

        `companions` is the model directory whose tokenizer and similar files are copied. An adapter is small, so the
        first rank writes all of it.
        """
        self._wait()
        partial = partial_path(directory, state)
        if self._first:
            begin_checkpoint(partial)
        if self._ranks is not None:
            self._ranks.meet()
        parameters = dict(self._model.named_parameters())
        # The states of this rank's optimizer, as shards of whole tensors if the parameters are sharded.
        moments = {
            key: placed_like(tensor, parameters[key.partition("/")[2]]) for key, tensor in optimizer.tensors().items()
        }
        value_head = {} if self._critic is None else self._critic.tensors()
        reference = self._policies.reference
        if reference is None or state.steps_done == state.policy_steps:
            # The model directory holds the reference, unless a warm start made it.
            reference = {}
        if self._ranks is None or self._adapter is not None:
            write = self._copy_whole(partial, moments, reference)
        else:
            write = self._copy_parts(self._ranks, partial, moments, reference)

        def finish() -> Path:
            write()
            if not self._first:
                return final_path(partial)
            # The source's companion files are copied after the weights: its generation config replaces the model's own.
            copy_companions(companions, partial)
            if value_head:
                save_file(value_head, partial / CRITIC_FILE)
            if chat_template is not None:
                (partial / CHAT_TEMPLATE).write_text(chat_template, encoding="utf-8")
            return finish_checkpoint(partial, state)

        self._last = self._thread.submit(finish)
        return self._last

    def _copy_whole(self, path: Path, moments: Tensors, reference: Tensors) -> Callable[[], None]:
        """Copy everything that a checkpoint holds, gathered from all ranks, and return the function that writes it."""
        with self._whole():
            write_weights = self._adapter.snapshot() if self._adapter else _snapshot(self._model)
        moments = on_host({key: whole_tensor(tensor) for key, tensor in moments.items()})
        reference = on_host(reference)
        followers = {name: on_host(follower.state()) for name, follower in self.followers.items()}

        def write() -> None:
            write_weights(path)
            for name, state in followers.items():
                save_file(state, path / follower_file(name))
            save_file(moments, path / OPTIMIZER_FILE)
            if reference:
                save_file(reference, path / REFERENCE_FILE)

        return write if self._first else lambda: None

    def _copy_parts(self, ranks: Ranks, path: Path, moments: Tensors, reference: Tensors) -> Callable[[], None]:
        """Copy this rank's parts, and return the function that writes them into files which all ranks fill."""
        kinds = {GATHERED: self.weights(), OPTIMIZER_FILE: moments, REFERENCE_FILE: reference}
        files = {path / name: tensors for name, tensors in kinds.items() if tensors}
        parts: dict[Path, dict[str, Part]] = {
            file: own_parts(tensors, ranks.coordinate) for file, tensors in files.items()
        }

        def write() -> None:
            if self._first:
                for file, tensors in files.items():
                    create(file, tensors)
            ranks.meet()
            for file, mine in parts.items():
                write_parts(file, mine)
            ranks.meet()
            if self._first:
                write_model(self._model.config, self._model.generation_config, load_file(path / GATHERED), path)
                (path / GATHERED).unlink()

        return write

    def load(self, checkpoint: Path, state: TrainerState, optimizer: Optimizer | None) -> None:
        """Load a checkpoint with this state into the weights and the optimizer. The optimizer must be new."""
        refuse_pickled(checkpoint)
        if state.policy_steps:
            self._policies.hold_reference()
            self._load_reference(checkpoint, state)
        self._load_weights(checkpoint)
        if self._critic is not None and (checkpoint / CRITIC_FILE).is_file():
            self._critic.restore(load_file(checkpoint / CRITIC_FILE))
        for name, follower in self.followers.items():
            if not (checkpoint / follower_file(name)).is_file():
                raise UserError(f"[scorers.{name}] policy: {checkpoint} does not hold this teacher; begin a new run")
            try:
                follower.restore(load_file(checkpoint / follower_file(name)))
            except ValueError as error:
                path = checkpoint / follower_file(name)
                raise UserError(f"[scorers.{name}] policy: {path}: {error}; resume as it was trained") from error
        if optimizer:
            optimizer.restore(self._own_moments(checkpoint))
        if self._half is not None:
            self._half.refresh()

    def close(self) -> None:
        """Wait until a checkpoint in progress is written. Raise the error if writing it failed. Idempotent."""
        try:
            self._wait()
        finally:
            self._thread.shutdown(wait=True)

    def _wait(self) -> None:
        """Wait until nothing is being written. Raise the error of the last checkpoint if it failed, once."""
        last, self._last = self._last, None
        if last is not None:
            last.result()
            # Also wait for the callbacks of that checkpoint, such as pruning older ones, because pruning clears the
            # directory too.
            self._thread.submit(lambda: None).result()

    def _whole(self) -> AbstractContextManager[None]:
        return self._half.whole() if self._half else nullcontext()

    def _load_reference(self, checkpoint: Path, state: TrainerState) -> None:
        """Load the reference, if there is one, from a checkpoint that holds its weights.

        If the checkpoint does not hold them, the reference is the model directory's, which is already in place. If a
        warm start made the reference, a missing one raises a `UserError`.
        """
        reference = self._policies.reference
        if reference is None:
            return
        if (checkpoint / REFERENCE_FILE).is_file():
            copy_own_part(load_file(checkpoint / REFERENCE_FILE), reference)
        elif state.steps_done > state.policy_steps:
            raise UserError(
                f"[algorithm] kl: {checkpoint} does not hold the policy that its warm start made, the reference; "
                "resume as it was trained, or begin a new run with its model"
            )

    def _load_weights(self, checkpoint: Path) -> None:
        if self._adapter is not None:
            with self._whole():
                self._adapter.load(checkpoint)
            return
        if (checkpoint / ADAPTER_FILE).is_file():
            raise UserError(f"{checkpoint} holds an adapter only: it is of a run with [lora]")
        weights = self.weights()
        saved = load_model(checkpoint, dtype=str(next(iter(weights.values())).dtype).removeprefix("torch."))
        copy_own_part(named_weights(saved), weights)

    def _own_moments(self, checkpoint: Path) -> dict[str, torch.Tensor]:
        """Return the optimizer's tensors in a file, cut to the part that this rank's optimizer updates."""
        parameters = dict(self._model.named_parameters())
        found: dict[str, torch.Tensor] = load_file(checkpoint / OPTIMIZER_FILE)
        if self._ranks is not None:
            found = spread_file(found, {name: parameter.shape for name, parameter in parameters.items()})
        for key, tensor in found.items():
            parameter = parameters.get(key.partition("/")[2])
            if parameter is not None and tensor.shape == parameter.shape:
                found[key] = own_part(tensor, parameter)
        return found


def write_model(config: Any, generation: Any, weights: Tensors, path: Path) -> None:
    """Write these whole weights of a model as `save_pretrained` does. `generation` is its generation config, if any."""
    with torch.device("meta"):
        # FSDP derives a class of its own from the model's class, so the model is built anew, without memory.
        plain: Any = AutoModelForCausalLM.from_config(copy.deepcopy(config))
    if generation is not None:
        plain.generation_config = copy.deepcopy(generation)
    first = {id(p): name for name, p in reversed(list(plain.named_parameters(remove_duplicate=False)))}
    names = {name: first[id(p)] for name, p in plain.named_parameters(remove_duplicate=False)}
    # Tied weights are kept under all their names, which is how the writer recognises them.
    plain.save_pretrained(path, state_dict={name: weights[names.get(name, name)] for name in plain.state_dict()})
    plain.config.dtype = str(next(iter(weights.values())).dtype).removeprefix("torch.")
    plain.config.save_pretrained(path)


def _snapshot(model: Any) -> Callable[[Path], None]:
    """Copy a model's weights and configuration, and return the function that writes them as `save_pretrained` would."""
    weights = model.state_dict()
    # Tied weights are copied once and kept under all their names, which is how the writer recognises them.
    first = {_place(tensor): name for name, tensor in reversed(weights.items())}
    copies = on_host({name: weights[name] for name in first.values()})
    weights = {name: copies[first[_place(tensor)]] for name, tensor in weights.items()}
    dtype = str(model.dtype).removeprefix("torch.")
    # Writing changes the configuration, so it works on a copy. The body of the model in training is replaced for a
    # moment while a row is read, so the modules are copied too.
    model, modules = copy.copy(model), model._modules.copy()
    model.config, model._modules = copy.deepcopy(model.config), modules

    def write(path: Path) -> None:
        model.save_pretrained(path, state_dict=weights)
        # The model in training may compute in another dtype than the dtype of its weights.
        model.config.dtype = dtype
        model.config.save_pretrained(path)

    return write


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return a key that is equal for two names of one tensor, and different for different tensors with elements."""
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
