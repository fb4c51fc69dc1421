"""`headrace bench train` on a tiny model: real steps whose figures must fit together."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from runs import headrace
from sympy import sympify
from tiny_models import make_model

from headrace.bench.base import build_shape
from headrace.bench.options import TrainBench, lines
from headrace.bench.train import FORMULA, Flops, bench_train, count_flops, draw_sequences, make_batch, padded
from headrace.errors import UserError
from headrace.training.rows import plan


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    make_model("llama").save_pretrained(directory)
    return directory


def test_the_command_prints_one_json_object(model_dir: Path) -> None:
    done = headrace(
        *("bench", "train", str(model_dir), "--tokens", "64", "--sequence", "16", "--steps", "2", "--device", "cpu"),
        *("--micro-batch-tokens", "32", "--compare", "--json"),
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["tokens"] == 64 and found["sequences"] == 4 and found["computed_tokens"] == 4 * 15
    assert found["tokens_per_second"] == pytest.approx(64 / found["step_seconds"])
    assert found["flops_per_second"] == pytest.approx(found["flops_a_step"] / found["step_seconds"])
    assert all(variant["ran"] for variant in found["variants"].values())
    # Chunks and packing change no loss.
    assert found["variants"]["without chunks"]["loss"] == pytest.approx(found["loss"], abs=1e-5)
    assert found["flop_formula"] == FORMULA
    shown = lines(found)
    assert all(len(line) < 200 for line in shown)
    said = "\n".join(shown)
    assert all(part in said for part in FORMULA.values())


def test_padding_is_computed_and_not_counted(model_dir: Path) -> None:
    options = TrainBench(
        model=str(model_dir), tokens=90, lengths="lognormal:12:30", steps=1, micro_batch_tokens=40, device="cpu"
    )
    packed = bench_train(options, lambda _: None)
    wasted = bench_train(TrainBench(**{**packed["arguments"], "pack": False}), lambda _: None)
    assert wasted["tokens"] == packed["tokens"] and wasted["flops_a_step"] == packed["flops_a_step"]
    assert wasted["computed_tokens"] > packed["computed_tokens"]


def test_operations_of_the_formula_by_hand() -> None:
    flops = count_flops(build_shape("smollm2-135m", "float32", "meta", 0))
    layer = 576 * (9 * 64) * 2 + 576 * (3 * 64) * 2 + 3 * 576 * 1536 + 2 * 576
    assert flops.a_token == 6 * (30 * layer + 576)
    assert flops.a_pair == 12 * 9 * 64 * 30
    assert flops.a_target == 6 * 576 * 49152
    # Three tokens, of which two are computed and two are targets; they see one and two tokens.
    assert flops.of([3]) == 2 * (flops.a_token + flops.a_target) + 3 * flops.a_pair


@given(st.lists(st.integers(2, 50)), *(st.integers(0, 10**12) for _ in range(3)))
def test_the_text_of_the_formula_is_what_is_computed(lengths: list[int], token: int, pair: int, target: int) -> None:
    a_sequence = sympify(FORMULA["a_sequence"])
    values = {"a_token": token, "a_pair": pair, "a_target": target}
    by_text = sum(int(a_sequence.subs({"n": length - 1, **values})) for length in lengths)
    assert Flops(**values).of(lengths) == by_text


def test_the_terms_of_the_formula_are_what_is_counted() -> None:
    sizes = {"heads": 9, "head_size": 64, "layers": 30, "hidden_size": 576, "vocabulary": 49152}
    flops = count_flops(build_shape("smollm2-135m", "float32", "meta", 0))
    for name in ("a_pair", "a_target"):
        assert getattr(flops, name) == int(sympify(FORMULA[name]).subs(sizes))


@given(st.lists(st.integers(2, 50), min_size=1, max_size=30), st.integers(10, 120))
def test_padded_passes_hold_the_budget(lengths: list[int], budget: int) -> None:
    own = np.array(lengths)
    widths = padded(own, budget)
    assert (widths >= own).all() and set(widths) <= set(own)
    batch = make_batch(own, widths, 50, 1, 0)
    assert batch.trained_tokens == sum(lengths) - len(lengths)
    assert float(batch.weights.sum()) == pytest.approx(1.0, rel=1e-4)
    rows = plan(batch, micro_batch_tokens=budget, share_prefixes=True)
    assert sum(len(row) for row in rows) == widths.sum() - len(lengths)


def test_mistakes_are_one_line() -> None:
    with pytest.raises(UserError, match="--lengths normal:3: must be equal:N or lognormal:MEAN:CUT"):
        TrainBench(model="x", lengths="normal:3").check()
    lengths = draw_sequences(TrainBench(model="x", tokens=1000, lengths="lognormal:256:2048"))
    assert 1000 <= lengths.sum() < 1000 + 2048
