"""The quickstart's reward: 1 for the right order; otherwise up to a half for how far the answer is right."""


def reward(completion: str, answer: str) -> float:
    if completion == answer:
        return 1.0
    right = 0
    while right < min(len(completion), len(answer)) and completion[right] == answer[right]:
        right += 1
    return 0.5 * right / len(answer)
