"""A tiny model whose replies are known: it says 1 after a letter from a to m, and 0 after any other."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from runs import ROOT
from transformers import AutoConfig, AutoModelForCausalLM

MODEL = ROOT / "examples/quickstart/model"
FIRST_HALF = "abcdefghijklm"
TEMPLATE = "n{completion}"


def write_judge(directory: Path) -> Path:
    """Write the model. Its layers add nothing to the embedding of the last token, and its head is a table."""
    directory.mkdir()
    tokenizer = json.loads((MODEL / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    for digit in "01":
        vocabulary.setdefault(digit, len(vocabulary))
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    settings = json.loads((MODEL / "tokenizer_config.json").read_text()) | {"chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    size = 64
    assert len(vocabulary) <= size
    config = AutoConfig.for_model(
        "llama",
        vocab_size=len(vocabulary),
        hidden_size=size,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        eos_token_id=vocabulary["<|end|>"],
    )
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(size)[: len(vocabulary)])
        model.lm_head.weight.zero_()
        for letter, id in vocabulary.items():
            model.lm_head.weight[vocabulary["1" if letter in FIRST_HALF else "0"], id] = 1.0
    model.save_pretrained(directory)
    return directory


def says(completion: str) -> float:
    """What the judge says about this answer, if it is asked by `TEMPLATE`."""
    return float(("n" + completion)[-1] in FIRST_HALF)
