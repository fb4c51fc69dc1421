"""Turns on a shared GPU: never both at once, the trainer is let in when it waits, the dead hold nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from headrace.channel.turns import EngineTurns, TrainerTurns
from headrace.errors import DeadlineError


def test_the_trainer_waits_until_the_engine_gives(tmp_path: Path) -> None:
    trainer, engine = TrainerTurns(tmp_path / "turn"), EngineTurns(tmp_path / "turn")
    assert engine.take()
    assert not engine.wanted
    order: list[str] = []

    def train() -> None:
        with trainer.held(10.0):
            order.append("trained")
            assert not engine.take()

    thread = threading.Thread(target=train)
    thread.start()
    while not engine.wanted:
        time.sleep(1e-3)
    # What it holds it may go on with; once given, it does not overtake the trainer that waits.
    assert engine.take()
    order.append("finished the launch")
    engine.give()
    thread.join(60)
    assert order == ["finished the launch", "trained"]
    assert not engine.wanted
    assert engine.take()


def test_engines_compute_together(tmp_path: Path) -> None:
    engines = [EngineTurns(tmp_path / "turn") for _ in range(2)]
    assert all(engine.take() for engine in engines)
    engines[0].give()
    with (
        pytest.raises(DeadlineError, match=r"no engine has let go of the GPU within 0.05 s"),
        TrainerTurns(tmp_path / "turn").held(0.05),
    ):
        raise AssertionError
    engines[1].close()
    with TrainerTurns(tmp_path / "turn").held(1.0):
        assert not engines[0].take()


def test_an_engine_that_is_killed_holds_nothing(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from headrace.channel.turns import EngineTurns\n"
        "turns = EngineTurns(Path(sys.argv[1])); assert turns.take(); print('held', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "turn")], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"held\n"
    trainer = TrainerTurns(tmp_path / "turn")
    with pytest.raises(DeadlineError), trainer.held(0.05):
        pass
    os.kill(process.pid, signal.SIGKILL)
    process.wait(60)
    with trainer.held(5.0):
        pass


def test_a_trainer_that_died_waiting_keeps_nobody_out(tmp_path: Path) -> None:
    (tmp_path / "turn").write_bytes(b"\x01")
    engine = EngineTurns(tmp_path / "turn")
    assert engine.wanted
    assert not engine.take()
    TrainerTurns(tmp_path / "turn")
    assert engine.take()
