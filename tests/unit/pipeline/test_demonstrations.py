"""What a supervised warm start teaches, with the real chat format of a model directory."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from headrace.config import make_config
from headrace.errors import ConfigError
from headrace.pipeline.batches import warm_start_batches
from headrace.tasks.chat import ChatFormat
from headrace.tasks.dataset import SingleTurnTask
from headrace.types import Prompt

TINY = Path("tests/data/tiny_model")
END = 3
"""The token that the template of the tiny model writes after every message."""


def taught(model: Path) -> set[int]:
    """Return the last token of every demonstration of a warm start."""
    raw = {"model": {"path": str(model)}, "task": {"kind": "gym", "name": "-"}, "warm_start": {"steps": 2, "batch": 3}}
    prompts = [
        Prompt(id=str(n), messages=[{"role": "user", "content": f"{n}+1"}], data={"answer": f"{n + 1}"})
        for n in range(4)
    ]
    batches = warm_start_batches(make_config(raw), SingleTurnTask(prompts, [], "answer"), ChatFormat.load(model), 0)
    return {int(batch.token_ids[end - 1]) for batch in batches for end in np.cumsum(batch.lengths)}


def copied(path: Path, *, stops: list[int], template: str | None = None, eos: str | None = "<|end|>") -> Path:
    shutil.copytree(TINY, path)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    settings = json.loads((path / "tokenizer_config.json").read_text()) | {"eos_token": eos}
    if template is not None:
        settings["chat_template"] = template
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


def test_friction_47_a_warm_start_teaches_the_end_of_turn_that_the_template_writes(tmp_path: Path) -> None:
    assert taught(TINY) == {END}
    assert taught(copied(tmp_path / "several", stops=[0, 1, END])) == {END}
    # Qwen2.5's base models: the tokenizer's eos_token is not what the template writes.
    assert taught(copied(tmp_path / "base", stops=[0], eos="<pad>")) == {END}


def test_friction_47_a_template_without_an_end_teaches_the_tokenizers_own(tmp_path: Path) -> None:
    plain = "{% for message in messages %}{{ message.content }}{% endfor %}"
    assert taught(copied(tmp_path / "plain", stops=[0, 1], template=plain)) == {END}


def test_friction_47_a_model_without_any_end_is_one_line(tmp_path: Path) -> None:
    model = copied(tmp_path / "endless", stops=[], template="{{ messages[0].content }}", eos=None)
    config = json.loads((model / "config.json").read_text()) | {"eos_token_id": None}
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"\[warm_start\] steps: .* name an end of turn"):
        taught(model)
