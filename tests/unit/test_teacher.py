"""Which model may teach another: one that knows the same tokens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from headrace.config.model_dir import check_teacher
from headrace.errors import ModelError

TINY = Path("tests/data/tiny_model")


def model_like_tiny(path: Path, rows: int = 64, *, tokenizer: bool = True) -> Path:
    """A copy of the tiny model whose embedding has this many rows."""
    shutil.copytree(TINY, path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"vocab_size": rows}))
    tensors = {str(layer): np.zeros(1, bool) for layer in range(config["num_hidden_layers"])}
    save_file({**tensors, "embedding": np.zeros((rows, config["intermediate_size"]), bool)}, path / "model.safetensors")
    if not tokenizer:
        (path / "tokenizer.json").unlink()
    return path


def check(path: Path) -> None:
    check_teacher(path, TINY, "random")


def test_a_teacher_without_a_tokenizer_needs_as_many_tokens(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"\[algorithm\] teacher: .*nowhere is not a directory"):
        check(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"\[algorithm\] teacher: .* a vocabulary of 65 tokens, the model one of 64"):
        check(model_like_tiny(tmp_path / "more", 65, tokenizer=False))
    check(model_like_tiny(tmp_path / "same", tokenizer=False))


def test_friction_57_a_padded_embedding_of_the_same_tokenizer_may_teach(tmp_path: Path) -> None:
    check(model_like_tiny(tmp_path / "same"))
    check(model_like_tiny(tmp_path / "padded", 128))
    with pytest.raises(ModelError, match=r"^\[algorithm\] teacher: .* an embedding of 60 rows, the model one of 64"):
        check(model_like_tiny(tmp_path / "short", 60))


def test_friction_57_as_many_tokens_of_another_tokenizer_may_not_teach(tmp_path: Path) -> None:
    other = model_like_tiny(tmp_path / "other")
    written = json.loads((other / "tokenizer.json").read_text())
    vocabulary = written["model"]["vocab"]
    by_id = {id: token for token, id in vocabulary.items()}
    vocabulary[by_id[10]], vocabulary[by_id[11]] = 11, 10
    (other / "tokenizer.json").write_text(json.dumps(written))
    line = f"has another tokenizer: token 10, {by_id[10]!r} in the model, is {by_id[11]!r} there"
    with pytest.raises(ModelError, match=r"^\[algorithm\] teacher: ") as refusal:
        check(other)
    assert line in str(refusal.value)
    (other / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"^\[algorithm\] teacher: .*tokenizer.json cannot be read: .*$"):
        check(other)
