"""What every engine keeps, on vLLM. Kept sets cannot be had on a CPU: they need vLLM's second model runner."""

from __future__ import annotations

import pytest
import test_engine
from engine_subjects import Subject
from test_engine import *  # noqa: F403

from conftest import PREFILL_CHUNK

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


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


async def test_prompts_that_are_read_in_several_steps_change_no_draw(subject: Subject) -> None:
    """Alone one takes several steps; together each step has the end of one and the beginning of another."""
    prompts = [[(7 * i + j) % 60 + 1 for i in range(PREFILL_CHUNK * 3 // 2 + j)] for j in range(subject.slots)]
    requests = [test_engine.ask(f"{i}", prompt, seed=i) for i, prompt in enumerate(prompts)]
    together = await test_engine.complete_all(subject.engine, requests)
    for request, completion in zip(requests, together, strict=True):
        assert completion.finish == "length", completion.error
        test_engine.assert_recorded(subject, request, completion)
    await test_engine.load(subject, 2)  # Under another version the prefix cache has none of them.
    alone = await test_engine.complete(subject.engine, requests[1])
    again = await test_engine.complete_all(subject.engine, requests)
    assert alone.finish == "length" and again[1].token_ids == alone.token_ids
