"""`headrace generate` gives what Hugging Face gives."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from runs import ROOT, headrace
from transformers import AutoModelForCausalLM

from headrace.models.loading import load_model


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    source = ROOT / "examples/quickstart/model"
    load_model(source, weights="random", seed=7).save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).write_bytes((source / name).read_bytes())
    return directory


def test_answers_equal_hugging_face(tmp_path: Path, model_dir: Path) -> None:
    lines = [
        {"token_ids": [1, 5, 9, 3, 2], "max_tokens": 8, "temperature": 0.0},
        {"text": "hello", "max_tokens": 6, "temperature": 0.7, "top_k": 10, "top_p": 0.9, "seed": 3, "n": 3},
        {"token_ids": [1, 7], "max_tokens": 5, "seed": 11},
    ]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = headrace("generate", str(model_dir), "--input", str(source), "--output", str(target), "--threads", "1")
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in target.read_text().splitlines()]
    assert [(answer["line"], answer["sample"]) for answer in answers] == [(1, 0), (2, 0), (2, 1), (2, 2), (3, 0)]
    assert len({tuple(answer["token_ids"]) for answer in answers[1:4]}) > 1, "samples of one prompt differ"

    model = AutoModelForCausalLM.from_pretrained(model_dir, attn_implementation="eager").eval()
    prompt = torch.tensor([lines[0]["token_ids"]])
    greedy = model.generate(prompt, max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=3)[0, 5:].tolist()
    assert answers[0]["token_ids"] == greedy
    for prompt_ids, answer in ((lines[0]["token_ids"], answers[0]), (lines[2]["token_ids"], answers[4])):
        tokens = torch.tensor([*prompt_ids, *answer["token_ids"]])
        with torch.no_grad():
            logprobs = torch.log_softmax(model(tokens[None]).logits[0, len(prompt_ids) - 1 : -1], -1)
        expected = logprobs[torch.arange(len(answer["token_ids"])), torch.tensor(answer["token_ids"])]
        torch.testing.assert_close(torch.tensor(answer["logprobs"]), expected, atol=1e-4, rtol=0)
        assert set(answer["versions"]) == {0}
        assert answer["finish_reason"] in ("stop", "length")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"token_ids": [2**32 + 5]}, "Expected `int` <= 2147483647 - at `$.token_ids[0]`"),
        ({"token_ids": [1, 100_000]}, "token id 100000 is not in the model's vocabulary of "),
        ({"token_ids": [-1]}, "Expected `int` >= 0 - at `$.token_ids[0]`"),
        ({"token_ids": [1], "max_tokens": 2**64}, "Expected `int` <= 2147483647 - at `$.max_tokens`"),
        ({"token_ids": [1], "top_k": 2**64}, "Expected `int` <= 2147483647 - at `$.top_k`"),
        ({"token_ids": [1], "seed": 2**64}, "Expected `int` <= 9223372036854775807 - at `$.seed`"),
    ],
)
def test_friction_41_numbers_out_of_range_are_one_line(tmp_path: Path, line: dict[str, object], said: str) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps({"token_ids": [1], "max_tokens": 1}) + "\n" + json.dumps(line) + "\n")
    model = str(ROOT / "examples/quickstart/model")
    target = str(tmp_path / "out.jsonl")
    done = headrace("generate", model, "--random-weights", "--input", str(source), "--output", target)
    assert done.returncode == 2
    assert done.stderr.startswith(f"headrace: {source}, line 2: {said}") and done.stderr.count("\n") == 1


def test_prompts_that_are_not_text_are_one_line(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", str(tmp_path / "out.jsonl")
    source.write_bytes(b'{"token_ids": [1], "max_tokens": 1}\xf9\n')
    model = str(ROOT / "examples/quickstart/model")
    done = headrace("generate", model, "--random-weights", "--input", str(source), "--output", target)
    assert done.returncode == 2
    assert done.stderr.startswith(f"headrace: {source}, line 1: ") and done.stderr.count("\n") == 1
