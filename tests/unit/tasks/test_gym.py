"""The gym task against reasoning-gym itself."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
import reasoning_gym
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import ConfigError
from headrace.tasks.gym import GymTask, compile_pattern, extract_answer, pack, unpack, verifier
from headrace.types import Prompt


def task(name: str = "chain_sum", **options: Any) -> GymTask:
    return GymTask(name, **options)


def question(prompt: Prompt) -> str:
    assert prompt.messages is not None
    return prompt.messages[-1]["content"]


def test_prompts_are_the_datasets_questions() -> None:
    config = {"min_terms": 2, "max_terms": 3}
    made = task(config=config, seed=11, size=50, system="Be brief.", suffix=" Digits only.")
    entries = reasoning_gym.create_dataset("chain_sum", seed=11, size=50, **config)
    assert len(made.train) == 50
    assert [question(prompt) for prompt in made.train] == [entry["question"] + " Digits only." for entry in entries]
    assert made.train[3].messages[0] == {"role": "system", "content": "Be brief."}  # type: ignore[index]
    assert [made.demonstration(prompt) for prompt in made.train[:5]] == [entries[i]["answer"] for i in range(5)]
    assert (
        made.train[-1]
        == made.train[49]
        == task(config=config, seed=11, size=50, system="Be brief.", suffix=" Digits only.").train[49]
    )
    assert json.loads(json.dumps(made.train[0].data)) == made.train[0].data
    with pytest.raises(IndexError):
        made.train[50]


def test_heldout_questions_are_never_trained_on() -> None:
    # One-digit sums of two terms: 162 questions, so that held-out ones do come up in training again and again.
    config = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    made = task(config=config, seed=3, size=300, heldout=20)
    trained, heldout = [question(p) for p in made.train], [question(p) for p in made.heldout]
    alone = [question(p) for p in task(config=config, seed=3, size=300).train]
    assert len(set(heldout)) == 20
    assert set(alone) & set(heldout), "the test would show nothing"
    assert not set(trained) & set(heldout)
    assert [new for new, old in zip(trained, alone, strict=True) if old not in heldout] == [
        old for old in alone if old not in heldout
    ]
    ids = [prompt.id for prompt in [*made.train, *made.heldout]]
    assert len(set(ids)) == 320
    assert heldout == [question(p) for p in task(config=config, seed=3, size=9, heldout=20).heldout]
    assert heldout != [question(p) for p in task(config=config, seed=4, size=9, heldout=20).heldout]


def test_too_few_questions() -> None:
    with pytest.raises(ConfigError, match=r"\[evaluate\] prompts: coin_flip gave only \d+ different questions"):
        task("coin_flip", config={"min_trials": 3, "max_trials": 3}, size=10, heldout=500)


def test_ten_thousand_prompts_are_not_generated_up_front() -> None:
    made = task("knight_swap", size=10_000)  # each takes about a second to generate
    assert len(made.train) == 10_000


@pytest.mark.parametrize("name", ["rearc", "countdown", "leg_counting", "tower_of_hanoi", "string_splitting"])
def test_the_verifier_in_a_worker_agrees_with_the_dataset(name: str) -> None:
    """Also where the verifier tells tuples from lists, which plain JSON would lose."""
    dataset = reasoning_gym.create_dataset(name, seed=5, size=4)
    verify = verifier(name, {}, None)
    for prompt, entry in zip(task(name, seed=5, size=4).train, dataset, strict=True):
        sent = json.loads(json.dumps(prompt.data))["entry"]
        assert unpack(sent) == entry
        for answer in (entry["answer"], "17"):
            assert verify(answer, sent) == {"reward": dataset.score_answer(answer, entry), "answered": 1.0}
        assert verify(entry["answer"], sent)["reward"] == 1.0


def test_the_answer_is_taken_from_the_completion() -> None:
    verify = verifier("chain_sum", {}, "<answer>(.*?)</answer>")
    made = task(size=1, answer_pattern="<answer>(.*?)</answer>")
    entry = made.train[0].data["entry"]
    right = entry["answer"]
    assert verify(f"I think <answer>\n{right} </answer>", entry) == {"reward": 1.0, "answered": 1.0}
    assert verify(f"<answer>1</answer> no: <answer>{right}</answer>", entry)["reward"] == 1.0
    assert verify(f"<answer>{right}</answer> no: <answer>x</answer>", entry)["reward"] == 0.0
    assert verify(right, entry) == {"reward": 0.0, "answered": 0.0}
    # A bare answer is not what this policy should be shown as an example.
    assert made.demonstration(made.train[0]) is None


@pytest.mark.parametrize(
    ("pattern", "completion", "answer"),
    [
        (None, " 42\n", "42"),
        (r"-?\d+", "first 12, then -7.", "-7"),
        (r"Answer: (\w+)", "Answer: yes", "yes"),
        (r"Answer: (\w+)", "no", None),
        (r"a(b)?", "a", None),
    ],
)
def test_patterns(pattern: str | None, completion: str, answer: str | None) -> None:
    assert extract_answer(compile_pattern(pattern), completion) == answer


KEYS = st.one_of(st.text(max_size=3), st.integers(), st.just("$"), st.tuples(st.integers(), st.text(max_size=2)))
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(KEYS, inner, max_size=3),
        st.sets(st.integers(), max_size=3),
    ),
    max_leaves=12,
)


@settings(max_examples=50)
@given(VALUES)
def test_packing_keeps_every_value_and_type(value: Any) -> None:
    assert repr_sorted(unpack(json.loads(json.dumps(pack(value))))) == repr_sorted(value)


def repr_sorted(value: Any) -> str:
    """`repr`, which tells 1 from 1.0 and from True, with sets in order."""
    if isinstance(value, set):
        return f"set{sorted(value)!r}"
    if isinstance(value, dict):
        return f"dict{[(repr(key), repr_sorted(item)) for key, item in value.items()]}"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__}{[repr_sorted(item) for item in value]}"
    return repr(value)


def test_mistakes_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"name": "chain_sums"}, r"\[task\] name: reasoning-gym has no dataset 'chain_sums'; did you mean chain_sum"),
        ({"name": "zzzzqq"}, r"has no dataset 'zzzzqq'$"),
        (
            {"config": {"max_term": 3}},
            r"\[task\] config: chain_sum has no key 'max_term'; it takes min_terms, max_terms",
        ),
        ({"config": {"min_terms": 9, "max_terms": 2}}, r"\[task\] config: reasoning-gym refuses it for chain_sum: "),
        ({"config": {"min_terms": "two"}}, r"\[task\] config: reasoning-gym refuses it for chain_sum: "),
        ({"answer_pattern": "("}, r"\[task\] answer_pattern: '\(' is not a regular expression"),
    ]
    for options, line in cases:
        with pytest.raises(ConfigError, match=line) as caught:
            task(**options)
        assert "\n" not in str(caught.value)
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match=r'needs reasoning-gym: pip install "headrace\[tasks\]"'):
        task()
