"""An agent written against the `openai` package: it asks, and where the answer is wrong it asks once more.

Nothing here knows how it is trained. The run calls `agent` for every rollout, with the address of its gateway, an API
key that stands for the rollout's session, and the fields of a line of the dataset; what it returns is the reward.
"""

from functools import cache

from openai import OpenAI

TURNS = 2


@cache
def gateway(base_url: str) -> OpenAI:
    """One client for all sessions: making one costs more than a request."""
    return OpenAI(base_url=base_url, api_key="each session has its own")


def agent(base_url: str, api_key: str, model: str, messages: list[dict[str, str]], answer: str) -> dict[str, float]:
    client = gateway(base_url).with_options(api_key=api_key)
    history = list(messages)
    for turn in range(TURNS):
        completion = client.chat.completions.create(model=model, messages=history)
        reply = completion.choices[0].message.content or ""
        if reply == answer:
            return {"reward": 1.0 if turn == 0 else 0.8, "first_try": float(turn == 0)}
        history += [{"role": "assistant", "content": reply}, {"role": "user", "content": "again"}]
    return {"reward": 0.5 * in_order(reply, answer), "first_try": 0.0}


def in_order(reply: str, answer: str) -> float:
    """How far the reply is right, from its beginning."""
    right = 0
    while right < min(len(reply), len(answer)) and reply[right] == answer[right]:
        right += 1
    return right / len(answer)
