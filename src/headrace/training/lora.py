"""A LoRA adapter under training: its parameters alone have gradients, and the base model stays what it was to the bit.

peft makes the layers and its format is that of checkpoints. Which weights are adapted is decided where engines decide
it too, and an adapter that peft would make another way is refused: what is published is what they expect.
"""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from headrace.config.schema import LoraConfig
from headrace.errors import ModelError, UserError
from headrace.models.lora import adapter_weights
from headrace.models.lora_targets import Targets, find_targets
from headrace.training.checkpoint import copy_companions
from headrace.training.sharding import input_device, reshard, take_part, whole_tensor
from headrace.training.snapshot import on_host

ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
BASES = {"full": "base", "nf4": "base-nf4"}
"""Beside the checkpoints, by what it is held in: a base model that no other directory holds."""


class TrainedAdapter:
    """The adapter of one model, which gets peft's layers in place and is frozen otherwise."""

    def __init__(self, model: Any, config: LoraConfig, *, base: Path, seed: int = 0) -> None:
        """`base` is the directory that checkpoints name as their base model. B is zero; A depends on `seed` alone."""
        from peft import get_peft_model  # late: it takes seconds, and training all weights needs none of it

        targets = find_targets(model, tuple(config.targets), tuple(config.modules))
        if targets.stacks and config.dropout:
            raise UserError("[lora] dropout: stacked experts take none; set dropout = 0 or leave them out of targets")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            try:
                self._peft: Any = get_peft_model(model, _peft_config(model, config, targets))
            except ValueError as error:
                raise ModelError(f"[lora] targets: {str(error).strip().splitlines()[0]}") from error
        self._settings = self._peft.peft_config["default"]
        self._settings.base_model_name_or_path = str(base.resolve())
        self._seed = seed
        self._model = model
        self._dropouts = _dropouts(model)
        self.find_weights()
        _check_names(self._weights, targets, config.rank)

    def find_weights(self) -> None:
        """Look for the adapter's tensors, again where the model has been sharded: others are in their places then."""
        self._weights = adapter_weights(self._model)

    def weights(self) -> dict[str, torch.Tensor]:
        """What is published: the adapter's live tensors by the names that engines know."""
        return dict(self._weights)

    @contextmanager
    def dropout(self, step: int, share: int = 0) -> Iterator[None]:
        """Inside, the adapter's inputs are dropped out; what is dropped depends on seed, step and share of the rows."""
        if not self._dropouts:
            yield
            return
        seeds = [self._seed, step, share] if share else [self._seed, step]
        [drawn] = np.random.SeedSequence(seeds).generate_state(1, np.uint64)
        device = input_device(self._model)
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(int(drawn))
            for layer in self._dropouts:
                layer.train()
            try:
                yield
            finally:
                for layer in self._dropouts:
                    layer.eval()

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Inside, the model is its base, from which a divergence is measured. Not for gradients."""
        # What peft switches on and off must be a rank's own parameters, not those that a pass has gathered.
        reshard(self._model)
        with self._peft.disable_adapter():
            try:
                yield
            finally:
                reshard(self._model)

    def snapshot(self) -> Callable[[Path], None]:
        """Copy the adapter as it is now, on several ranks all of it; what writes the copy as peft does."""
        state = on_host({name: whole_tensor(tensor) for name, tensor in self._state().items()})
        settings = copy.copy(self._settings)
        settings.inference_mode = True

        def write(path: Path) -> None:
            save_file(state, path / ADAPTER_FILE)
            settings.save_pretrained(str(path))

        return write

    def load(self, path: Path) -> None:
        """Make the adapter that of this directory; a `UserError` unless it is one of the same layers and rank."""
        file = path / ADAPTER_FILE
        if not file.is_file():
            raise UserError(f"{path} holds no adapter: it is of a run without [lora]")
        saved, live = load_file(file), self._state()
        for name in sorted(saved.keys() | live.keys()):
            if name not in saved or name not in live or saved[name].shape != live[name].shape:
                raise UserError(f"{path} holds another adapter than [lora] asks for: they differ in {name}")
        take_part(saved, live)

    def _state(self) -> dict[str, torch.Tensor]:
        """The live tensors by the names of peft's files."""
        from peft import get_peft_model_state_dict

        state: dict[str, torch.Tensor] = get_peft_model_state_dict(self._peft, save_embedding_layers=False)
        return state


def keep_base(model: Any, directory: Path, source: Path, name: str = BASES["full"]) -> Path:
    """Write a model that was drawn at random, or rounded, once; the complete model directory that it became."""
    final = directory / name
    if not final.is_dir():
        partial = directory / f".partial-{name}-{os.getpid()}"
        shutil.rmtree(partial, ignore_errors=True)
        model.save_pretrained(partial)
        copy_companions(source, partial)
        try:
            partial.rename(final)
        except OSError:
            if not final.is_dir():
                raise
            # Another rank was first, with the same.
            shutil.rmtree(partial)
    return final


def base_of(checkpoint: Path) -> Path:
    """The base model that an adapter checkpoint names; one that was kept beside it moves with it."""
    try:
        named = Path(msgspec.json.decode((checkpoint / ADAPTER_CONFIG).read_bytes())["base_model_name_or_path"])
    except (OSError, msgspec.DecodeError, KeyError, TypeError) as error:
        raise UserError(f"{checkpoint / ADAPTER_CONFIG} does not name a base model") from error
    beside = checkpoint.parent / named.name
    if named.name in BASES.values() and beside.is_dir():
        return beside
    if not named.is_dir():
        raise UserError(f"{checkpoint} is an adapter of {named}, which is not there any more")
    return named


def _peft_config(model: Any, config: LoraConfig, targets: Targets) -> Any:
    from peft import LoraConfig as PeftConfig

    return PeftConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=_short_names(targets.linears, (name for name, _ in model.named_modules()), parts=1),
        target_parameters=_short_names(targets.stacks, (name for name, _ in model.named_parameters()), parts=2) or None,
        modules_to_save=list(targets.modules) or None,
        task_type="CAUSAL_LM",
    )


def _short_names(wanted: Iterable[str], known: Iterable[str], parts: int) -> list[str]:
    """Names by their last parts, where those name nothing else that is known: files stay readable."""
    wanted = list(wanted)
    short = sorted({".".join(name.split(".")[-parts:]) for name in wanted})
    meant = {name for name in known if any(name == end or name.endswith(f".{end}") for end in short)}
    return short if meant == set(wanted) else wanted


def _dropouts(model: nn.Module) -> list[nn.Module]:
    layers = [layer for module in model.modules() if (layer := getattr(module, "lora_dropout", None)) is not None]
    return [dropout for layer in layers for dropout in layer.modules() if isinstance(dropout, nn.Dropout)]


def _check_names(weights: dict[str, torch.Tensor], targets: Targets, rank: int) -> None:
    expected = {name: tuple(tensor.shape) for name, tensor in targets.full_weights().items()}
    for name, (a, b) in targets.shapes(rank).items():
        expected |= {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
    made = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    if differing := sorted(name for name in made.keys() | expected.keys() if made.get(name) != expected.get(name)):
        raise ModelError(
            f"[lora] targets: peft does not adapt {differing[0].partition('.lora_')[0]} of this model as asked"
            " (it takes some names for those of experts); leave it out of targets"
        )
