"""Checkpoints for other programs: a whole model for Hugging Face, or an adapter for peft.

The exported weights are those of the checkpoint, and no file of Headrace is left in the export but `SHA256SUMS`, the
digests of its files. The directory is either there as a whole or not at all, and a damaged checkpoint is not exported.
"""

import shutil
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM

from headrace.config.file_digests import SUMS, check_digests, sync, write_digests
from headrace.errors import ModelError, UserError
from headrace.training.checkpoints.base import base_of, copy_companions, damage_of, refuse_pickled
from headrace.training.lora import ADAPTER_FILE

Format = Literal["hf", "peft"]


def export_checkpoint(checkpoint: Path, out: Path, to: Format) -> Path:
    """Write a checkpoint as `hf` or as `peft` into a new directory, and return the directory.

    For `hf`, an adapter is merged in float32.
    """
    refuse_pickled(checkpoint)
    if damage := damage_of(checkpoint):
        raise UserError(f"{checkpoint} is damaged: {damage} (--checkpoint takes another one)")
    adapter = (checkpoint / ADAPTER_FILE).is_file()
    if to == "peft" and not adapter:
        raise UserError(f"{checkpoint} has no adapter: its run trained all weights (export it with --to hf)")
    if out.exists():
        raise UserError(f"--out {out}: exists already")
    partial = out.with_name(f".{out.name}.part")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        if not adapter:
            _copy_model(checkpoint, partial)
        elif to == "peft":
            _copy_adapter(checkpoint, partial)
        else:
            _merge(checkpoint, partial)
        write_digests(partial)
        partial.rename(out)
        sync(out.parent)
    except OSError as error:
        raise UserError(f"--out {out}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return out


def _copy_model(checkpoint: Path, out: Path) -> None:
    shutil.copytree(checkpoint, out, ignore=shutil.ignore_patterns("trainer", SUMS, ".*"), dirs_exist_ok=True)


def _copy_adapter(checkpoint: Path, out: Path) -> None:
    from peft import PeftConfig

    shutil.copyfile(checkpoint / ADAPTER_FILE, out / ADAPTER_FILE)
    copy_companions(checkpoint, out)
    settings: Any = PeftConfig.from_pretrained(str(checkpoint))
    settings.base_model_name_or_path = str(base_of(checkpoint).resolve())
    settings.save_pretrained(str(out))


def _merge(checkpoint: Path, out: Path) -> None:
    from peft import PeftModel

    base = base_of(checkpoint)
    check_digests(base, "the base model of the adapter")
    try:
        # The merge is done in float32, as the adapter was trained: 16 bits would round the adapter's changes away.
        model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        merged = PeftModel.from_pretrained(model, str(checkpoint)).merge_and_unload()
    except (ValueError, KeyError, OSError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(f"{checkpoint} cannot be merged into {base}: {reason}") from error
    merged.save_pretrained(out)
    copy_companions(base, out)
