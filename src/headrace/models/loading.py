"""Loading of a model directory: with its weights, or from its config alone with random weights."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from headrace.config.model_dir import check_model_dir
from headrace.errors import ModelError, UserError
from headrace.models.attention import ATTENTION


def load_model(
    path: str | Path, *, weights: str = "load", dtype: str = "float32", seed: int = 0, device: str = "cpu"
) -> Any:
    """Load the causal LM in this directory, in eval mode, with Headrace's attention.

    Random weights depend on `seed` alone. The dtype is given to the loader, and the model is never cast afterwards,
    because a cast would also round rotary frequencies.
    """
    path = Path(path)
    check_model_dir(path, weights)
    try:
        if weights == "random":
            config = AutoConfig.from_pretrained(path)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                model = AutoModelForCausalLM.from_config(
                    config, dtype=getattr(torch, dtype), attn_implementation=ATTENTION
                )
        else:
            model = AutoModelForCausalLM.from_pretrained(
                path, dtype=getattr(torch, dtype), attn_implementation=ATTENTION
            )
    except (ValueError, KeyError, OSError) as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        if isinstance(error, KeyError) and error.args == (ATTENTION,):
            reason = "it does not use transformers' attention interface"
        raise ModelError(f"{path} cannot be loaded as a causal language model: {reason}") from error
    return model.to(device).eval()


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
