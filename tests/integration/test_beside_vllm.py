"""The comparison with vLLM, with a module in vLLM's place that answers by Hugging Face's model."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_models import make_model
from transformers import AutoConfig

ROOT = Path(__file__).parents[2]
STAND_IN = """
import torch
from types import SimpleNamespace
from transformers import AutoModelForCausalLM

SamplingParams = SimpleNamespace

class LLM:
    def __init__(self, model, load_format, **settings):
        assert load_format == "auto"
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    @torch.inference_mode()
    def generate(self, prompts, sampling, use_tqdm):
        return [self.answer(prompt["prompt_token_ids"], sampling.max_tokens) for prompt in prompts]

    def answer(self, ids, length):
        ids, logprobs = list(ids), []
        for _ in range(length):
            table = torch.log_softmax(self.model(torch.tensor([ids])).logits[0, -1], -1)
            token = int(table.argmax())
            ids.append(token)
            logprobs.append({token: SimpleNamespace(logprob=float(table[token]) + OFF)})
        return SimpleNamespace(outputs=[SimpleNamespace(token_ids=ids[-length:], logprobs=logprobs)])
"""


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("beside_vllm", ROOT / "benchmarks" / "beside_vllm.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["beside_vllm"] = module
    spec.loader.exec_module(module)
    return module


def test_an_argument_names_a_model_and_a_batch(script: Any) -> None:
    assert script.Work.parse("a/b:c:16", 4, 8) == ("a/b:c", 16, 4, 8)
    for wrong in ("qwen3-8b", "qwen3-8b:", ":4", "qwen3-8b:0", "qwen3-8b:many"):
        with pytest.raises(SystemExit, match=r"must be MODEL:BATCH, such as"):
            script.Work.parse(wrong, 4, 8)
    with pytest.raises(SystemExit, match="gpt-5: neither a directory nor one of smollm2-135m"):
        script.main(["gpt-5:4"])


@pytest.mark.parametrize(
    ("shape", "architecture"), [("qwen3-30b-a3b", "Qwen3MoeForCausalLM"), ("gpt-oss-20b", "GptOssForCausalLM")]
)
def test_a_shape_is_written_as_a_configuration_that_names_its_architecture(
    script: Any, tmp_path: Path, shape: str, architecture: str
) -> None:
    script.write_shape(shape, tmp_path, weights=False)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    config = AutoConfig.from_pretrained(tmp_path)
    assert config.architectures == [architecture] and config.eos_token_id is None


def test_what_was_not_measured_is_empty(script: Any) -> None:
    row = {"model": "m", "batch": 4, "headrace": 3000.0, "vllm": 2000.0}
    errors = {"headrace_error": 0.00512, "vllm_error": None, "plain_error": 0.0066}
    missing = row | errors | {"vllm": None}
    assert script.table([row | errors, missing])[2:] == [
        "| `m`, 4 | 3,000 | 2,000 | 1.50 | 0.0051 |  | 0.0066 |",
        "| `m`, 4 | 3,000 |  |  | 0.0051 |  | 0.0066 |",
    ]


@pytest.mark.slow
def test_one_command_measures_both_and_scores_both_again(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The module in vLLM's place is wrong by 0.5 in every log-probability, and the error says so."""
    model, stand_in = tmp_path / "model", tmp_path / "stand_in"
    make_model("llama").save_pretrained(model)
    stand_in.mkdir()
    (stand_in / "vllm.py").write_text(STAND_IN.replace("OFF", "0.5"))
    monkeypatch.setenv("PYTHONPATH", f"{stand_in}:{ROOT / 'src'}")
    given = [f"{model}:3", "--prompt=6", "--generate=5", "--vllm-python", sys.executable]
    assert script.main([*given, "--json", str(tmp_path / "found.json"), "--logs", str(tmp_path / "logs")]) == 0
    [found] = json.loads((tmp_path / "found.json").read_text())
    assert found["headrace"] > 0 and found["vllm"] > 0 and found["headrace_error"] < 0.1
    assert found["vllm_error"] == pytest.approx(0.5, abs=0.05)
    assert capsys.readouterr().out.splitlines() == script.table([found])
    (stand_in / "vllm.py").write_text("raise ImportError('no GPU here')")
    assert script.main([*given, "--logs", str(tmp_path / "logs")]) == 1
    said = capsys.readouterr()
    assert "failed: " in said.err and "vllm.log" in said.err and f"`{model}`, 3" in said.out
