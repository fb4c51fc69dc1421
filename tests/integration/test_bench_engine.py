"""`headrace bench engine` on a tiny model: real runs whose figures must fit together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import headrace
from tiny_models import make_model

from headrace.bench.engine import bench_engine
from headrace.bench.options import EngineBench, lines
from headrace.errors import UserError


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    make_model("llama").save_pretrained(directory)
    return directory


def bench(model: Path | str, **changes: Any) -> dict[str, Any]:
    said: list[str] = []
    given = {"batch": 4, "prompt": 8, "generate": 12, "rescore": 0.5, "device": "cpu", **changes}
    found = bench_engine(EngineBench(model=str(model), **given), said.append)
    assert said and all("\n" not in line for line in said)
    assert all(len(line) < 200 for line in lines(found))
    return json.loads(json.dumps(found, allow_nan=False))  # type: ignore[no-any-return]


def check_ceiling(found: dict[str, Any], tokens: int, seconds: float, steps: int) -> None:
    size, bandwidth = found["bytes_a_step"], found["bandwidth_bytes_a_second"]
    assert size["all"] == pytest.approx(size["weights"] + size["kv"])
    assert found["fraction_of_ceiling"] == pytest.approx(size["all"] / bandwidth / (seconds / steps))
    assert tokens / seconds == pytest.approx(found["fraction_of_ceiling"] * found["ceiling_tokens_per_second"])


def test_the_command_prints_one_json_object_and_progress_beside_it(model_dir: Path) -> None:
    done = headrace(
        *("bench", "engine", str(model_dir), "--batch", "4", "--prompt", "8", "--generate", "12", "--json"),
        *("--rescore", "0.5", "--device", "cpu", "--peer", "generate", "--threads", "1"),
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert "generating 48 tokens for 4 requests" in done.stderr
    assert found["generated_tokens"] == 4 * 12 and found["prompt_tokens"] == found["prefilled_tokens"] == 4 * 8
    assert found["torch"] == torch.__version__ and found["device"] == "cpu" and found["dtype"] == "float32"
    assert found["arguments"]["batch"] == 4 and found["arguments"]["peer"] == "generate"
    peer = found["peers"]["generate"]
    assert peer["tokens_per_second"] == pytest.approx(48 / peer["seconds"])
    assert peer["ratio"] == pytest.approx(found["tokens_per_second"] / peer["tokens_per_second"])


def test_the_figures_of_a_round_fit_together(model_dir: Path) -> None:
    found = bench(model_dir, rescore=1.0)
    assert found["tokens_per_second"] == pytest.approx(48 / found["seconds"])
    assert found["steps"] == 12 and found["preemptions"] == 0
    assert found["step_ms"]["all"] == pytest.approx(1e3 * found["seconds"] / 12)
    assert min(found["start_seconds"], found["step_ms"]["decode"]) > 0
    config = json.loads((model_dir / "config.json").read_text())
    kv_token = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"] * 4
    assert found["kv_bytes_a_token"] == kv_token
    assert found["bytes_a_step"]["kv"] == pytest.approx(4 * sum(range(9, 20)) * kv_token / 12)
    check_ceiling(found, 48, found["seconds"], found["steps"])
    assert found["rescore"]["tokens"] == 48 and found["rescore"]["max_error"] < 1e-4
    assert not {"before_tail", "tail", "fork", "swaps", "peers"} & found.keys()


def test_drawn_lengths_in_fewer_slots(model_dir: Path) -> None:
    found = bench(model_dir, batch=3, requests=8, lengths="lognormal:10:20", peer="generate", rescore=1.0)
    lengths = found["answer_lengths"]
    assert len(lengths) == found["requests"] == 8 and max(lengths) <= 20 and len(set(lengths)) > 2
    assert found["generated_tokens"] == found["rescore"]["tokens"] == sum(lengths)
    assert found["rescore"]["max_error"] < 1e-4
    peer = found["peers"]["generate"]
    assert peer["tokens_per_second"] * peer["seconds"] == pytest.approx(sum(lengths)), "padding is time, not tokens"


def test_linear_layers_in_fp8_are_scored_as_rounded(model_dir: Path) -> None:
    full, found = bench(model_dir, rescore=1.0), bench(model_dir, rescore=1.0, quantize="fp8")
    assert found["quantize"] == "fp8" and found["kv_dtype"] == "float32" and full["quantize"] == "none"
    # Most weights of this model are in its layers. They have one byte each, embedding and projection four.
    assert found["parameter_bytes"] < 0.5 * full["parameter_bytes"]
    scores = found["rescore"]
    assert scores["mean_error"] < 0.1 * scores["kl_to_full"] ** 0.5, "the KL is about half the mean squared error"
    assert 1e-4 < scores["kl_to_full"] < 0.2 and "kl_to_full" not in full["rescore"]
    cached = bench(model_dir, rescore=1.0, kv_dtype="fp8")
    assert cached["kv_dtype"] == "fp8" and cached["kv_bytes_a_token"] == full["kv_bytes_a_token"] // 4
    assert cached["rescore"]["mean_error"] < 1e-4, "the plain model rounds keys and values too"
    assert 1e-5 < cached["rescore"]["kl_to_full"] < 0.1
    with pytest.raises(UserError, match="--quantize and --kv-dtype have neither --swap-every nor --peer"):
        EngineBench(model="x", quantize="fp8", peer="generate").check()


def test_truncated_sampling_is_scored_as_it_was_sampled(tmp_path: Path) -> None:
    make_model("qwen3_moe").save_pretrained(tmp_path)
    found = bench(tmp_path, temperature=0.8, top_p=0.9, top_k=30, rescore=1.0)
    assert found["rescore"]["max_error"] < 1e-4 and found["rescore"]["outside"] == 0
    assert found["bytes_a_step"]["weights"] < found["parameter_bytes"]
    assert 2 <= found["experts_a_step"] <= 4, "each token chooses 2 of 4 experts"


def test_the_tail_is_measured_by_itself(model_dir: Path) -> None:
    found = bench(model_dir, tail="2:40")
    assert found["generated_tokens"] == 2 * 12 + 2 * 40
    tail = found["tail"]
    assert tail["rows"] == 2 and tail["tokens"] == 2 * (40 - 12) and tail["steps"] == 40 - 12
    assert tail["seconds"] < found["seconds"]
    assert tail["bytes_a_step"]["kv"] == pytest.approx(2 * found["kv_bytes_a_token"] * sum(range(20, 48)) / 28)
    check_ceiling(tail, tail["tokens"], tail["seconds"], tail["steps"])
    before = found["before_tail"]
    assert (before["rows"], before["tokens"], before["steps"]) == (4, 4 * 12, 12)
    assert before["seconds"] + tail["seconds"] == pytest.approx(found["seconds"])
    assert before["tokens_per_second"] == pytest.approx(48 / before["seconds"])
    assert before["step_ms"] == pytest.approx(1e3 * before["seconds"] / 12)
    # Tokens 2 to 12 of each row are drawn over 9 to 19 tokens, 154 in all; the first comes from the prompt's pass.
    assert before["bytes_a_step"]["kv"] == pytest.approx(4 * found["kv_bytes_a_token"] * 154 / 12)
    check_ceiling(before, before["tokens"], before["seconds"], before["steps"])
    read = [part["bytes_a_step"]["kv"] * part["steps"] for part in (before, tail, found)]
    assert read[0] + read[1] == pytest.approx(read[2]), "the round is the two stretches, and nothing between them"


@pytest.mark.slow
def test_swaps_are_counted_timed_and_tagged(model_dir: Path) -> None:
    found = bench(model_dir, generate=60, swap_every=0.02, peer="generate")["swaps"]
    assert found["swaps"] >= 2 and found["versions_seen"] >= 2
    assert found["mis_tagged"] == 0 and found["replayed_tokens"] == 2 * 60
    assert found["replay_max_error"] < 1e-4 < 0.1 < found["other_version_mean_error"]
    assert len(found["stall_seconds"]) == found["swaps"] and min(found["stall_seconds"]) > 0
    assert found["stall_seconds_mean"] == pytest.approx(sum(found["stall_seconds"]) / found["swaps"])
    assert found["stall_seconds_max"] == max(found["stall_seconds"])
    assert found["stall_over_limit"] == pytest.approx(found["stall_seconds_max"] / found["stall_limit_seconds"])
    assert found["loss"] == pytest.approx(1 - found["tokens_per_second_with"] / found["tokens_per_second_without"])


def test_forks_equal_fresh_runs(model_dir: Path) -> None:
    found = bench(model_dir, fork="3:15")["fork"]
    assert found["equal"] == found["continuations"] == 3 and found["max_logprob_difference"] < 1e-5
    assert found["prefilled_tokens"] == 0 and found["fresh_prefilled_tokens"] >= 15


@pytest.mark.parametrize(
    ("model", "changes", "says"),
    [
        ("gpt-5", {}, "neither a model directory nor a shape"),
        (None, {"generate": 250}, "256 positions"),
        (None, {"device": "cuda"}, "no GPU"),
    ],
)
def test_a_mistake_is_one_line(model_dir: Path, model: str | None, changes: dict[str, Any], says: str) -> None:
    if changes.get("device") == "cuda" and torch.cuda.is_available():
        changes = {"generate": 250}
        says = "256 positions"
    with pytest.raises(UserError) as caught:
        bench(model or model_dir, **changes)
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_mistakes_end_the_command(tmp_path: Path) -> None:
    done = headrace("bench", "engine", str(tmp_path), "--batch", "0")
    assert (done.returncode, done.stdout) == (2, "")
    assert "Invalid value for '--batch'" in done.stderr
    with pytest.raises(UserError, match=r"has no config\.json"):
        bench(tmp_path)
