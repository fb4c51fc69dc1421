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


def test_a_figure_is_compared_with_its_goals(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    _, goals = script.BENCHMARKS["engine-swaps"]
    swaps = {"stall_over_limit": 0.9, "interval_seconds": 1.01, "mis_tagged": 0}
    assert script.judge(goals, {"swaps": swaps | {"loss": 0.03}})
    assert not script.judge(goals, {"swaps": swaps | {"loss": 0.031}})
    assert not script.judge(goals, {"swaps": swaps | {"loss": 0.0, "stall_over_limit": 1.01}})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "    swaps.stall_over_limit 0.9  (0 to 1)"
    assert lines[6] == "    swaps.loss 0.031  (-inf to 0.03: MISSED)"


def test_figures_of_rows_and_of_names_with_spaces_are_found(script: Any) -> None:
    found = {"rows": [{"a": 1.0}, {"a": 2.0}], "variants": {"without packing": {"slower": 3.0}}}
    assert script.judge({"rows.1.a": (2, 2), "variants.without packing.slower": (3, 3)}, found)
    assert script.judge({"rows.0.a + rows.1.a": (3, 3)}, found), "figures are added"


def test_names_choose_what_is_run(script: Any) -> None:
    assert script.choose([]) == list(script.BENCHMARKS)
    assert script.choose(["train", "engine-256"]) == ["engine-256", "train-0.6b", "train-1.7b", "train-packed"]
    assert script.choose(["loop-equal"]) == ["loop-equal"], "a whole name stands for one benchmark only"
    with pytest.raises(SystemExit, match="no benchmark begins with enigne"):
        script.choose(["enigne"])


def test_one_that_fails_is_said_and_counts(script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not script.measure("none", "engine smollm2-135m --batch 0", {}, tmp_path)
    assert "FAILED: exit code" in capsys.readouterr().out
    assert "--batch" in (tmp_path / "none.log").read_text()
    assert not script.measure("late", "engine smollm2-135m", {}, tmp_path, seconds=0.05)
    assert "FAILED: not done within 0.05 s" in capsys.readouterr().out


def test_one_that_runs_leaves_its_figures(script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # A benchmark that loads no torch.
    assert script.measure("journal", "journal --rollouts 64", {"rollouts": (64, 64)}, tmp_path)
    assert "    rollouts 64  (64 to 64)" in capsys.readouterr().out
    assert '"rollouts": 64' in (tmp_path / "journal.json").read_text()


def test_every_command_is_one_and_the_docs_have_it(script: Any) -> None:
    docs = "".join((ROOT / "docs" / name).read_text() for name in ("performance.md", "delivery.md"))
    for command, _ in script.BENCHMARKS.values():
        assert f"headrace bench {command}\n" in docs, command
        # What is wrong with the options is found before anything is loaded; `--help` is asked for last.
        found = CliRunner().invoke(app, ["bench", *command.split(), "--json", "--help"])
        assert found.exit_code == 0, found.output
