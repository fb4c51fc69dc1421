"""Files at the edge of what can be read, and run directories that were moved or cannot be written."""

import shutil
from pathlib import Path

import pytest

from headrace import Run
from headrace.buffer.journal import Journal
from headrace.cli.review import report
from headrace.config import load_config
from headrace.errors import ConfigError, DataError, UserError
from headrace.tasks.dataset import load_prompts

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "examples/quickstart/quickstart.toml"
OLD_RUN = ROOT / "tests/data/run_schema_2"


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("1" + "0" * 400, r"^\[run\] versions: a whole number of 1329 bits is too large$"),
        ("-1" + "0" * 30, r"^\[run\] versions: a whole number of 100 bits is too large"),
        ("1" + "0" * 5000, "not TOML: Exceeds the limit"),
        ("[" * 5000 + "]" * 5000, "not TOML: maximum recursion depth"),
    ],
)
def test_friction_44_a_number_that_is_too_large_is_named(tmp_path: Path, value: str, problem: str) -> None:
    file = tmp_path / "run.toml"
    file.write_text(f"[run]\nversions = {value}\n[model]\npath = '.'\n[task]\nkind = 'gym'\nname = 'x'\n")
    with pytest.raises(ConfigError, match=problem):
        load_config(file)
    with pytest.raises(ConfigError, match=problem):
        load_config(QUICKSTART, [f"run.versions={value}"])


def test_friction_44_a_line_that_is_nested_too_deeply_is_named(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text('{"prompt": "a"}\n{"prompt": "b", "data": ' + "[" * 100_000 + "]" * 100_000 + "}\n")
    with pytest.raises(DataError, match="line 2 is not JSON: maximum recursion depth"):
        load_prompts(file)


def test_friction_44_the_model_of_a_run_that_was_moved(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal.db") as journal:
        journal.meta("checkpoint", {"version": 3, "path": "runs/old name/checkpoints/step-3"})
    with pytest.raises(UserError, match=r"checkpoints/step-3, the newest checkpoint of the run, is gone$"):
        _ = Run(tmp_path).model_dir
    (tmp_path / "checkpoints/step-3").mkdir(parents=True)
    assert Run(tmp_path).model_dir == tmp_path / "checkpoints/step-3"


def test_friction_44_a_report_that_cannot_be_written_is_still_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(OLD_RUN, tmp_path / "run")
    (tmp_path / "run/summary.json.part").mkdir()
    with pytest.raises(UserError, match=r"summary\.json\.part cannot be written: Is a directory$"):
        report(str(tmp_path / "run"))
    assert "groups " in capsys.readouterr().out
