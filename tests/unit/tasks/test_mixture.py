"""Several tasks as one: prompts come in proportion to the weights, always in the same order, and ids never collide."""

import asyncio

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import DataError
from headrace.tasks.base import Environment
from headrace.tasks.dataset import SingleTurnTask
from headrace.tasks.mixture import DRAWS, MixedSource, Mixture, make_source
from headrace.tasks.source import PromptSource
from headrace.types import Prompt


def prompts(count: int, first: int = 0) -> list[Prompt]:
    """Prompts whose ids are the same in every task."""
    found = range(first, first + count)
    return [Prompt(id=str(i), text=f"question {i}", data={"answer": str(i)}) for i in found]


def mixture(sizes: dict[str, int], weights: dict[str, float], heldout: int = 0) -> Mixture:
    tasks = {
        name: SingleTurnTask(prompts(size), prompts(heldout, 1000), demonstration_field="answer")
        for name, size in sizes.items()
    }
    return Mixture(tasks, weights)


WEIGHTS = st.lists(st.floats(0.05, 20), min_size=2, max_size=5)


@given(seed=st.integers(0, 2**63), weights=WEIGHTS)
def test_every_stretch_of_draws_is_close_to_the_weights(seed: int, weights: list[float]) -> None:
    names = [f"task{i}" for i in range(len(weights))]
    source = MixedSource(mixture(dict.fromkeys(names, 7), dict(zip(names, weights, strict=True))), seed)
    drawn = [source.draw().task for _ in range(2000)]
    for begin, end in ((0, 100), (0, 2000), (700, 900)):
        for name, weight in zip(names, weights, strict=True):
            expected = (end - begin) * weight / sum(weights)
            assert abs(drawn[begin:end].count(name) - expected) < 6


def test_each_task_has_epochs_of_its_own() -> None:
    source = MixedSource(mixture({"math": 5, "code": 3}, {"math": 2, "code": 1}), 0)
    drawn = [source.draw() for _ in range(600)]
    for name, size in (("math", 5), ("code", 3)):
        own = [prompt.id for prompt in drawn if prompt.task == name]
        for start in range(0, len(own) - size, size):
            assert set(own[start : start + size]) == {f"{name}/{i}" for i in range(size)}


@given(
    seed=st.integers(0, 1000),
    draws=st.integers(0, 200),
    left_out=st.sets(st.sampled_from(["math/0", "math/3", "code/1"])),
    curriculum=st.booleans(),
)
def test_a_resumed_source_goes_on_exactly(seed: int, draws: int, left_out: set[str], curriculum: bool) -> None:
    mixed = mixture({"math": 5, "code": 3}, {"math": 2, "code": 1})
    before, outcomes = make_source(mixed, seed, curriculum=curriculum), []
    for prompt_id in left_out:
        before.leave_out(prompt_id)
    for at in range(draws):
        prompt = before.draw(at)
        rewards = [1.0, 1.0] if int(prompt.data["answer"]) % 2 else [0.0, 0.0]
        before.outcome(at, prompt.id, rewards)
        outcomes.append((at, prompt.id, int(sum(rewards)), 2))
    after = make_source(mixed, seed, curriculum=curriculum)
    after.position = msgspec.json.decode(msgspec.json.encode(before.position))
    after.restore(outcomes)
    for prompt_id in left_out:
        after.leave_out(prompt_id)
    assert [after.draw(draws + i).id for i in range(50)] == [before.draw(draws + i).id for i in range(50)]
    assert after.position == before.position


def test_a_number_of_draws_is_a_position_too() -> None:
    mixed = mixture({"math": 5, "code": 3}, {"math": 2, "code": 1})
    before, after = MixedSource(mixed, 3), MixedSource(mixed, 3)
    for _ in range(37):
        before.draw()
    after.position = 37
    assert after.position == before.position
    assert before.position == {DRAWS: 37, "math": 24, "code": 13}


def test_the_seed_changes_the_order_and_other_weights_count_at_once() -> None:
    sizes = {"math": 50, "code": 50}
    first = [MixedSource(mixture(sizes, {"math": 1, "code": 1}), seed) for seed in (0, 1)]
    orders = [[source.draw().id for _ in range(40)] for source in first]
    assert orders[0] != orders[1]
    own = [[id.partition("/")[2] for id in orders[0] if id.startswith(name)][:10] for name in sizes]
    assert own[0] != own[1], "tasks of equal size have different orders"
    changed = MixedSource(mixture(sizes, {"math": 9, "code": 1}), 0)
    changed.position = first[0].position
    drawn = [changed.draw().task for _ in range(100)]
    assert 87 <= drawn.count("math") <= 93


def test_prompts_carry_their_task_and_go_back_to_it() -> None:
    seen: list[Prompt] = []

    class Own(SingleTurnTask):
        def episode(self, prompt: Prompt) -> Environment:  # type: ignore[override]
            seen.append(prompt)
            return super().episode(prompt)

    mixed = Mixture({"a": Own(prompts(2), []), "b": SingleTurnTask(prompts(3), [], "answer")}, {"a": 1, "b": 1})
    assert [prompt.id for prompt in mixed.train] == ["a/0", "a/1", "b/0", "b/1", "b/2"]
    assert [prompt.id for prompt in mixed.train[1:3]] == ["a/1", "b/0"]
    assert mixed.train[-1] == Prompt(id="b/2", text="question 2", data={"answer": "2"}, task="b")
    with pytest.raises(IndexError):
        mixed.train[5]
    mixed.episode(mixed.train[1])
    assert seen == [prompts(2)[1]]
    assert [mixed.demonstration(mixed.train[i]) for i in (1, 4)] == [None, "2"]
    asyncio.run(mixed.close())


def test_the_first_heldout_prompts_are_of_all_tasks() -> None:
    tasks = {"a": SingleTurnTask(prompts(1), prompts(3, 10)), "b": SingleTurnTask(prompts(1), prompts(1, 10))}
    mixed = Mixture(tasks, {"a": 1, "b": 1})
    assert [prompt.id for prompt in mixed.heldout] == ["a/10", "b/10", "a/11", "a/12"]


def test_a_task_without_prompts_is_named() -> None:
    with pytest.raises(DataError, match=r"^\[tasks.code\]: the task has no training prompts$"):
        mixture({"math": 3, "code": 0}, {"math": 1, "code": 1})
    source = MixedSource(mixture({"math": 3, "code": 1}, {"math": 1, "code": 1}), 0)
    with pytest.raises(DataError, match=r"^\[tasks.code\]: every training prompt is too long"):
        source.leave_out("code/0")


def test_one_task_is_drawn_from_as_before() -> None:
    task = SingleTurnTask(prompts(9), [])
    source, plain = make_source(task, 4), PromptSource(task.train, 4)
    assert [source.draw() for _ in range(30)] == [plain.draw() for _ in range(30)]
