"""The figures of evaluations against hand-computed values, and against every choice of k answers."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from headrace.config import make_config
from headrace.config.evaluate import MeasuredSection
from headrace.errors import ConfigError
from headrace.pipeline.figures import Answer, chosen_figures, figures, majority_at, pass_at
from headrace.types import Rollout, Trace


def answer(text: str = "", reward: float | None = 0.0, ending: Any = "finished") -> Answer:
    trace = Trace.of_context(np.asarray([1], np.int32))
    return Answer(Rollout(id="1/0", index=0, traces=[trace], ending=ending, reward=reward), text)


def answers(rewards: str) -> list[Answer]:
    return [answer(reward=float(each)) for each in rewards]


@given(some.lists(some.booleans(), min_size=1, max_size=7), some.data())
def test_pass_at_k_is_the_mean_over_all_choices_of_k(right: list[bool], data: some.DataObject) -> None:
    k = data.draw(some.integers(1, len(right)))
    choices = list(itertools.combinations(right, k))
    expected = sum(any(choice) for choice in choices) / len(choices)
    assert pass_at([answer(reward=float(each)) for each in right], k) == pytest.approx(expected, abs=1e-12)


def test_pass_at_k_by_hand() -> None:
    assert pass_at(answers("1000"), 1) == 0.25
    assert pass_at(answers("1000"), 2) == 0.5
    assert pass_at(answers("1000"), 4) == 1.0
    assert pass_at(answers("0000"), 3) == 0.0
    assert pass_at(answers("1" * 50 + "0" * 950), 100) == pytest.approx(
        1 - math.prod((950 - i) / (1000 - i) for i in range(100)), rel=1e-12
    )


def voted(votes: str, right: str) -> list[Answer]:
    """Answers that vote for one letter each; the letter `right` is the right one."""
    return [answer(f" {vote}\n", float(vote == right)) for vote in votes]


@pytest.mark.parametrize(
    ("votes", "k", "expected"),
    [
        ("aab", 3, 1.0),
        ("abb", 3, 0.0),
        ("ab", 2, 1.0),  # Both are equally frequent, and a came first.
        ("ba", 2, 0.0),
        ("aabbbb", 3, 0.5),  # Two blocks, of which one has the right majority.
        ("aabbb", 3, 1.0),  # What is left after the last whole block does not count.
        ("abab", 1, 0.5),
    ],
)
def test_majority_at_k_by_hand(votes: str, k: int, expected: float) -> None:
    assert majority_at(voted(votes, "a"), k) == expected


@given(some.text("abx", min_size=1, max_size=9), some.integers(1, 9))
def test_majority_at_k_is_that_of_a_plain_count(votes: str, k: int) -> None:
    """`x` is an answer that failed: it does not vote, and still takes a place in its block."""
    k = min(k, len(votes))
    wins, blocks = 0, 0
    while (blocks + 1) * k <= len(votes):
        block = votes[blocks * k : (blocks + 1) * k]
        a, b = block.count("a"), block.count("b")
        # Of equally many votes the one that came first counts.
        wins += a > b or (a == b > 0 and block.index("a") < block.index("b"))
        blocks += 1
    said = [answer(each, float(each == "a"), "failed" if each == "x" else "finished") for each in votes]
    assert majority_at(said, k) == pytest.approx(wins / blocks)


def test_what_answers_vote_for_is_found_by_a_pattern() -> None:
    said = [answer("I think 4. So: 5", 1.0), answer("it is: 5", 1.0), answer("7", 0.0), answer("no idea: x", 0.0)]
    assert majority_at(said, 4, r": (\d)") == 1.0
    assert majority_at(said, 4) == 1.0, "without a pattern all four differ, and the first one is right"
    assert majority_at(said[2:], 2, r": (\d)") == 0.0, "nobody votes"
    failed = [answer("a", None, "failed"), answer("a", None, "failed"), answer("b", 1.0)]
    assert majority_at(failed, 3) == 1.0


def test_the_figures_are_means_over_prompts() -> None:
    answered = [answers("1000"), answers("1110"), answers("0000"), [answer(reward=None, ending="failed")] * 4]
    found = figures(answered)
    assert (found["pass_1"], found["pass_k"], found["reward_mean"]) == (4 / 16, 2 / 4, 4 / 16)
    chosen = chosen_figures(answered, MeasuredSection(samples=4, pass_at=[1, 2], majority_at=[4]))
    assert chosen == {
        "pass_at_1": pytest.approx(found["pass_1"]),
        "pass_at_2": pytest.approx((0.5 + 1.0) / 4),
        "majority_at_4": pytest.approx(2 / 4),
    }


@pytest.mark.parametrize(
    ("evaluate", "line"),
    [
        ({"pass_at": [2]}, "[evaluate] pass_at: 2 answers are needed, and samples = 1"),
        ({"samples": 2, "majority_at": [1, 3]}, "[evaluate] majority_at: 3 answers are needed, and samples = 2"),
        ({"answer_pattern": "("}, "[evaluate] answer_pattern: '(' is not a regular expression"),
        ({"sets": {"hard": {}}}, "[evaluate.sets.hard] path is required"),
        ({"sets": {"hard": {"path": "a.jsonl", "pass_at": [4]}}}, "[evaluate.sets.hard] pass_at: 4 answers are needed"),
        ({"sets": {"hard": {"path": "a.jsonl", "topp": 4}}}, "[evaluate.sets.hard] unknown key 'topp' (did you"),
        ({"sets": {"hard": {"path": "a.jsonl", "top_p": 4}}}, "[evaluate.sets.hard] top_p: expected `float` <= 1.0"),
        (
            {"sets": {"hard": {"path": "a.jsonl", "max_tokens": 5000}}},
            "[engine] cache_tokens: 4096 cannot hold one answer of [evaluate.sets.hard] max_tokens = 5000",
        ),
        ({"sets": {"hard": {"path": "a.jsonl", "task": "x"}}}, "[evaluate.sets.hard] task: 'x' is not a task of this"),
        ({"sets": {"a.b": {"path": "a.jsonl"}}}, "[evaluate.sets] 'a.b': a name is made of letters"),
        ({"sets": 3}, "[evaluate.sets]: expected a section for each name"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(evaluate: dict[str, Any], line: str) -> None:
    task = {"kind": "dataset", "path": "train.jsonl", "reward": "m:f"}
    with pytest.raises(ConfigError) as caught:
        make_config(
            {"model": {"path": "m"}, "task": task, "evaluate": evaluate, "engine": {"cache_tokens": 4096}},
        )
    assert str(caught.value).startswith(line), str(caught.value)


def test_sets_of_rows_need_a_task_of_rows() -> None:
    gym = {"kind": "gym", "name": "chain_sum"}
    with pytest.raises(ConfigError, match=r"^\[evaluate.sets.hard\]: its prompts are rows"):
        make_config({"model": {"path": "m"}, "task": gym, "evaluate": {"sets": {"hard": {"path": "a.jsonl"}}}})
