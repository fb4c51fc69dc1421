"""`headrace bench loop MODEL` on a tiny model and the CPU: real runs whose figures must fit together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.bench.loop import bench_loop, lasting_versions
from headrace.bench.options import LoopBench, lines
from headrace.bench.workload import steady_rate, write_model
from headrace.errors import UserError
from headrace.observe.spans import read_timeline


@pytest.mark.slow
def test_both_modes_do_the_same_work(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    options = LoopBench(
        model=str(tmp_path / "model"),
        versions=1,
        in_flight=4,
        group_size=2,
        lengths="lognormal:5:12",
        prompt=6,
        depth=1,
        micro_batch_tokens=64,
        device="cpu",
        keep=str(tmp_path / "kept"),
    )
    said: list[str] = []
    found = json.loads(json.dumps(bench_loop(options, said.append), allow_nan=False))
    assert [line.partition(":")[0] for line in said] == ["depth 0", "depth 1", "generation alone"]
    synchronous, asynchronous = found["synchronous"], found["asynchronous"]
    assert synchronous["versions"] == asynchronous["versions"] == 1
    assert synchronous["lag_max"] == 0
    assert found["ratio"] == pytest.approx(asynchronous["tokens_per_second"] / synchronous["tokens_per_second"])
    bound = 1 / (1 / found["generation_alone"] + 1 / found["training_alone"])
    assert found["bound_without_overlap"] == pytest.approx(bound)
    rates = [run["tokens"] / run["training_seconds"] for run in (synchronous, asynchronous)]
    assert found["training_alone"] == pytest.approx(max(rates))
    assert found["training_alone_from"] == ("synchronous" if rates[0] >= rates[1] else "asynchronous")
    assert asynchronous["trainer_peak_memory_bytes"] is asynchronous["engine_peak_memory_bytes"] is None
    assert all(len(line) < 200 for line in lines(found))
    for run in ("depth-0", "depth-1"):
        assert {span.name for _, span in read_timeline(tmp_path / "kept" / run / "timeline.json")} >= {
            "decode",
            "train",
        }


def test_the_rate_leaves_out_both_ends() -> None:
    ended = [10.0, 12.0, 13.0, 15.0, 15.5]
    steps = [{"ended": at, "trained_tokens": 100 * i, "seconds": 0.5} for i, at in enumerate(ended)]
    assert steady_rate(steps, 0, 2)["tokens_per_second"] == pytest.approx((200 + 300 + 400) / 3.5)
    assert steady_rate(steps, 1, 2)["tokens_per_second"] == pytest.approx((200 + 300) / 3.0)
    assert steady_rate(steps, 1, 3)["tokens_per_second"] == pytest.approx(300 / 2.0)
    assert steady_rate(steps, 1, 2)["training_seconds"] == 1.0


def test_the_window_outlasts_the_longest_answer() -> None:
    assert lasting_versions("equal:512") == 2
    assert lasting_versions("lognormal:256:2048") == 8


def test_mistakes_are_one_line() -> None:
    for changes, line in (
        ({"in_flight": 12}, "--in-flight 12: not a multiple of --group-size 8"),
        ({"lengths": "equal:0"}, "--lengths equal:0: must be equal:N or lognormal:MEAN:CUT"),
    ):
        with pytest.raises(UserError, match=line):
            LoopBench(model="x", **changes).check()  # type: ignore[arg-type]
