"""A process-reward model that reads steps as they come gives the values of one pass over the whole rollout."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForTokenClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForTokenClassification,
    Qwen2Config,
    Qwen2ForTokenClassification,
)

from headrace.errors import ModelError
from headrace.models.process_reward import Growth, ProcessRewardModel, load_process_reward_model

SMALL = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "initializer_range": 0.3,
}
LABELS = {"id2label": {0: "wrong", 1: "right", 2: "unsure"}, "label2id": {"wrong": 0, "right": 1, "unsure": 2}}
GOOD, BAD = 7, 9


def classifiers() -> dict[str, torch.nn.Module]:
    window = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    return {
        "llama": LlamaForTokenClassification(LlamaConfig(**SMALL, **LABELS)),
        "one label": LlamaForTokenClassification(LlamaConfig(**SMALL, num_labels=1)),
        "qwen2 with a window": Qwen2ForTokenClassification(
            Qwen2Config(**SMALL, **LABELS, **window, use_sliding_window=True, max_window_layers=0)
        ),
        "gpt-oss with sinks": GptOssForTokenClassification(GptOssConfig(**SMALL, **LABELS, **window, **experts)),
    }


def language_models() -> dict[str, torch.nn.Module]:
    return {
        "llama": LlamaForCausalLM(LlamaConfig(**SMALL)),
        "gemma2 with a cap and a window": Gemma2ForCausalLM(
            Gemma2Config(**SMALL, sliding_window=8, attn_logit_softcapping=2.0, query_pre_attn_scalar=8)
        ),
    }


def save(make, name: str, path: Path) -> Path:
    path.mkdir(exist_ok=True)
    Tokenizer(WordLevel({"+": GOOD, "-": BAD}, unk_token="+")).save(str(path / "tokenizer.json"))
    torch.manual_seed(5)
    made = make()[name]
    if hasattr(made, "score") and made.score.bias is not None:
        torch.nn.init.normal_(made.score.bias)
    made.save_pretrained(path)
    return path


def rollouts(count: int, seed: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    return {f"{n}/0": draw.integers(0, 40, int(draw.integers(3, 150))).astype(np.int32) for n in range(count)}


def read_in_steps(
    model: ProcessRewardModel, tokens: dict[str, np.ndarray], seed: int, *, alike: bool = False
) -> dict[str, list[float]]:
    """Read the rollouts in steps of random lengths, several at a time, and return a value for every token.

    If they are `alike`, all are read at a time, in steps of the same lengths until one of them ends.
    """
    draw = random.Random(seed)
    values: dict[str, list[float]] = {id: [] for id in tokens}
    while left := [id for id in tokens if len(values[id]) < len(tokens[id])]:
        growths, size = [], draw.randint(1, 40)
        for id in left if alike else draw.sample(left, draw.randint(1, len(left))):
            start = len(values[id])
            new = tokens[id][start : start + (size if alike else draw.randint(1, 70))]
            growths.append(Growth(id, start, new, range(len(new))))
        for growth, found in zip(growths, model.grow(growths), strict=True):
            values[growth.rollout] += found
    return values


@torch.no_grad()
def whole(reference, ids: np.ndarray) -> torch.Tensor:
    return reference(input_ids=torch.from_numpy(ids).long()[None]).logits[0].double()


@pytest.mark.parametrize("alike", [False, True], ids=["mixed", "alike"])
@pytest.mark.parametrize("name", classifiers())
def test_steps_of_a_classifier_are_judged_as_in_one_pass(name: str, alike: bool, tmp_path: Path) -> None:
    path = save(classifiers, name, tmp_path)
    reference = AutoModelForTokenClassification.from_pretrained(path, attn_implementation="eager").eval()
    model = load_process_reward_model(path, good="right" if name != "one label" else "", max_length=256)
    tokens = rollouts(6, seed=1)
    values = read_in_steps(model, tokens, seed=2, alike=alike)
    spread = []
    for id, ids in tokens.items():
        logits = whole(reference, ids)
        wanted = logits[:, 0].sigmoid() if name == "one label" else logits.softmax(-1)[:, 1]
        assert values[id] == pytest.approx(wanted.tolist(), abs=2e-5)
        spread.append(wanted)
    assert torch.cat(spread).std() > 0.05  # Otherwise the comparison would say little.


@pytest.mark.parametrize("alike", [False, True], ids=["mixed", "alike"])
@pytest.mark.parametrize("name", language_models())
@pytest.mark.parametrize("bad", [None, BAD])
def test_steps_of_a_language_model_are_judged_by_its_next_token(
    name: str, bad: int | None, alike: bool, tmp_path: Path
) -> None:
    path = save(language_models, name, tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    model = load_process_reward_model(path, good="+", bad="" if bad is None else "-", max_length=256)
    tokens = rollouts(5, seed=3)
    values = read_in_steps(model, tokens, seed=4, alike=alike)
    for id, ids in tokens.items():
        chances = whole(reference, ids).softmax(-1)
        wanted = chances[:, GOOD] if bad is None else chances[:, GOOD] / (chances[:, GOOD] + chances[:, BAD])
        assert values[id] == pytest.approx(wanted.tolist(), abs=2e-5)


def test_every_token_is_computed_once_and_freed_when_forgotten(tmp_path: Path) -> None:
    model = load_process_reward_model(save(classifiers, "llama", tmp_path), max_length=256)
    tokens = rollouts(6, seed=6)
    read_in_steps(model, tokens, seed=7)
    assert model.computed == sum(len(ids) for ids in tokens.values())
    assert model.rollouts == 6
    assert model.held("0/0") == len(tokens["0/0"])
    for id in tokens:
        model.forget(id)
        model.forget(id)
    assert model.rollouts == 0
    assert model.held("0/0") == 0


def test_only_wanted_values_are_returned(tmp_path: Path) -> None:
    model = load_process_reward_model(save(classifiers, "llama", tmp_path), max_length=256)
    ids = np.arange(1, 31, dtype=np.int32)
    [every] = model.grow([Growth("a", 0, ids, range(30))])
    some, none = model.grow([Growth("b", 0, ids, [4, 29]), Growth("c", 0, ids, [])])
    assert some == pytest.approx([every[4], every[29]], abs=1e-6)
    assert none == []


def test_tokens_that_cannot_be_read_are_refused_in_one_line(tmp_path: Path) -> None:
    model = load_process_reward_model(save(classifiers, "llama", tmp_path), max_length=32)
    ids = np.arange(1, 11, dtype=np.int32)
    assert model.refusal(Growth("a", 0, ids, [])) == ""
    assert "continues at token 10, and 0 tokens" in model.refusal(Growth("a", 10, ids, []))
    assert "longer than the 32 tokens" in model.refusal(Growth("a", 0, np.ones(33, np.int32), []))
    assert "no new tokens" in model.refusal(Growth("a", 0, ids[:0], []))
    assert "outside of the reward model's vocabulary of 40" in model.refusal(Growth("a", 0, ids + 30, []))
    model.grow([Growth("a", 0, ids, [])])
    assert model.refusal(Growth("a", 10, ids, [])) == ""
    assert "continues at token 0, and 10 tokens" in model.refusal(Growth("a", 0, ids, []))


def test_models_that_give_no_verdict_are_refused(tmp_path: Path) -> None:
    classifier = save(classifiers, "llama", tmp_path / "classifier")
    language_model = save(language_models, "llama", tmp_path / "language_model")
    with pytest.raises(ModelError, match="has no label 'good' \\(it has wrong, right, unsure\\)"):
        load_process_reward_model(classifier, good="good", max_length=32)
    with pytest.raises(ModelError, match="`bad` is for causal language models"):
        load_process_reward_model(classifier, good="right", bad="wrong", max_length=32)
    with pytest.raises(ModelError, match="`good` must name the token"):
        load_process_reward_model(language_model, max_length=32)
    with pytest.raises(ModelError, match="'good' is not a token of"):
        load_process_reward_model(language_model, good="good", max_length=32)
