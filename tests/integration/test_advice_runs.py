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

def vowels(completion, **fields):
    # What is too long earns nothing, so that answers are not cut off for long.
    return sum(letter in "aeiou" for letter in completion) / max(1, len(completion)) * (len(completion) <= 12)

def constant(completion, **fields):
    return 0.5

def unparsed(completion, **fields):
    found = re.search(r"answer: (\\w+)", completion)
    return 0.0 if found is None else 1.0

def judge(completion, **fields):
    # Nothing listens at the port for discarded messages.
    return float(urllib.request.urlopen("http://127.0.0.1:9/judge", timeout=2).read())
"""


def advised(folder: Path, *more: str) -> tuple[list[dict[str, Any]], str]:
    """Run twenty versions; return the advice in its metrics, and everything that the run printed."""
    (folder / "rewards.py").write_text(REWARDS)
    settings = small_settings(
        folder,
        "run.versions=20",
        "warm_start.steps=10",
        "warm_start.batch=16",
        "rollouts.group_size=8",
        "rollouts.max_tokens=16",
        "engine.slots=64",
        "evaluate.prompts=0",
        "observe.display=plain",
        f"task.reward={folder / 'rewards.py'}:vowels",
        *(setting.format(rewards=folder / "rewards.py") for setting in more),
    )
    done = headrace("train", str(QUICKSTART), *(word for setting in settings for word in ("--set", setting)))
    records = read_metrics(folder / NAME / "metrics.jsonl")
    assert records, done.stderr
    return [record for record in records if record["kind"] == "advice"], done.stdout + done.stderr


BROKEN = {
    "constant": (("task.reward={rewards}:constant",), "constant_reward", "every answer earned 0.5"),
    "unparsed": (("task.reward={rewards}:unparsed",), "zero_reward", "does not find the answers"),
    "learning rate": (("training.learning_rate=3e-2",), "learning_rate", "[training] learning_rate"),
    "truncation": (("rollouts.max_tokens=2",), "truncated", "[rollouts] max_tokens"),
    "filter": (
        ("task.reward={rewards}:constant", "buffer.filter=['zero_variance']", "rollouts.group_size=2"),
        "filter",
        "the filter 'zero_variance' left out",
    ),
    "judge": (("task.reward={rewards}:judge",), "failing", "Connection refused"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_run_gets_the_right_advice(tmp_path: Path, name: str) -> None:
    settings, cause, words = BROKEN[name]
    found, said = advised(tmp_path, *settings)
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
    ("rollouts.group_size=16", "buffer.groups=2"),
    *[(f"algorithm.loss={loss}",) for loss in ("dapo", "cispo", "gspo", "reinforce", "sapo", "dppo_tv")],
    ("buffer.depth=0",),
    ("buffer.depth=3",),
    ("training.learning_rate=1e-4",),
    ("training.learning_rate=1e-3",),
    ("buffer.filter=['zero_variance']", "buffer.oversample=1.5"),
    ("algorithm.advantage=rloo", "rollouts.temperature=0.8"),
]


@pytest.mark.parametrize("settings", HEALTHY, ids=" ".join)
def test_a_healthy_run_gets_none(tmp_path: Path, settings: tuple[str, ...]) -> None:
    found, said = advised(tmp_path, *settings)
    assert found == []
    assert "advice" not in said and "not like the generated ones" not in said
    assert len(Run(tmp_path / NAME).history) == 20


def test_there_are_twenty_of_them() -> None:
    assert len(set(HEALTHY)) == 20
