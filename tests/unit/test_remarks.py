"""What `headrace check` says about a configuration that is allowed, and that its user should know about."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from headrace.cli.main import app
from headrace.config import make_config
from headrace.config.model_dir import ModelFacts
from headrace.config.remarks import remarks

DENSE = ModelFacts(
    architecture="x", parameters=1, layers=1, kv_bytes_per_token=1, vocabulary=8, max_positions=8, experts=0
)
EXPERTS = ModelFacts(
    architecture="x", parameters=1, layers=1, kv_bytes_per_token=1, vocabulary=8, max_positions=8, experts=4
)
QUICKSTART = "examples/quickstart/quickstart.toml"


def said(*settings: str, facts: ModelFacts = DENSE, task: dict[str, Any] | None = None) -> list[str]:
    raw = {"model": {"path": "-"}, "task": task or {"kind": "gym", "name": "-"}, "training": {"device": "cpu"}}
    return remarks(make_config(raw, settings), facts)


def checked(*settings: str) -> Any:
    """The answer of `headrace check --json` for the quickstart."""
    chosen = [part for setting in settings for part in ("--set", setting)]
    done = CliRunner().invoke(app, ["check", QUICKSTART, "--json", *chosen])
    assert done.exit_code == 0, done.output
    return json.loads(done.output)


@pytest.mark.parametrize("advantage", ["rloo", "maxrl"])
def test_friction_51_sums_over_answers_with_another_normalisation_are_remarked(advantage: str) -> None:
    chosen = f"algorithm.advantage={advantage}"
    assert said(chosen, "algorithm.normalize=constant") == []
    (line,) = said(chosen, "algorithm.normalize=sequence")
    assert line.startswith("[algorithm] normalize: ") and "the shorter its answer is" in line
    (line,) = said(chosen)
    assert "the size of a step depends on how long its answers are" in line
    assert said("algorithm.normalize=sequence") == []
    assert said(chosen, "algorithm.loss=distillation", "algorithm.teacher=t") == []


@pytest.mark.parametrize("arguments", ['["--quantization", "fp8"]', '["--quantization=fp8"]', '["-q", "fp8"]'])
def test_a_server_that_quantises_is_remarked(arguments: str) -> None:
    vllm = ("engine.kind=vllm", "engine.python=python")
    (line,) = said(*vllm, f"engine.arguments={arguments}")
    assert line.startswith("[engine] arguments: servers quantise the weights that they load (fp8), so ratios are not 1")
    assert said(*vllm, 'engine.arguments=["--enforce-eager"]') == []


def test_a_rounded_engine_without_a_correction_is_remarked() -> None:
    assert said("engine.kv_dtype=fp8")[0].startswith("[engine] kv_dtype: tokens are sampled by a rounded model (fp8)")
    (line,) = said("engine.quantize=fp8")
    assert line.startswith("[engine] quantize: tokens are sampled by a rounded model (fp8), so ratios are not 1")
    assert said("engine.quantize=fp8", 'algorithm.corrections=["tis"]') == []
    assert any(remark.startswith("[engine] quantize: ") for remark in checked("engine.quantize=fp8")["remarks"])


def test_friction_52_routing_is_said_not_to_apply_to_agents() -> None:
    agents = {"kind": "agent", "path": "p.jsonl"}
    (line,) = said(task=agents, facts=EXPERTS)
    assert line.startswith("[rollouts] keep_routing: does not apply to agents")
    assert said("rollouts.keep_routing=false", task=agents, facts=EXPERTS) == []
    assert said(task=agents) == [] and said(facts=EXPERTS) == []


def test_friction_58_check_says_the_dtypes_of_engines_and_trainer() -> None:
    other = "training.compute_dtype=bfloat16"
    both = checked(other)
    assert both["dtypes"] == {"engine": "float32", "trainer": "bfloat16"}
    (line,) = both["remarks"]
    assert line.startswith("[model] dtype: engines sample in float32") and 'dtype = "bfloat16"' in line
    assert checked(other, "model.dtype=bfloat16")["remarks"] == []
    assert checked("training.device=cpu")["dtypes"] == {"engine": "float32", "trainer": "float32"}
    shown = CliRunner().invoke(app, ["check", QUICKSTART, "--set", other]).output
    assert "dtypes      engines serve in float32, the trainer computes in bfloat16\n" in shown
    assert "note        [model] dtype: " in shown


def test_friction_58_the_defaults_on_a_gpu_are_remarked() -> None:
    (line,) = said("training.device=cuda")
    assert line.startswith("[model] dtype: engines sample in float32")
    assert said("training.device=cuda", "training.compute_dtype=float32") == []


def test_friction_59_several_answers_at_temperature_0_are_remarked() -> None:
    (line,) = said("evaluate.samples=8")
    assert line.startswith("[evaluate] samples: at temperature 0 the 8 answers to a prompt are the same")
    assert said("evaluate.samples=8", "evaluate.temperature=0.7") == []


def test_friction_59_groups_without_their_longest_answers_are_remarked() -> None:
    (line,) = said("rollouts.min_group=6")
    assert line.startswith("[rollouts] min_group: ") and "shorter than what is generated" in line
    assert said("rollouts.min_group=8") == []
