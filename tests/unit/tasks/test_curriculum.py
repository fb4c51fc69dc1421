"""Drawing by difficulty: solved prompts rest, hard ones come again, and a journal's outcomes bring it all back."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from headrace.tasks.source import RETRIES, RETRY_EVERY, Curriculum, PromptSource
from headrace.types import Prompt

SIZE = 8


def source(seed: int = 3) -> PromptSource:
    return PromptSource([Prompt(id=str(i), text="x") for i in range(SIZE)], seed, curriculum=True)


def rewards(prompt_id: str, solved: set[str], hard: set[str]) -> list[float]:
    return [1.0, 1.0] if prompt_id in solved else [0.0, 0.5] if prompt_id in hard else [0.0, 1.0]


def play(source: PromptSource, attempts: range, solved: set[str], hard: set[str]) -> list[str]:
    drawn = []
    for at in attempts:
        prompt = source.draw(at).id
        drawn.append(prompt)
        source.outcome(at, prompt, rewards(prompt, solved, hard))
    return drawn


def test_solved_prompts_rest_longer_each_time_and_always_come_back() -> None:
    drawn = play(source(), range(60 * SIZE), {"0", "1"}, set())
    counts = Counter(drawn)
    # Rests of 1, 2, 4, 8, 8, ... epochs, each after the epoch in which it was drawn.
    assert all(4 <= counts[prompt] <= 10 for prompt in ("0", "1"))
    assert all(counts[str(i)] > 60 for i in range(2, SIZE)), "the others take the places that became free"
    assert {"0", "1"} <= set(drawn[-12 * SIZE :])


def test_a_prompt_that_nobody_solved_comes_again_soon_but_not_for_ever() -> None:
    drawn = play(source(), range(SIZE * 40), set(), {"5"})
    counts = Counter(drawn)
    plain = [counts[str(i)] for i in range(SIZE) if i != 5]
    assert max(plain) - min(plain) <= 1, "the order of the others is not disturbed"
    # Each time that the order comes to it, it is tried up to RETRIES times more.
    assert 2 * max(plain) < counts["5"] <= (1 + RETRIES) * (max(plain) + 1)
    first = drawn.index("5")
    assert drawn.index("5", first + 1) - first <= RETRY_EVERY


def test_where_all_prompts_rest_the_order_goes_on() -> None:
    drawn = play(source(), range(10 * SIZE), {str(i) for i in range(SIZE)}, set())
    assert len(drawn) == 10 * SIZE and set(Counter(drawn)) == {str(i) for i in range(SIZE)}


@given(st.integers(1, 80), st.sets(st.sampled_from("0123")), st.sets(st.sampled_from("4567")), st.integers(0, 9))
def test_a_restart_draws_what_would_have_been_drawn(cut: int, solved: set[str], hard: set[str], seed: int) -> None:
    one = source(seed)
    whole = play(one, range(120), solved, hard)
    before = source(seed)
    drawn = play(before, range(cut), solved, hard)
    outcomes = []
    for at, prompt in enumerate(drawn):
        found = rewards(prompt, solved, hard)
        outcomes.append((at, prompt, sum(reward >= 1 for reward in found), len(found)))
    after = source(seed)
    after.position = before.position
    after.restore(outcomes)
    assert drawn + play(after, range(cut, 120), solved, hard) == whole


def test_without_a_curriculum_outcomes_change_nothing() -> None:
    plain = PromptSource([Prompt(id=str(i), text="x") for i in range(SIZE)], 3)
    other = PromptSource([Prompt(id=str(i), text="x") for i in range(SIZE)], 3)
    assert play(plain, range(50), {"1"}, {"2"}) == [other.draw().id for _ in range(50)]


def test_by_hand() -> None:
    curriculum = Curriculum(10)
    curriculum.note("a", 2, 2, 5)
    assert curriculum.rests("a", 24) and not curriculum.rests("a", 25)
    curriculum.note("a", 2, 2, 30)
    assert curriculum.rests("a", 59) and not curriculum.rests("a", 60)
    curriculum.note("a", 1, 2, 61)
    assert not curriculum.rests("a", 62)
    for failures in range(1, 5):
        curriculum.note("b", 0, 2, failures)
        assert curriculum.retry(RETRY_EVERY) == ("b" if failures != RETRIES + 1 else None)


def test_only_failures_in_a_row_count() -> None:
    curriculum = Curriculum(10)
    for _ in range(RETRIES + 1):
        curriculum.note("b", 0, 2, 1)
        assert curriculum.retry(RETRY_EVERY) == "b"
        curriculum.note("b", 1, 2, 2)
        assert curriculum.retry(RETRY_EVERY) is None
