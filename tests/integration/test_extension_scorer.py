"""A scorer and an environment in a user's files, as docs/extending.md shows them, named in a TOML and trained with."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from runs import ROOT, headrace

from headrace import Run
from headrace.review.summary import read_ledgers
from headrace.types import NO_VERSION, Rollout

QUICKSTART = ROOT / "examples/quickstart"
WATCHING = '''
import json
from my_scorer import Letters

class Watching(Letters):
    """The page's scorer, which also writes down what it is told, in the order in which it is told."""

    def __init__(self, letter, file):
        super().__init__(letter)
        self._file = open(file, "a", buffering=1)

    def _note(self, **facts):
        self._file.write(json.dumps(facts) + "\\n")

    def span(self, span):
        super().span(span)
        sampled = bool((span.tokens.versions >= 0).any())
        self._note(
            what="span", rollout=span.rollout, start=span.start, ids=span.token_ids.tolist(), sampled=sampled
        )

    async def score(self, ended):
        self._note(what="end", rollout=ended.rollout.id)
        return await super().score(ended)

    def forget(self, rollout_id):
        super().forget(rollout_id)
        self._note(what="forget", rollout=rollout_id)
'''
DATASET = f"""
[task]
kind = "dataset"
path = "{QUICKSTART / "train.jsonl"}"
"""
ENVIRONMENT = """
[task]
kind = "environment"
factory = "{folder}/my_environment.py:EchoTask"
config = {{ words = ["ab", "ba", "cab", "bad"] }}
"""
TOML = """
[run]
name = "run"
directory = "{folder}"
versions = 3
[model]
path = "{model}"
weights = "random"
{task}
[scorers.letters]
scorer = "{folder}/watching.py:Watching"
weight = 0.5
config = {{ letter = "a", file = "{folder}/told.jsonl" }}
[engine]
slots = 8
max_length = 128
[rollouts]
group_size = 4
max_tokens = 90
max_turns = 3
[buffer]
groups = 2
[evaluate]
prompts = 0
[observe]
display = "none"
"""


def write_files(folder: Path) -> None:
    page = (ROOT / "docs/extending.md").read_text()
    for name, code in re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        (folder / name).write_text(code)
    (folder / "watching.py").write_text(WATCHING)


def told(folder: Path) -> tuple[dict[str, list[dict]], list[str]]:
    """The spans of every rollout that was scored, and those whose sampled tokens came in more than one span."""
    spans: dict[str, list[dict]] = {}
    scored: list[str] = []
    for line in (folder / "told.jsonl").read_text().splitlines():
        fact = json.loads(line)
        if fact["what"] == "span":
            assert fact["rollout"] not in scored, "nothing is told after the end"
            spans.setdefault(fact["rollout"], []).append(fact)
        elif fact["what"] == "end":
            scored.append(fact["rollout"])
    early = [one for one in scored if sum(span["sampled"] for span in spans[one]) > 1]
    return {one: spans[one] for one in scored}, early


@pytest.mark.parametrize("kind", ["dataset", "environment"])
def test_a_scorer_of_the_users_sees_tokens_as_they_arrive(tmp_path: Path, kind: str) -> None:
    write_files(tmp_path)
    task = DATASET if kind == "dataset" else ENVIRONMENT.format(folder=tmp_path)
    (tmp_path / "run.toml").write_text(TOML.format(folder=tmp_path, model=QUICKSTART / "model", task=task))
    done = headrace("train", str(tmp_path / "run.toml"))
    assert done.returncode == 0, done.stderr
    assert read_ledgers(tmp_path / "run")["balanced"]
    spans, early = told(tmp_path)
    assert early, "of some rollout, tokens were told before it ended"
    rollouts = [rollout for rollout in Run(tmp_path / "run").rollouts() if rollout.ending in ("finished", "truncated")]
    assert len(rollouts) >= 3 * 2 * 4
    for rollout in rollouts:
        check(rollout, spans[rollout.id], environment=kind == "environment")
    if kind == "environment":
        check_shown(tmp_path / "run", rollouts)


def check(rollout: Rollout, spans: list[dict], *, environment: bool) -> None:
    (trace,) = rollout.traces
    np.testing.assert_array_equal(np.concatenate([span["ids"] for span in spans]), trace.token_ids)
    assert rollout.metrics["tokens_seen"] == len(trace)
    letters = [score for score in rollout.scores if score.scorer == "letters"]
    whole, *turns = letters
    assert {score.version for score in letters} == {"1"}
    assert whole.level == "rollout" and {score.level for score in turns} == {"turn"}
    assert len(turns) == rollout.metrics["turns"] and whole.value == sum(score.value for score in turns)
    for turn in turns:
        assert (trace.versions[turn.start : turn.end] != NO_VERSION).all()
    assert sum(turn.end - turn.start for turn in turns) == rollout.trained_tokens
    own = [score.value for score in rollout.scores if score.scorer == "environment"]
    assert len(own) == environment
    assert rollout.reward == pytest.approx(sum(own) + 0.5 * whole.value)


def check_shown(run_dir: Path, rollouts: list[Rollout]) -> None:
    """The table, the curves and the report have the scores of turns beside those of whole answers."""
    printed = headrace("rollouts", str(run_dir), "--text").stdout.splitlines()
    assert " scores " in printed[0]
    first = next(place for place, line in enumerate(printed) if line.startswith(f"{rollouts[0].id} "))
    turns = [score for score in rollouts[0].scores if score.level == "turn"]
    below = printed[first + 1 : first + 1 + len(turns)]
    assert [line.split()[:3] for line in below] == [["letters", "turn", f"{score.value:.4g}"] for score in turns]
    [entry] = json.loads(headrace("rollouts", str(run_dir), "--json", "--limit", "1").stdout)
    assert [(one["scorer"], one["level"], one["value"]) for one in entry["scores"]] == [
        (one.scorer, one.level, one.value) for one in rollouts[0].scores
    ]
    metrics = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in metrics if record["kind"] == "step"]
    assert steps and all({"score/letters", "score/letters/turn", "score/environment"} <= step.keys() for step in steps)
    report = (run_dir / "report.html").read_text()
    assert "Scores of answers" in report and "letters, turn " in report and "letters/turn=" in report


def test_what_is_wrong_with_a_scorer_is_one_line(tmp_path: Path) -> None:
    write_files(tmp_path)
    good = TOML.format(folder=tmp_path, model=QUICKSTART / "model", task=DATASET)
    for wrong, line in [
        (good.replace("watching.py:Watching", "watching.py:Missing"), "[scorers.letters] scorer: "),
        (good.replace('letter = "a", ', ""), "[scorers.letters] scorer: "),
        (good.replace("watching.py:Watching", "my_environment.py:EchoTask"), "[scorers.letters] scorer: "),
        (
            good.replace("[scorers.letters]", "[scorers.agent]"),
            "[scorers.agent]: 'agent' is the name of the task's own",
        ),
    ]:
        (tmp_path / "run.toml").write_text(wrong)
        done = headrace("check", str(tmp_path / "run.toml"))
        assert done.returncode != 0 and line in done.stderr, done.stderr
        assert "Traceback" not in done.stderr
