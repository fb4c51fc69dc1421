"""The shipped example of a custom reward, on its own dataset, in real workers."""

from __future__ import annotations

from pathlib import Path

from headrace.scoring.rewards import WorkerScorer
from headrace.tasks.dataset import SingleTurnTask, load_prompts, split_heldout

EXAMPLE = Path(__file__).parents[3] / "examples" / "rewards"


async def test_the_example_judges_its_own_dataset() -> None:
    train, heldout = split_heldout(load_prompts(EXAMPLE / "words.jsonl"), 20)
    judge = WorkerScorer(f"{EXAMPLE / 'sorted_words.py'}:reward")
    await judge.start()
    task = SingleTurnTask(train, heldout, demonstration_field="answer")
    try:
        for prompt in heldout:
            right = task.demonstration(prompt)
            assert right is not None
            words = right.split()
            assert (await judge.judge(prompt, right)).reward == 1.0
            swapped = " ".join([*words[:-2], words[-1], words[-2]])
            assert (await judge.judge(prompt, swapped)).reward == 0.5 * (len(words) - 2) / len(words)
            assert (await judge.judge(prompt, "")).reward == 0.0
    finally:
        await judge.close()
