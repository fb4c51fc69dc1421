"""A reward that takes its time: the run waits for it, and leaves the machine to the servers that start meanwhile."""

from __future__ import annotations

import time

SECONDS = 0.05


def reward(completion: str, answer: str) -> float:
    time.sleep(SECONDS)
    return float(completion[:1] == answer[:1])
