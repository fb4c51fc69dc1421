"""Advantages of turns, steps and tokens: by hand, and against a plain implementation that goes token by token."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from headrace.algorithms.advantages import ADVANTAGES
from headrace.algorithms.assemble import assemble
from headrace.algorithms.credit import Credit
from headrace.config import make_config
from headrace.pipeline.batches import credit_of, make_batch
from headrace.types import NO_VERSION, Group, Prompt, Rollout, Score, Trace
from plain_credit import plain_advantages, random_group

MINIMAL = {"model": {"path": "m"}, "task": {"kind": "gym", "name": "spell_backward"}}
FORTY = 40


def trace(*parts):
    """Context and sampled tokens in turn, context first."""
    made = Trace.of_context(np.array(parts[0], np.int32))
    for number, part in enumerate(parts[1:]):
        sampled = number % 2 == 0
        versions = np.full(len(part), 3 if sampled else NO_VERSION, np.int32)
        made = made.extended(np.array(part, np.int32), np.zeros(len(part)), versions, trained=sampled)
    return made


def rollout(index, traces, reward, scores=(), ending="finished"):
    return Rollout(id=f"1/{index}", index=index, traces=traces, reward=reward, ending=ending, scores=list(scores))


def group(*rollouts, id=1):
    return Group(id=id, prompt=Prompt(id="a", text="a"), version=3, rollouts=list(rollouts))


def step(value, end, *, level="step", trace=0, start=0, scorer="steps"):
    return Score(value=value, level=level, trace=trace, start=start, end=end, scorer=scorer)


def batch_of(groups, credit, advantage="dr_grpo", **options):
    fixed = {"step": 1, "version": 3, "normalize": "token", "group_size": 2, "max_tokens": 10, "temperature": 1.0}
    return assemble(groups, advantage=advantage, credit=credit, **(fixed | options))


def two_answers():
    """Two answers of four tokens after a prompt of two: steps of two tokens each, and one token that nobody scored."""
    return group(
        rollout(0, [trace([1, 2], [10, 11, 12, 13])], 1.0, [step(0.5, 4), step(0.25, 6, start=4)]),
        rollout(1, [trace([1, 2], [14, 15, 16, 17, 18])], 0.0, [step(1.0, 4), step(-1.0, 6, start=4)]),
    )


def test_steps_by_hand():
    batch = batch_of([two_answers()], Credit("step"))
    # Returns: 0.5 + 0.25 + 1 and 0.25 + 1; 1 - 1 + 0, -1 + 0 and 0, which is compared with nothing.
    first, second = (1.75 - 0) / 2, (1.25 - -1) / 2
    expected = [0, 0, first, first, second, second, 0, 0, -first, -first, -second, -second, 0]
    np.testing.assert_allclose(batch.advantages, expected, rtol=1e-6)


def test_a_discount_and_the_weight_of_a_scorer():
    batch = batch_of([two_answers()], Credit("step", discount=0.5, scorers={"steps": 2.0}))
    # Earned: 1, 0.5 + 1; 2, -2, 0. Returns: 1 + 1.5 / 2 and 1.5; 2 - 2 / 2 and -2.
    first, second = (1.75 - 1.0) / 2, (1.5 - -2) / 2
    expected = [0, 0, first, first, second, second, 0, 0, -first, -first, -second, -second, 0]
    np.testing.assert_allclose(batch.advantages, expected, rtol=1e-6)


def test_one_baseline_for_all_steps_of_a_group():
    batch = batch_of([two_answers()], Credit("step", baseline="group"))
    mean = (1.75 + 1.25 + 0 - 1 + 0) / 5
    steps = np.array([1.75, 1.25, 0, -1, 0]) - mean
    expected = [0, 0, *np.repeat(steps[:2], 2), 0, 0, *np.repeat(steps[2:], [2, 2, 1])]
    np.testing.assert_allclose(batch.advantages, expected, rtol=1e-6)


def test_tokens_by_hand():
    batch = batch_of([two_answers()], Credit("token"))
    # A score is earned by its last token.
    ours, theirs = np.array([1.75, 1.75, 1.25, 1.25]), np.array([0, 0, -1, -1])
    half = (ours - theirs) / 2
    np.testing.assert_allclose(batch.advantages, [0, 0, *half, 0, 0, *-half, 0], rtol=1e-6)


def turns():
    """Three rollouts of two or three turns. What is read before a second turn is 30 or 31."""
    return group(
        rollout(0, [trace([1], [10], [30], [11], [30], [12])], 1.0, [step(0.5, 2, level="turn")]),
        rollout(1, [trace([1], [13], [30], [14])], 0.0),
        rollout(2, [trace([1], [15], [31], [16])], 3.0),
    )


def test_turns_by_position():
    batch = batch_of([turns()], Credit("turn"))
    # First turns 1.5, 0, 3; second turns 1, 0, 3; a single third turn.
    expected = [0, 0, 0, 1 - 4 / 3, 0, 0, 0, -1.5, 0, 0 - 4 / 3, 0, 1.5, 0, 3 - 4 / 3]
    np.testing.assert_allclose(batch.advantages, expected, rtol=1e-6, atol=1e-7)


def test_turns_after_equal_states_share_a_baseline():
    batch = batch_of([turns()], Credit("turn", baseline="state"))
    # After 30: 1 (second turn) and 1 (third turn) of the first rollout, 0 of the second. After 31 there is only one.
    third = 1 - 2 / 3
    expected = [0, 0, 0, third, 0, third, 0, -1.5, 0, -2 / 3, 0, 1.5, 0, 0]
    np.testing.assert_allclose(batch.advantages, expected, rtol=1e-6, atol=1e-7)


def test_the_outcome_is_added_as_in_gigpo():
    batch = batch_of([turns()], Credit("turn", baseline="state", outcome_weight=2.0))
    plain = batch_of([turns()], Credit("turn", baseline="state"))
    outcome = np.repeat(np.array([1.0, 0.0, 3.0]) - 4 / 3, batch.lengths)
    expected = plain.advantages + np.where(batch.trained, 2 * outcome, 0)
    np.testing.assert_allclose(batch.advantages, expected, rtol=1e-6)


def test_a_prefix_is_everything_before():
    again = rollout(3, [trace([1], [13], [30], [17])], 4.0)
    batch = batch_of([group(*turns().rollouts, again)], Credit("turn", baseline="prefix"))
    first = np.array([1.5, 0, 3, 4]) - 8.5 / 4
    # Only the second and the fourth rollout sampled 13 first.
    expected = [0, first[0], 0, 0, 0, 0, 0, first[1], 0, -2, 0, first[2], 0, 0, 0, first[3], 0, 2]
    np.testing.assert_allclose(batch.advantages, expected, rtol=1e-6, atol=1e-7)


def test_traces_follow_each_other_and_a_salvaged_beginning_is_part_of_its_turn():
    salvaged = trace([1], [10, 11])
    salvaged.trained[1] = False
    pair = group(
        rollout(0, [salvaged, trace([2], [12])], 1.0, [step(0.5, 2, trace=1, level="turn")]),
        rollout(1, [trace([1], [13]), trace([2], [14])], 0.0, [step(2.0, 2, level="turn")]),
    )
    batch = batch_of([pair], Credit("turn"))
    # Returns 1.5 and 1.5; 2 and 0.
    np.testing.assert_allclose(batch.advantages, [0, 0, -0.25, 0, 0.75, 0, 0.25, 0, -0.75], rtol=1e-6)


@pytest.mark.parametrize(
    ("of", "like"),
    [*((of, like) for of in ("turn", "step", "token") for like in ("group", "position", "prefix")), ("turn", "state")],
)
def test_a_plain_implementation(of, like):
    """With several traces, salvaged beginnings, rollouts without a token, and groups in which only one has any."""
    rng = np.random.default_rng(7)
    for seed in range(FORTY):
        groups = [random_group(rng, 1), random_group(rng, 2, size=2 + seed % 3)]
        gamma, outcome = [(1.0, 0.0), (0.7, 0.5)][seed % 2]
        name = ["grpo", "dr_grpo", "rloo"][seed % 3]
        batch = batch_of(groups, Credit(of, gamma, like, outcome), name)
        expected = plain_advantages(groups, of, gamma, like, outcome, name)
        flat = [
            expected[g.id, r.index, t, i] if one.trained[i] else 0.0
            for g in groups
            for r in g.rollouts
            for t, one in enumerate(r.traces)
            for i in range(len(one))
        ]
        np.testing.assert_allclose(batch.advantages, flat, rtol=1e-5, atol=1e-5)


def test_long_prefixes_take_little_memory():
    """The prefixes of all tokens together would take 140 MB."""
    answers = [rollout(index, [trace([1], list(range(6_000)))], float(index)) for index in range(2)]
    tracemalloc.start()
    try:
        batch = batch_of([group(*answers)], Credit("token", baseline="prefix"))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 25e6
    assert set(batch.advantages[batch.trained].tolist()) == {-0.5, 0.5}, "both answers are the same tokens"


def test_a_group_of_one_and_one_without_tokens():
    """Nothing to compare: no advantage, and nothing that is not a number."""
    empty = rollout(0, [trace([1])], 1.0)
    for credit in (Credit(), Credit("turn"), Credit("step", baseline="group"), Credit("token", baseline="prefix")):
        for name in ADVANTAGES:
            if name != "reinforce_plus_plus":
                alone = batch_of([group(rollout(0, [trace([1], [10, 11])], 1.0))], credit, name)
                assert not alone.advantages.any() and alone.trained_tokens == 2
            silent = batch_of([group(empty, rollout(1, [], 0.0))], credit, name)
            assert silent.trained_tokens == 0 and not silent.weights.any()


def test_without_finer_scores_a_discount_of_one_gives_the_outcome_to_every_turn():
    pair = group(
        rollout(0, [trace([1], [10], [30], [11])], 1.0),
        rollout(1, [trace([1], [12], [30], [13])], 0.0),
    )
    whole, turn = batch_of([pair], Credit()), batch_of([pair], Credit("turn"))
    assert whole.advantages.tolist() == turn.advantages.tolist()


def test_overlong_answers_are_masked_but_stay_in_the_baseline():
    rollouts = [
        rollout(0, [trace([1], [10, 11])], 1.0),
        rollout(1, [trace([1], [12, 13, 14])], -2.0, ending="truncated"),
    ]
    batch = batch_of([group(*rollouts)], Credit(), mask_overlong=True)
    # The mean is -0.5: the masked answer counts in it.
    assert batch.advantages.tolist() == [0, 1.5, 1.5, 0, 0, 0, 0]
    assert batch.trained.tolist() == [False, True, True, False, False, False, False]
    assert batch.weights.tolist() == [0, 0.5, 0.5, 0, 0, 0, 0]
    for normalize, weight in [("sequence", 0.5), ("constant", 1 / 20)]:
        batch = batch_of([group(*rollouts)], Credit(), mask_overlong=True, normalize=normalize)
        np.testing.assert_allclose(batch.weights, [0, weight, weight, 0, 0, 0, 0], rtol=1e-6)
    assert rollouts[1].trained_tokens == 3, "what was recorded stays"


def test_the_configuration_reaches_the_batch():
    keys = ["algorithm.credit=step", "algorithm.advantage=dr_grpo", "algorithm.discount=0.5"]
    scorers = {"scorers": {"steps": {"scorer": "a.py:b", "weight": 2.0}}}
    config = make_config(MINIMAL | scorers, [*keys, "algorithm.mask_overlong=true"])
    found = make_batch(config, [two_answers()], step=1, version=3)
    expected = batch_of([two_answers()], Credit("step", discount=0.5, scorers={"steps": 2.0}))
    assert found.advantages.tolist() == expected.advantages.tolist()
    cut = group(*two_answers().rollouts)
    cut.rollouts[1].ending = "truncated"
    assert make_batch(config, [cut], step=1, version=3).trained_tokens == 4


def test_states_are_compared_beside_the_outcome_by_default():
    keys = ["algorithm.credit=turn", "algorithm.baseline=state"]
    assert credit_of(make_config(MINIMAL, keys)).outcome_weight == 1.0
    assert credit_of(make_config(MINIMAL, [*keys, "algorithm.outcome_weight=0"])).outcome_weight == 0.0
    assert credit_of(make_config(MINIMAL, ["algorithm.credit=turn"])).outcome_weight == 0.0
