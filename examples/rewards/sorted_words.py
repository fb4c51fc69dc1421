"""A reward of your own: how well are the words of `words.jsonl` sorted?

A reward function takes `completion` and, by name, any field of the dataset's line (here `answer`); it returns a number,
or a dict with "reward" and whatever else should be recorded. It runs in a worker process: it may print, raise or hang.
"""

from __future__ import annotations


def reward(completion: str, answer: str) -> dict[str, float]:
    """1 for the right list, and up to 0.5 for the right words at the right places of a wrong one."""
    given, right = completion.lower().split(), answer.split()
    if given == right:
        return {"reward": 1.0, "in_place": 1.0}
    in_place = sum(a == b for a, b in zip(given, right, strict=False)) / max(len(right), len(given), 1)
    return {"reward": 0.5 * in_place, "in_place": in_place}
