"""The list of all figures that need a GPU: what it says of them, and that the docs name the commands."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headrace.cli.main import app

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("gpu_figures", ROOT / "benchmarks" / "gpu_figures.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_figures"] = module
    spec.loader.exec_module(module)
    return module


def test_names_are_taken_by_their_beginnings(script: Any) -> None:
    def names(*given: str) -> list[str]:
        return [benchmark.name for benchmark in script.choose(given)]

    assert names("loop-eq", "engine-1024") == ["engine-1024", "loop-equal", "loop-equal-135m"]
    assert names("loop-equal") == ["loop-equal"], "a whole name is that one alone"
    assert script.choose([]) == list(script.BENCHMARKS)
    with pytest.raises(SystemExit, match=r"gpu_figures.py: no benchmark begins with lop"):
        script.choose(["lop"])


def test_a_figure_is_compared_with_its_goals(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    swaps = {"stall_seconds_mean": 0.004, "stall_seconds_max": 0.006, "stall_limit_seconds": 0.007}
    swaps |= {"interval_seconds": 1.01, "mis_tagged": 0}
    (benchmark,) = script.choose(["engine-swaps"])
    assert script.judge(benchmark, {"swaps": swaps | {"loss": 0.03}})
    assert not script.judge(benchmark, {"swaps": swaps | {"loss": 0.031}})
    assert not script.judge(benchmark, {"swaps": swaps | {"loss": 0.0, "stall_limit_seconds": 0.0059}})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "    stall, ms 4  (at most 7)"
    assert lines[1] == "    longest stall, ms 6  (at most 7)"
    assert lines[8] == "    loss 0.031  (at most 0.03: MISSED)"


def test_truncated_sampling_is_compared_with_the_row_beside_it(script: Any) -> None:
    (benchmark,) = script.choose(["engine-0.6b-top-p"])
    beside = {"engine-0.6b-256": {"tokens_per_second": 60_000.0}}
    assert script.judge(benchmark, {"tokens_per_second": 45_000.0, "beside": beside})
    assert not script.judge(benchmark, {"tokens_per_second": 44_999.0, "beside": beside})
    assert script.judge(benchmark, {"tokens_per_second": 33_750.0, "beside": {}})


def test_one_that_fails_is_said_and_counts(script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not script.measure(script.Benchmark("wrong", "engine smollm2-135m --batch 0", []), tmp_path)
    assert "FAILED: exit code" in capsys.readouterr().out
    assert "--batch 0" in (tmp_path / "wrong.log").read_text()
    assert not script.measure(script.Benchmark("slow", "engine smollm2-135m", [], seconds=0.05), tmp_path)
    assert "FAILED: not done within 0.05 s" in capsys.readouterr().out
    assert not list(tmp_path.glob("*.json"))


def test_one_that_runs_leaves_its_figures(script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # A benchmark that loads no torch, under a name that is on the list.
    goals = [script.Goal("rollouts", lambda f: f["rollouts"], 64, 64)]
    assert script.measure(script.Benchmark("engine-256", "journal --rollouts 64", goals), tmp_path)
    assert "    rollouts 64  (at least 64, at most 64)" in capsys.readouterr().out
    assert script.read_all(tmp_path)["engine-256"]["rollouts"] == 64


def test_every_command_is_one_and_the_docs_have_it(script: Any) -> None:
    docs = "".join((ROOT / "docs" / name).read_text() for name in ("performance.md", "delivery.md"))
    for benchmark in script.BENCHMARKS:
        assert f"headrace bench {benchmark.command}\n" in docs, benchmark.command
        # What is wrong with the options is found before anything is loaded; `--help` is asked for last.
        found = CliRunner().invoke(app, ["bench", *benchmark.command.split(), "--json", "--help"])
        assert found.exit_code == 0, found.output
