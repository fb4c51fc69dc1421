"""The quickstart's reward: 1 for the right order; otherwise up to a half for letters in their right places."""


def reward(completion: str, answer: str) -> float:
    if completion == answer:
        return 1.0
    hits = sum(given == wanted for given, wanted in zip(completion, answer, strict=False))
    return 0.5 * hits / len(answer)
