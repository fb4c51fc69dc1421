"""An engine that shares its GPU: no step in the trainer's turn, and commands are obeyed in it all the same."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
from tiny_models import make_model

from headrace.channel.turns import EngineTurns, TrainerTurns
from headrace.config.schema import EngineConfig
from headrace.engines.base import Delta, Request, Sampling
from headrace.engines.embedded.core import EngineCore
from headrace.engines.embedded.engine import EngineLoop

TOKENS = 400


def test_the_engine_stands_still_while_the_trainer_has_the_gpu(tmp_path: Path) -> None:
    core = EngineCore(make_model("llama"), EngineConfig(slots=2, device="cpu"), name="e", max_length=512, version=0)
    received: list[Delta] = []
    loop = EngineLoop(core, received.extend, turns=EngineTurns(tmp_path / "turn"))
    thread = threading.Thread(target=loop.run, daemon=True)
    trainer = TrainerTurns(tmp_path / "turn")
    thread.start()
    loop.submit([Request(id="r", token_ids=np.arange(5, dtype=np.int32), sampling=Sampling(max_tokens=TOKENS, seed=1))])
    until(lambda: core.counters().generated_tokens > 3)
    with trainer.held(30.0):
        before = core.counters().generated_tokens
        assert before < TOKENS
        # What was computed is handed out, not held back until the engine's turn.
        until(lambda: sum(len(delta.token_ids) for delta in received) == before)
        assert len(loop.score(np.arange(4, dtype=np.int32)).result(30.0)) == 3
        time.sleep(0.1)
        assert core.counters().generated_tokens == before
    until(lambda: any(delta.finish is not None for delta in received))
    assert sum(len(delta.token_ids) for delta in received) == TOKENS
    # An engine without work holds nothing.
    with trainer.held(30.0):
        pass
    loop.stop()
    thread.join(30.0)
    assert not thread.is_alive()


def until(condition) -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(1e-3)
