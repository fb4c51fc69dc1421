"""A trainer that shares its GPU: a version's canary is scored in its turn, under the weights that are published.

What it waits for its turn is no part of a step's seconds.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest
from runs import small_config

from headrace.channel.turns import FILE, EngineTurns, TrainerTurns
from headrace.channel.worker_link import Incoming, WorkerLink
from headrace.training.layers import warm_up_batches
from headrace.training.remote import Published, Train, Trained
from headrace.training.serving import FIRST_RANK, TrainerRole
from headrace.types import Float32Array, Int32Array


def test_the_canary_is_scored_while_no_engine_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = WorkerLink(FIRST_RANK, f"ipc://{tmp_path}/hub", tmp_path)
    role = TrainerRole(link, small_config(tmp_path))
    role.turns = TrainerTurns(tmp_path / FILE)
    engine = EngineTurns(tmp_path / FILE)
    sent: list[Published] = []
    taken: list[bool] = []
    score = role.trainer.score

    def watched(token_ids: Int32Array) -> Float32Array:
        taken.append(engine.take())
        return score(token_ids)

    monkeypatch.setattr(link, "send", sent.append)
    monkeypatch.setattr(role.trainer, "score", watched)
    try:
        before = score(role.publisher.canary_token_ids)
        batch = next(warm_up_batches(role.trainer.model.config.vocab_size, 64))
        role.handle(Incoming(0, Train(batch=batch, publish=1, parent=0)))
        assert taken == [False]
        assert engine.take(), "the turn ends with the step and the canary"
        deadline = time.monotonic() + 30
        while not sent:
            assert role.failure is None and time.monotonic() < deadline
            time.sleep(0.01)
        canary = sent[0].manifest.canary
        np.testing.assert_array_equal(canary.logprobs, score(canary.token_ids))
        assert not np.array_equal(canary.logprobs, before)
    finally:
        role.publisher.close()
        role.trainer.close()
        role.turns.close()
        engine.close()
        link.close()


def test_a_wait_for_the_turn_is_no_part_of_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = WorkerLink(FIRST_RANK, f"ipc://{tmp_path}/hub", tmp_path)
    role = TrainerRole(link, small_config(tmp_path))
    role.turns = TrainerTurns(tmp_path / FILE)
    engine = EngineTurns(tmp_path / FILE)
    replies: list[Trained] = []
    monkeypatch.setattr(link, "reply", lambda incoming, answer: replies.append(answer))
    wait = 1.0
    batch = next(warm_up_batches(role.trainer.model.config.vocab_size, 64))
    assert engine.take()
    timer = threading.Timer(wait, engine.give)
    began = time.monotonic()
    timer.start()
    try:
        role.handle(Incoming(0, Train(batch=batch)))
        assert replies[0].report.seconds <= time.monotonic() - began - wait
    finally:
        timer.join()
        role.publisher.close()
        role.trainer.close()
        role.turns.close()
        engine.close()
        link.close()
