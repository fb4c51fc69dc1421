"""A run with two further held-out sets, each with sampling of its own: figures, metrics, summary and report."""

from __future__ import annotations

import json
from pathlib import Path

from runs import QUICKSTART, headrace, small_config

from headrace.observe.metrics import read_metrics
from headrace.observe.progress import NoProgress
from headrace.pipeline.launch import start_run

REWARD = """
def reward(completion, prompt):
    return float(completion[:1] in prompt)
"""


def test_every_set_has_its_own_figures(tmp_path: Path) -> None:
    rows = [json.loads(line) for line in (QUICKSTART.parent / "heldout.jsonl").read_text().splitlines()]
    for name, some in (("easy", rows[100:106]), ("hard", rows[200:208])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    (tmp_path / "reward.py").write_text(REWARD)
    config = small_config(
        tmp_path, f"evaluate.sets.easy.path={tmp_path}/easy.jsonl", f"evaluate.sets.hard.path={tmp_path}/hard.jsonl",
        "evaluate.sets.hard.samples=4", "evaluate.sets.hard.temperature=1.0", "evaluate.sets.hard.pass_at=[2, 3]",
        "evaluate.sets.hard.majority_at=[3]", "evaluate.sets.hard.max_tokens=3", "evaluate.sets.hard.prompts=5",
        "evaluate.sets.hard.answer_pattern=^.", f"task.reward={tmp_path}/reward.py:reward", "run.versions=2",
        "evaluate.every=1", "evaluate.during=4", "buffer.depth=0",
    )  # fmt: skip
    session = start_run(config, NoProgress())
    evaluations = session.summary["evaluations"]
    assert [found["moment"] for found in evaluations] == ["before", "during", "after"]
    for found in evaluations:
        easy, hard = found["sets"]["easy"], found["sets"]["hard"]
        during = found["moment"] == "during"
        assert (found["prompts"], easy["prompts"], hard["prompts"]) == ((4, 4, 4) if during else (12, 6, 5))
        assert (easy["samples"], hard["samples"]) == (1, 4)
        assert easy.keys().isdisjoint({"pass_at_2", "majority_at_3"})
        assert hard["pass_1"] <= hard["pass_at_2"] <= hard["pass_at_3"] <= hard["pass_k"]
        assert 0 <= hard["majority_at_3"] <= 1 and hard["tokens_mean"] <= 3
        assert found["versions"].keys() == {str(found["version"])}
    assert any(found["sets"]["hard"]["pass_1"] < found["sets"]["hard"]["pass_k"] for found in evaluations)
    written = [record for record in read_metrics(tmp_path / "run" / "metrics.jsonl") if record["kind"] == "evaluation"]
    assert [record["sets/hard/pass_at_2"] for record in written] == [
        found["sets"]["hard"]["pass_at_2"] for found in evaluations
    ]
    report = (tmp_path / "run" / "report.html").read_text()
    assert f"hard {evaluations[-1]['sets']['hard']['pass_1']:.3f} pass@2" in report and "easy, pass@1" in report


def test_a_set_may_not_hold_a_training_prompt(tmp_path: Path) -> None:
    row = (QUICKSTART.parent / "train.jsonl").read_text().splitlines()[3]
    (tmp_path / "set.jsonl").write_text(row + "\n")
    settings = [f"evaluate.sets.mine.path={tmp_path}/set.jsonl", f"run.directory={tmp_path}"]
    done = headrace("check", str(QUICKSTART), *(part for each in settings for part in ("--set", each)))
    assert done.returncode == 2 and f"{tmp_path}/set.jsonl" in done.stderr, done.stderr
    assert len(done.stderr.splitlines()) == 1
