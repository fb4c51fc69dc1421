"""Every cause is named once, from evidence that lasts; healthy records get no advice."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from headrace.observe.advice import Advice, Advisor, Settings


def healthy(step: int, steps: int = 40) -> dict[str, Any]:
    """A step as of the quickstart: the reward rises, entropy and length fall."""
    done = step / steps
    return {
        "step": step,
        "reward": 0.1 + 0.7 * done,
        "reward_min": 0.0,
        "reward_max": 0.4 + 0.6 * min(1.0, 2 * done),
        "zero_variance": 0.1 + 0.3 * done,
        "length_mean": 10.0 - 2 * done,
        "truncated": 0.2 * (1 - done),
        "sampled_entropy": 1.5 - 1.3 * done,
        "kl_k3": 0.006,
        "learning_rate": 3e-4,
        "skipped": False,
        "trained_tokens": 1000,
        "tokens_per_second": 1000.0,
        "trainer_idle": 0.4,
        "engine_idle": 0.4,
    }


def advised(records: list[dict[str, Any]], settings: Settings | None = None) -> list[tuple[int, str]]:
    advisor = Advisor(settings)
    return [(index, advice.cause) for index, record in enumerate(records, 1) for advice in advisor.step(record)]


def broken(steps: int = 20, **changes: Any) -> list[dict[str, Any]]:
    return [healthy(0) | changes for _ in range(steps)]


def test_a_healthy_run_gets_none() -> None:
    assert advised([healthy(step) for step in range(41)]) == []


EQUAL = {"zero_variance": 1.0, "sampled_entropy": 1.0}


def test_constant_rewards() -> None:
    half = EQUAL | {"reward": 0.5, "reward_min": 0.5, "reward_max": 0.5}
    assert advised(broken(**half)) == [(10, "constant_reward")]
    zero = EQUAL | {"reward": 0.0, "reward_min": 0.0, "reward_max": 0.0}
    assert advised(broken(**zero)) == [(10, "zero_reward")]
    assert advised(broken(**zero, **{"extra/answered": 0.0})) == [(10, "no_answer")]
    assert advised(broken(**EQUAL, reward=0.3)) == [(10, "equal_rewards")]


def test_equal_rewards_matter_only_to_losses_that_compare() -> None:
    zero = EQUAL | {"reward": 0.0, "reward_min": 0.0, "reward_max": 0.0}
    assert advised(broken(**zero), Settings(compares=False)) == []
    assert advised(broken(zero_variance=None, reward=0.0)) == [], "one answer a group has no variance"


def test_what_has_been_learned_is_no_trouble() -> None:
    done = healthy(40) | {"reward": 1.0, "reward_min": 1.0, "reward_max": 1.0, "zero_variance": 1.0}
    assert advised([healthy(step) for step in range(41)] + [done | {"sampled_entropy": 0.01}] * 30) == []


def test_a_learning_rate_that_is_too_large() -> None:
    assert advised(broken(kl_k3=0.7)) == [(5, "learning_rate")]
    assert advised(broken(skipped=True)) == [(10, "learning_rate")]
    one_peak = [healthy(step) for step in range(20)]
    one_peak[7] |= {"kl_k3": 5.0}
    one_peak[8] |= {"kl_k3": 5.0}
    assert advised(one_peak) == []


def test_a_collapse_hides_its_consequences() -> None:
    begin = [healthy(0) | {"kl_k3": 0.05} for _ in range(6)]
    after = {"reward": 0.0, "reward_min": 0.0, "reward_max": 0.0, "zero_variance": 1.0, "truncated": 1.0}
    fallen = [healthy(0) | after | {"length_mean": 64.0, "sampled_entropy": 0.01} for _ in range(20)]
    assert [cause for _, cause in advised(begin + fallen)] == ["collapse"]
    blurred = [healthy(0) | after | {"sampled_entropy": 2.0} for _ in range(20)]
    causes = [cause for _, cause in advised(begin + blurred)]
    assert causes == ["collapse"]


def test_a_jump_is_the_cause_of_what_follows_it() -> None:
    begin = [healthy(0), healthy(0) | {"kl_k3": 0.6}, healthy(0) | {"kl_k3": 0.6}]
    after = {"reward": 0.0, "reward_min": 0.0, "reward_max": 0.0, "zero_variance": 1.0, "truncated": 0.9}
    assert advised(begin + [healthy(0) | after for _ in range(20)]) == [(13, "learning_rate")]


def test_a_jump_from_which_the_policy_has_recovered_explains_nothing() -> None:
    jump = [healthy(0), healthy(0) | {"kl_k3": 0.3}]
    as_good = [healthy(0) for _ in range(5)]
    cut_off = [healthy(0) | {"truncated": 0.9} for _ in range(10)]
    assert [cause for _, cause in advised(jump + as_good + cut_off)] == ["truncated"]
    worse = [healthy(0) | {"reward": 0.05} for _ in range(5)]
    assert [cause for _, cause in advised(jump + worse + cut_off[:5])] == []
    assert [cause for _, cause in advised(jump + worse + [step | {"reward": 0.05} for step in cut_off])] == [
        "learning_rate"
    ]


def test_answers_that_are_cut_off() -> None:
    assert advised(broken(truncated=0.6)) == [(10, "truncated")]
    assert advised([healthy(step) | {"truncated": 0.95} for step in range(20)]) == [], "the reward rises"
    learning_to_end = [healthy(0) | {"truncated": 1.0 - 0.02 * step} for step in range(25)]
    assert advised(learning_to_end) == []


def test_answers_that_grow() -> None:
    longer = [healthy(0) | {"length_mean": 50.0 * (1 + step / 4)} for step in range(20)]
    assert [cause for _, cause in advised(longer)] == ["length"]
    assert advised([record | {"length_mean": record["length_mean"] / 10} for record in longer]) == [], "still short"
    paid = [record | {"reward": 0.1 + 0.02 * step} for step, record in enumerate(longer)]
    assert advised(paid) == []


def test_one_side_waits_for_minutes() -> None:
    slow = {"tokens_per_second": 100.0}
    assert advised(broken(25, trainer_idle=0.9, **slow)) == [(20, "trainer_waits")]
    assert advised(broken(25, engine_idle=0.9, **slow)) == [(20, "engine_waits")]
    assert advised(broken(25, engine_idle=0.9)) == [], "twenty seconds say nothing"
    assert advised(broken(25, trainer_idle=0.9, **slow), Settings(synchronous=True)) == []


def of_groups(failed: list[int], filtered: list[str]) -> list[Advice]:
    advisor = Advisor()
    found: list[Advice] = []
    for group, (count, by) in enumerate(zip(failed, filtered, strict=True)):
        found += advisor.group(group, 8, count, "the judge is down" if count else "")
        if by:
            found += advisor.filtered(group, by)
    return found


def test_answers_that_fail() -> None:
    [advice] = of_groups([8] * 20, [""] * 20)
    assert advice.cause == "failing" and "100% of the answers" in advice.line and "the judge is down" in advice.line
    assert of_groups([1] * 64, [""] * 64) == []
    assert of_groups([0] * 60 + [8] * 4, [""] * 64) == []


def test_what_a_previous_process_has_said_is_not_said_again() -> None:
    advisor = Advisor()
    advisor.told("failing")
    assert [advice for group in range(20) for advice in advisor.group(group, 8, 8, "the judge is down")] == []


def test_a_filter_that_drops_all() -> None:
    [advice] = of_groups([0] * 40, ["overlong"] * 40)
    assert advice.cause == "filter" and "max_tokens" in advice.line
    [advice] = of_groups([0] * 40, ["zero_variance"] * 40)
    assert "rewards within a group are equal" in advice.line
    assert of_groups([0] * 64, ["zero_variance", "zero_variance", "zero_variance", ""] * 16) == []


NUMBER = st.none() | st.floats(-10, 10)
KEYS = tuple(healthy(0))


@given(st.lists(st.fixed_dictionaries({}, optional=dict.fromkeys(KEYS, NUMBER)), max_size=30))
def test_any_records_are_read_and_a_cause_is_said_once(records: list[dict[str, Any]]) -> None:
    causes = [cause for _, cause in advised(records)]
    assert len(causes) == len(set(causes))
