"""Six runs that cannot learn get the right advice within 20 steps; twenty healthy runs get none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from runs import NAME, QUICKSTART, headrace, small_settings

from headrace import Run
from headrace.observe.metrics import read_metrics

pytestmark = pytest.mark.slow

REWARDS = """
import re, urllib.request

def constant(completion, **fields):
    return 0.5

def unparsed(completion, **fields):
    found = re.search(r"answer: (\\w+)", completion)
    return 0.0 if found is None else 1.0

def judge(completion, **fields):
    # Nothing listens at the port for discarded messages.
    return float(urllib.request.urlopen("http://127.0.0.1:9/judge", timeout=2).read())
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's model after its warm start: it answers, and some of its answers are right."""
    folder = tmp_path_factory.mktemp("warm")
    settings = small_settings(
        folder, "run.versions=1", "warm_start.steps=250", "warm_start.batch=64", "evaluate.prompts=0"
    )
    done = headrace("train", str(QUICKSTART), *(word for setting in settings for word in ("--set", setting)))
    assert done.returncode == 0, done.stderr
    return Run(folder / NAME).model_dir


def advised(folder: Path, model: Path, *more: str) -> tuple[list[dict[str, Any]], str]:
    """Run twenty versions; return the advice in its metrics, and everything that the run printed."""
    settings = small_settings(
        folder,
        f"model.path={model}",
        "model.weights=load",
        "warm_start.steps=0",
        "run.versions=20",
        "rollouts.group_size=8",
        "rollouts.max_tokens=16",
        "buffer.groups=8",
        "engine.slots=64",
        "evaluate.prompts=0",
        "observe.display=plain",
        *more,
    )
    done = headrace("train", str(QUICKSTART), *(word for setting in settings for word in ("--set", setting)))
    records = read_metrics(folder / NAME / "metrics.jsonl")
    assert records, done.stderr
    return [record for record in records if record["kind"] == "advice"], done.stdout + done.stderr


BROKEN = {
    "constant": (("task.reward={rewards}:constant",), "constant_reward", "every answer earned 0.5"),
    "unparsed": (("task.reward={rewards}:unparsed",), "zero_reward", "does not find the answers"),
    "learning rate": (("training.learning_rate=3e-2",), "learning_rate", "[training] learning_rate"),
    "truncation": (("rollouts.max_tokens=4",), "truncated", "[rollouts] max_tokens"),
    "filter": (("rollouts.max_tokens=2", "buffer.filter=['overlong']"), "filter", "the filter 'overlong' left out"),
    "judge": (("task.reward={rewards}:judge",), "failing", "Connection refused"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_run_gets_the_right_advice(tmp_path: Path, model: Path, name: str) -> None:
    settings, cause, words = BROKEN[name]
    (tmp_path / "rewards.py").write_text(REWARDS)
    more = [setting.format(rewards=tmp_path / "rewards.py") for setting in settings]
    found, said = advised(tmp_path, model, *more)
    assert [advice["cause"] for advice in found] == [cause], found
    [advice] = found
    assert words in advice["line"]
    assert advice["step"] <= 20
    assert said.count(f"advice: {advice['line']}") == 1, "said once"
    summary = json.loads((tmp_path / NAME / "summary.json").read_text())
    assert [told["line"] for told in summary["advice"]] == [advice["line"]]
    assert words in (tmp_path / NAME / "report.html").read_text().replace("&#39;", "'")


HEALTHY = [
    *[(f"run.seed={seed}",) for seed in range(1, 6)],
    *[("rollouts.group_size=4", f"run.seed={seed}") for seed in (6, 7)],
    ("rollouts.group_size=16", "buffer.groups=4"),
    *[(f"algorithm.loss={loss}",) for loss in ("dapo", "cispo", "gspo", "reinforce", "sapo", "dppo_tv")],
    ("buffer.depth=0",),
    ("buffer.depth=3",),
    ("training.learning_rate=1e-4",),
    ("training.learning_rate=1e-3",),
    ("buffer.filter=['zero_variance']", "buffer.oversample=1.5"),
    ("algorithm.advantage=rloo", "rollouts.temperature=0.8"),
]


@pytest.mark.parametrize("settings", HEALTHY, ids=" ".join)
def test_a_healthy_run_gets_none(tmp_path: Path, model: Path, settings: tuple[str, ...]) -> None:
    found, said = advised(tmp_path, model, *settings)
    assert found == []
    assert "advice" not in said and "not like the generated ones" not in said
    assert len(Run(tmp_path / NAME).history) == 20


def test_there_are_twenty_of_them() -> None:
    assert len(set(HEALTHY)) == 20
