"""The figures of an evaluation, from the answers to each prompt: pass@k, majority@k and means.

An answer is right if its reward is at least 1. A failed rollout is a wrong answer, and does not vote.
"""

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.config.evaluate import MeasuredSection
from headrace.types import Rollout


@dataclass(frozen=True)
class Answer:
    """One answer to a held-out prompt."""

    rollout: Rollout
    text: str

    @property
    def reward(self) -> float:
        """The reward; 0 if the rollout failed."""
        failed = self.rollout.ending == "failed" or self.rollout.reward is None
        return 0.0 if failed else float(self.rollout.reward or 0.0)

    @property
    def right(self) -> bool:
        """Whether the answer is right."""
        return self.reward >= 1.0

    def vote(self, pattern: str) -> str | None:
        """Return what this answer votes for; None if it does not vote."""
        if self.rollout.ending == "failed":
            return None
        if not pattern:
            return self.text.strip()
        matches = list(re.finditer(pattern, self.text))
        return matches[-1][1 if matches[-1].re.groups else 0] if matches else None


def pass_at(answers: Sequence[Answer], k: int) -> float:
    """Return the chance that at least one of k answers, drawn from these without replacement, is right.

    This is the unbiased estimate of pass@k: with n answers, c of them right, 1 - C(n - c, k) / C(n, k).
    """
    wrong = sum(not answer.right for answer in answers)
    return 1.0 - math.comb(wrong, k) / math.comb(len(answers), k)


def majority_at(answers: Sequence[Answer], k: int, pattern: str = "") -> float:
    """Return how often the most frequent vote of k answers is right, over whole blocks of k answers.

    Of votes that are equally frequent, the one that came first counts. A vote is as right as the first answer with it.
    """
    blocks = [answers[start : start + k] for start in range(0, len(answers) - k + 1, k)]
    return sum(_right_by_majority(block, pattern) for block in blocks) / len(blocks)


def _right_by_majority(block: Sequence[Answer], pattern: str) -> bool:
    votes = [(vote, answer) for answer in block if (vote := answer.vote(pattern)) is not None]
    if not votes:
        return False
    [(chosen, _)] = Counter(vote for vote, _ in votes).most_common(1)
    return next(answer.right for vote, answer in votes if vote == chosen)


def figures(answered: Sequence[Sequence[Answer]]) -> dict[str, float]:
    """Return the figures that every evaluation has."""
    answers = [answer for of_prompt in answered for answer in of_prompt]
    return {
        "pass_1": sum(answer.right for answer in answers) / len(answers),
        "pass_k": sum(any(answer.right for answer in of_prompt) for of_prompt in answered) / len(answered),
        "reward_mean": math.fsum(answer.reward for answer in answers) / len(answers),
        "tokens_mean": sum(answer.rollout.trained_tokens for answer in answers) / len(answers),
    }


def chosen_figures(answered: Sequence[Sequence[Answer]], measured: MeasuredSection) -> dict[str, float]:
    """Return pass@k and majority@k, as means over prompts, for the numbers k that the configuration names."""
    found = {
        f"pass_at_{k}": math.fsum(pass_at(of_prompt, k) for of_prompt in answered) / len(answered)
        for k in measured.pass_at
    }
    return found | {
        f"majority_at_{k}": math.fsum(majority_at(each, k, measured.answer_pattern) for each in answered)
        / len(answered)
        for k in measured.majority_at
    }
