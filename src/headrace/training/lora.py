"""A LoRA adapter in training: only the adapter has gradients, and the base model stays the same to the bit.

peft makes the layers, and checkpoints are in peft's format. `models.lora` decides which weights are adapted,
for engines too. An adapter that peft would build differently is refused, so engines get the tensors that they expect.
"""

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from headrace.config.schema import LoraConfig
from headrace.errors import ModelError, UserError
from headrace.models.lora import Targets, adapter_weights, find_targets
from headrace.training.devices import input_device, on_host
from headrace.training.ranks import copy_own_part, reshard, whole_tensor

ADAPTER_FILE = "adapter_model.safetensors"


class TrainedAdapter:
    """The adapter of one model. The model gets peft's layers in place and is frozen otherwise."""

    def __init__(self, model: Any, config: LoraConfig, *, base: Path, seed: int = 0) -> None:
        """Add the adapter. Checkpoints name `base` as its base model. B is zero, and A depends on `seed` alone."""
        from peft import get_peft_model  # late, because it takes seconds and is needed only with [lora]

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
        self.find_weights()
        _check_names(self._weights, targets, config.rank)

    def find_weights(self) -> None:
        """Look up the adapter's tensors and dropouts. Call this again after the model was sharded: it replaces them."""
        self._weights = adapter_weights(self._model)
        layers = (getattr(module, "lora_dropout", None) for module in self._model.modules())
        self._dropouts = [drop for layer in layers if layer for drop in layer.modules() if isinstance(drop, nn.Dropout)]

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the tensors that are published: the adapter's live tensors by the names that engines know."""
        return dict(self._weights)

    @contextmanager
    def dropout(self, step: int, share: int = 0, update: int = 0) -> Iterator[None]:
        """Apply dropout to the adapter's inputs inside this context.

        What is dropped depends only on the seed, the step, the update within the step, and the share, which is this
        rank's share of the rows.
        """
        if not self._dropouts:
            yield
            return
        # A share and an update of 0 are left away, as they were before there were several.
        seeds = [self._seed, step, share, update] if update else [self._seed, step, share][: 3 if share else 2]
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
        """Switch the adapter off inside this context, so that the model computes as its base. Not for gradients."""
        # peft must switch a rank's own parameters on and off, not the parameters that a pass has gathered.
        reshard(self._model)
        with self._peft.disable_adapter():
            try:
                yield
            finally:
                reshard(self._model)

    def snapshot(self) -> Callable[[Path], None]:
        """Copy the adapter, gathered from all ranks, and return the function that writes the copy as peft does."""
        state = on_host({name: whole_tensor(tensor) for name, tensor in self._state().items()})
        settings = copy.copy(self._settings)
        settings.inference_mode = True

        def write(path: Path) -> None:
            save_file(state, path / ADAPTER_FILE)
            settings.save_pretrained(str(path))

        return write

    def load(self, path: Path) -> None:
        """Load the adapter in this directory. Raises a `UserError` unless it has the same layers and rank."""
        file = path / ADAPTER_FILE
        if not file.is_file():
            raise UserError(f"{path} holds no adapter: it is of a run without [lora]")
        saved, live = load_file(file), self._state()
        for name in sorted(saved.keys() | live.keys()):
            if name not in saved or name not in live or saved[name].shape != live[name].shape:
                raise UserError(f"{path} holds another adapter than [lora] asks for: they differ in {name}")
        copy_own_part(saved, live)

    def _state(self) -> dict[str, torch.Tensor]:
        """Return the live tensors by the names in peft's files."""
        from peft import get_peft_model_state_dict

        state: dict[str, torch.Tensor] = get_peft_model_state_dict(self._peft, save_embedding_layers=False)
        return state


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
    """Return names shortened to their last parts if those match nothing else, so that files stay readable."""
    wanted = list(wanted)
    short = sorted({".".join(name.split(".")[-parts:]) for name in wanted})
    meant = {name for name in known if any(name == end or name.endswith(f".{end}") for end in short)}
    return short if meant == set(wanted) else wanted


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
