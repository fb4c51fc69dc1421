"""Tokens of a previous process that a rollout does not go on from are given up once, whatever traces they were in."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from headrace.pipeline.attempts import Attempts
from headrace.types import Group, Prompt, Trace


class Recorder:
    """Notes what is given up."""

    def __init__(self) -> None:
        self.given_up: list[tuple[str, int]] = []

    def discarded(self, rollout: str, tokens: int) -> None:
        self.given_up.append((rollout, tokens))


@pytest.mark.parametrize(("traces", "discarded", "given_up"), [(1, 0, []), (1, 3, [("0/1", 3)]), (2, 6, [("0/1", 6)])])
def test_saved_tokens_are_given_up_when_the_episode_says_so(
    traces: int, discarded: int, given_up: list[tuple[str, int]]
) -> None:
    recorder = Recorder()
    attempts = Attempts(cast(Any, None), cast(Any, None), cast(Any, recorder), [])
    plan = SimpleNamespace(saved=[Trace.of_context(np.arange(4, dtype=np.int32))] * traces)
    episode = cast(Any, SimpleNamespace(id="0/1", plan=plan, discarded=0, since=lambda start: None))
    attempts.started(Group(id=0, prompt=Prompt(id="p"), version=2), [episode])
    attempts.save()
    assert recorder.given_up == [], "what its episode makes of it is not known yet"
    episode.discarded = discarded
    for _ in range(2):
        attempts.save()
    assert recorder.given_up == given_up
