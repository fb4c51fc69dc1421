"""Common mistakes are one line and exit code 2 in `headrace check`, and a check without mistakes is short."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import ROOT
from typer.testing import CliRunner

from headrace.cli.main import app
from mistakes import ELSEWHERE, QUICKSTART, mistakes, wrong


@pytest.mark.slow
def test_every_mistake_is_one_line(tmp_path: Path) -> None:
    found = mistakes(tmp_path)
    assert len(found) >= 55
    assert [said for mistake in found if (said := wrong(mistake))] == []


def test_every_friction_has_its_test(tmp_path: Path) -> None:
    shown = {mistake.friction for mistake in mistakes(tmp_path)} - {None}
    assert shown | set(ELSEWHERE) == set(range(3, 28))
    assert not shown & set(ELSEWHERE)
    assert all((ROOT / path).is_file() for path in ELSEWHERE.values())


def test_a_check_prints_what_matters_and_in_full_every_key() -> None:
    short = CliRunner().invoke(app, ["check", str(QUICKSTART / "quickstart.toml")])
    assert short.exit_code == 0, short.output
    lines = short.output.splitlines()
    assert len(lines) < 15
    assert [line.split()[0] for line in lines[:4]] == ["model", "prompts", "prompt", "lag"]
    assert "<|user|>" in lines[2]
    full = CliRunner().invoke(app, ["check", str(QUICKSTART / "quickstart.toml"), "--full"])
    assert full.output.endswith(short.output)
    assert "checkpoint_every = " in full.output
