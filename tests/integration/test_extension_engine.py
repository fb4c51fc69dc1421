"""An engine in a user's file, named in a TOML: it is served like any other, takes the weights and trains."""

from __future__ import annotations

import json
import re
import sqlite3
import tomllib
from pathlib import Path

import pytest
import tomli_w
from runs import NAME, QUICKSTART, ROOT, headrace, recompute, small_settings

from headrace.config.paths import make_absolute

CODE = re.findall(r"^```python\n# my_engine.py\n(.*?)^```", (ROOT / "docs/extending.md").read_text(), re.M | re.S)[0]


def train(directory: Path, kind: str, *more: str) -> tuple[int, str]:
    """Train from a TOML of the user's: the quickstart's, with an engine of their own."""
    path = directory / "mine.toml"
    sections = make_absolute(tomllib.loads(QUICKSTART.read_text()), QUICKSTART.parent)
    sections["engine"]["kind"] = kind
    path.write_text(tomli_w.dumps(sections))
    settings = small_settings(directory, "run.versions=2", *more)
    done = headrace("train", str(path), *(word for setting in settings for word in ("--set", setting)))
    return done.returncode, done.stderr


def test_an_engine_of_the_users_trains_on_the_weights_that_it_was_sent(tmp_path: Path) -> None:
    (tmp_path / "my_engine.py").write_text(CODE)
    code, stderr = train(
        tmp_path, f"{tmp_path}/my_engine.py:MyEngine", "engine.count=2", "buffer.depth=0", "training.checkpoint_every=1"
    )
    assert code == 0, stderr
    run_dir = tmp_path / NAME
    with sqlite3.connect(run_dir / "journal.db") as db:
        deliveries = db.execute("SELECT engine, version, accepted FROM deliveries").fetchall()
    assert {(engine, version) for engine, version, accepted in deliveries if accepted} >= {
        (f"engine-{rank}", version) for rank in range(2) for version in (0, 1)
    }
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["ledger_rollouts"]["trained"] > 0 and summary["ledger_rollouts"]["failed"] == 0
    compared, _ = recompute(run_dir)
    assert compared > 100, "its log-probabilities are those of plain Hugging Face under the tagged versions"


@pytest.mark.parametrize(
    ("code", "kind", "line"),
    [
        ("", "my_engine.py:MyEngine", "has no 'MyEngine'"),
        ("class MyEngine:\n    def __init__(self, context):\n        pass\n", "my_engine.py:MyEngine", "no method"),
        (
            "def make(context):\n    raise OSError('no licence')\n",
            "my_engine.py:make",
            "my_engine.py:make' raised OSError: no licence (my_engine.py, line 2)",
        ),
    ],
)
def test_an_engine_that_cannot_be_served_is_one_line(tmp_path: Path, code: str, kind: str, line: str) -> None:
    (tmp_path / "my_engine.py").write_text(code)
    returned, stderr = train(tmp_path, f"{tmp_path}/{kind}")
    assert returned == 2, stderr
    assert line in stderr and stderr.strip().count("\n") == 0
