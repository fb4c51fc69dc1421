"""What every engine keeps, on vLLM. Kept sets cannot be had on a CPU: they need vLLM's second model runner."""

from __future__ import annotations

import pytest
import test_engine
from engine_subjects import Subject
from test_engine import *  # noqa: F403

pytestmark = pytest.mark.vllm


async def test_truncated_draws_are_from_the_kept_tokens_and_name_them(subject: Subject) -> None:
    """All rules but `min_p` together with others, which vLLM applies first; no kept sets."""
    kinds = {name: kind for name, kind in test_engine.TRUNCATIONS.items() if name != "all"}
    requests = [
        test_engine.ask(f"{name}/{seed}", max_tokens=2, seed=seed, **kind)
        for name, kind in kinds.items()
        for seed in range(4)
    ]
    for request, completion in zip(requests, await test_engine.complete_all(subject.engine, requests), strict=True):
        test_engine.assert_drawn(subject, request, completion, 1)


async def test_recording_what_was_kept_changes_no_token(subject: Subject) -> None:
    """It is refused, in one line."""
    completion = await test_engine.complete(subject.engine, test_engine.ask("kept", record_kept=True))
    assert completion.finish == "failed" and "record_kept" in completion.error and "\n" not in completion.error
