"""The reward of a whole answer: 1 if its last step is right, otherwise 0."""


def reward(completion: str, answer: str) -> float:
    steps, right = completion.split(";"), answer.split(";")
    return float(len(steps) == len(right) and steps[-2:] == right[-2:])
