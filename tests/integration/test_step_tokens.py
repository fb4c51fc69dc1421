"""An engine sends tokens at once when a step has ended, and says when each token was sampled."""

from __future__ import annotations

import msgspec
import numpy as np
from tiny_models import make_model, prompts, request

from headrace.config.schema import EngineConfig
from headrace.engines.base import Delta, Request
from headrace.engines.embedded.core import EngineCore


def run(core: EngineCore, asked: Request, now: list[float]) -> list[tuple[float, Delta]]:
    """Answer a request, a millisecond a step: far less than the time for which tokens are held back otherwise."""
    core.submit([asked])
    sent = []
    while core.has_work:
        now[0] += 0.001
        sent += [(now[0], delta) for delta in core.step()]
    return sent


def tokens(sent: list[tuple[float, Delta]]) -> list[int]:
    return [token for _, delta in sent for token in delta.token_ids.tolist()]


def test_the_end_of_a_step_is_sent_at_once() -> None:
    now = [0.0]
    config = EngineConfig(slots=2, block_size=4)
    core = EngineCore(make_model("llama"), config, name="e", max_length=64, version=0, clock=lambda: now[0])
    plain = request("plain", prompts([4])[0], 40, seed=3)
    held_back = run(core, plain, now)
    assert len(held_back) == 2
    assert all(delta.times is None for _, delta in held_back)
    markers = tuple(tokens(held_back)[10:20:9])
    sampling = msgspec.structs.replace(plain.sampling, step_token_ids=markers)
    sent = run(core, msgspec.structs.replace(plain, id="steps", sampling=sampling), now)
    assert tokens(sent) == tokens(held_back)
    ends = [at for at, token in enumerate(tokens(sent)) if token in markers]
    lengths = np.cumsum([len(delta.token_ids) for _, delta in sent])
    assert {end + 1 for end in ends} <= set(lengths.tolist())
    for moment, delta in sent:
        assert delta.times is not None
        np.testing.assert_allclose(np.diff(delta.times), 0.001, atol=1e-9)
        assert delta.times[-1] == moment
