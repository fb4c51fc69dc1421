"""Forks of a running sequence: measures what they cost to start, and checks their tokens.

The running sequence is called the pivot. Each fork must have exactly the tokens that a fresh request with the same
prefix and seed gets.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from headrace.bench.engine_drive import DrawnAnswer, Driver
from headrace.bench.engine_work import Work
from headrace.engines.base import Request
from headrace.types import Int32Array


def bench_fork(driver: Driver, work: Work, count: int, at: int, length: int) -> dict[str, Any]:
    """Fork a running sequence `count` times after its first `at` tokens. Each fork samples `length` tokens."""
    prefix, pivot = _run_to_pivot(driver, work, at, length)
    forks = [work.request(f"fork/{i}", prefix, length, seed=1 + i, parent=pivot.id) for i in range(count)]
    forked = driver.run(forks)
    fresh = [work.request(f"fresh/{i}", prefix, length, seed=1 + i) for i in range(count)]
    driver.core.forget_prefixes()
    anew = driver.run(fresh)
    return {
        "continuations": count,
        "at": at,
        "tokens_each": length,
        "prefilled_tokens": forked.prefilled,
        "fresh_prefilled_tokens": anew.prefilled,
        "seconds": forked.seconds,
        "fresh_seconds": anew.seconds,
        "equal": sum(np.array_equal(a.token_ids, b.token_ids) for a, b in _pairs(forked.answers, anew.answers)),
        "max_logprob_difference": max(_difference(a, b) for a, b in _pairs(forked.answers, anew.answers)),
    }


def _run_to_pivot(driver: Driver, work: Work, at: int, length: int) -> tuple[Int32Array, Request]:
    prompt = work.prompts[0]
    # The pivot samples as many more tokens as its forks, so that all end together.
    pivot = work.request("pivot", prompt, at - len(prompt) + length, seed=0)
    driver.submit([pivot])
    while len(driver.answer(pivot, whole=False).token_ids) < at - len(prompt):
        driver.step()
        driver.take(driver.core.flush())
    known = driver.answer(pivot, whole=False).token_ids
    return np.concatenate([prompt, known])[:at].astype(np.int32), pivot


def _pairs(forks: list[DrawnAnswer], fresh: list[DrawnAnswer]) -> list[tuple[DrawnAnswer, DrawnAnswer]]:
    return list(zip(forks, fresh, strict=True))


def _difference(fork: DrawnAnswer, fresh: DrawnAnswer) -> float:
    """Return the largest difference of the log-probabilities, up to the first token that differs."""
    same = fork.token_ids == fresh.token_ids
    until = len(same) if same.all() else int(same.argmin())
    return float(np.abs(fork.logprobs[:until] - fresh.logprobs[:until]).max(initial=0.0))
