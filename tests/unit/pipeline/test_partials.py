"""Tokens of a previous process that a rollout does not go on from are given up once, whatever traces they were in."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from headrace.pipeline.partials import Partials
from headrace.types import Trace


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
    partials = Partials(cast(Any, SimpleNamespace(running={})), cast(Any, recorder))
    partials.resumed({"0/1": [Trace.of_context(np.arange(4, dtype=np.int32))] * traces})
    assert recorder.given_up == [], "what its episode makes of it is not known yet"
    episode = cast(Any, SimpleNamespace(id="0/1", discarded=discarded))
    for _ in range(2):
        partials.ended([episode])
    assert recorder.given_up == given_up
