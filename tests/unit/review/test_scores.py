"""The scores of a rollout in rows and in words, and the curves that follow from them."""

import numpy as np

from headrace.observe.curves import of_answers
from headrace.review.rollouts import table
from headrace.review.scores import as_rows, has_components, in_words
from headrace.types import Group, Prompt, Rollout, Score, Trace

WHOLE = Score(value=1.0, scorer="reward", version="v1")
STEPS = [
    Score(value=value, scorer="steps", version="v2", level="step", trace=0, start=start, end=start + 2)
    for value, start in ((0.25, 3), (0.75, 1))
]


def rollout(*scores: Score) -> Rollout:
    trace = Trace.of_context(np.arange(6, dtype=np.int32))
    return Rollout(id="1/0", index=0, traces=[trace], ending="finished", reward=1.0, scores=list(scores))


def test_parts_come_in_the_order_of_their_tokens() -> None:
    rows = as_rows(rollout(*STEPS, WHOLE))
    assert [(row["scorer"], row["version"], row["level"], row["value"]) for row in rows] == [
        ("reward", "v1", "rollout", 1.0), ("steps", "v2", "step", 0.75), ("steps", "v2", "step", 0.25)
    ]  # fmt: skip
    assert [(row["start"], row["end"]) for row in rows[1:]] == [(1, 3), (3, 5)]
    assert "start" not in rows[0]
    assert in_words(rows) == "reward=1 steps/step=0.75,0.25"


def test_one_score_of_the_whole_answer_is_told_by_the_reward() -> None:
    assert not has_components(as_rows(rollout(WHOLE)))
    assert has_components(as_rows(rollout(STEPS[0])))
    assert has_components(as_rows(rollout(WHOLE, Score(value=0.0, scorer="judge"))))


def entry(one: Rollout, text: bool) -> dict:
    found = {"id": one.id, "step": 1, "state": "trained", "reason": "", "ending": "finished", "reward": 1.0}
    found |= {"sampled_tokens": 4, "oldest_version": 0, "newest_version": 0, "metrics": {}, "scores": as_rows(one)}
    if text:
        for row in found["scores"]:
            row["text"] = "part\n"
        found |= {"prompt_text": ["p"], "text": ["t"]}
    return found


def test_the_table_has_scores_only_where_they_say_more_than_the_reward() -> None:
    assert "scores" not in table([entry(rollout(WHOLE), text=False)])[0]
    heading, row = table([entry(rollout(WHOLE, *STEPS), text=False)])
    assert "scores" in heading and "reward=1 steps/step=0.75,0.25" in row
    lines = table([entry(rollout(WHOLE, *STEPS), text=True), entry(rollout(WHOLE), text=True)])
    assert [line.strip() for line in lines[2:4]] == ["steps step 0.75  part\\n", "steps step 0.25  part\\n"]
    assert len(lines) == 5 and lines[4].startswith("1/0")


def test_every_component_has_a_curve() -> None:
    group = Group(id=1, prompt=Prompt(id="p"), version=0, rollouts=[rollout(WHOLE, *STEPS), rollout(WHOLE, STEPS[0])])
    curves = of_answers([group], np.zeros(0, np.float32))
    assert curves["score/reward"] == 1.0
    assert curves["score/steps/step"] == (0.5 + 0.25) / 2
