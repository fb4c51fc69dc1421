"""Loading of a model directory: with its weights, or from its config alone with random weights."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification

from headrace.config.model_dir import check_model_dir
from headrace.errors import ModelError, UserError, one_line
from headrace.models.attention import ATTENTION

UNUSABLE = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, OSError, RuntimeError, TypeError,
    ValueError, SafetensorError, StrictDataclassError,
)  # fmt: skip
"""The exceptions that transformers raises if the files of a model are not as they should be."""


def load_model(
    path: str | Path,
    *,
    weights: str = "load",
    dtype: str = "float32",
    seed: int = 0,
    device: str = "cpu",
    classifier: bool = False,
) -> Any:
    """Load the causal LM in this directory, or with `classifier` the token classifier, with Headrace's attention.

    The model is in eval mode.

    Every tensor of the model must be in the directory, with the right shape, and no other (see `_check_tensors`).
    Random weights depend on `seed` alone. The dtype is given to the loader, and the model is never cast afterwards,
    because a cast would also round rotary frequencies.
    """
    path = Path(path)
    check_model_dir(path, weights)
    family: Any = AutoModelForTokenClassification if classifier else AutoModelForCausalLM
    with refusing_unusable(path, "token classifier" if classifier else "causal language model"):
        if weights == "random":
            config = AutoConfig.from_pretrained(path)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                model = family.from_config(config, dtype=getattr(torch, dtype), attn_implementation=ATTENTION)
        else:
            model, info = family.from_pretrained(
                path,
                dtype=getattr(torch, dtype),
                attn_implementation=ATTENTION,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # `_check_tensors` refuses them, in one line.
            )
            _check_tensors(path, info)
    return model.to(device).eval()


@contextmanager
def refusing_unusable(path: Path, kind: str = "causal language model") -> Iterator[None]:
    """Turn what transformers raises for a directory without a model of this kind into a `ModelError` of one line."""
    try:
        yield
    except UNUSABLE as error:
        reason = one_line(str(error).strip().partition("\n")[0], 300) or type(error).__name__
        if isinstance(error, KeyError) and error.args == (ATTENTION,):
            reason = "it does not use transformers' attention interface"
        raise ModelError(f"{path} cannot be loaded as a {kind}: {reason}") from error


def _check_tensors(path: Path, info: Mapping[str, Any]) -> None:
    """Raise `ModelError` for a tensor that is missing, unknown or of another shape.

    transformers would draw a missing tensor at random. A head that is tied to the embedding is not missing. Tensors
    that the model's class ignores, such as rotary frequencies in old files, are not unknown.
    """
    wrong = [f"{name} is missing" for name in sorted(info["missing_keys"])]
    wrong += [
        f"{name} has shape {list(found)} and not {list(wanted)}"
        for name, found, wanted in sorted(info["mismatched_keys"])
    ]
    wrong += [f"the model has no {name}" for name in sorted(info["unexpected_keys"])]
    if wrong:
        more = f" (and {len(wrong) - 1} more tensors are wrong)" if len(wrong) > 1 else ""
        raise ModelError(f"the weights in {path} do not fit its config.json: {wrong[0]}{more}")


def choose_device(wanted: str, section: str) -> str:
    """Return the torch device for the value of `device` in this section of the configuration."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UserError(f'[{section}] device = "cuda", but torch finds no GPU here')
    return ("cuda" if torch.cuda.is_available() else "cpu") if wanted == "auto" else wanted


def named_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the weights that are published and swapped: every parameter once, and persistent buffers.

    The keys are canonical names. Tied parameters are under their first name.
    """
    found: dict[str, torch.Tensor] = {name: p.detach() for name, p in model.named_parameters()}
    persistent = model.state_dict().keys()
    found |= {name: b.detach() for name, b in model.named_buffers() if name in persistent and name not in found}
    return found


def hold_weights(model: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Make the model compute with these tensors, where they lie. They have the names and shapes of `named_weights`.

    Parameters stay the same objects, so tied weights stay tied. The memory of the old tensors is freed.
    """
    held: dict[str, torch.Tensor] = dict(model.named_buffers()) | dict(model.named_parameters())
    for name, tensor in weights.items():
        held[name].data = tensor
