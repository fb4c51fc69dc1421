"""A reward worker: `python -m headrace.scoring.worker_main`, one judgement at a time, over its standard pipes.

It starts from its first frame alone. Its owner's end is its own end, even in the middle of a judgement, and whatever
a reward function prints or starts stays out of the pipes and ends with the worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import inspect
import os
import signal
import sys
import threading
import time
from queue import SimpleQueue
from typing import BinaryIO

from headrace.errors import ConfigError
from headrace.reference import describe, import_function
from headrace.scoring.base import ScoreError
from headrace.scoring.frames import Answer, Hello, Setup, pack, read
from headrace.scoring.functions import Question, RewardFunction, call, check_signature, finish, judgement

GRACE_SECONDS = 2.0
"""How long a worker whose owner is gone may take to end by itself."""


def main() -> None:
    """Say hello, then answer questions until the owner closes the pipe."""
    _die_with_owner()
    questions, answers = _private_pipes()
    setup = read(questions, Setup)
    if setup is None:
        return
    try:
        function = load(setup)
    except ConfigError as error:
        _send(answers, Hello(error=str(error)))
        return
    _send(answers, Hello())
    asked: SimpleQueue[Question | None] = SimpleQueue()
    threading.Thread(target=_listen, args=(questions, asked), daemon=True).start()
    with asyncio.Runner() as runner:
        while (question := asked.get()) is not None:
            _send(answers, answer(function, question, runner))
    _end_descendants()


def load(setup: Setup) -> RewardFunction:
    """The reward function that the first frame names; raises `ConfigError`."""
    found = import_function(setup.reference)
    if setup.arguments is not None:
        try:
            found = found(**setup.arguments)
        except ConfigError:
            raise
        except (Exception, SystemExit) as error:
            raise ConfigError(f"{setup.reference} raised {describe(error)}") from error
    check_signature(found, setup.reference)
    return found


def answer(function: RewardFunction, question: Question, runner: asyncio.Runner) -> Answer:
    """Judge one answer; async functions share one event loop for the worker's whole life."""
    try:
        result = call(function, question)
        if inspect.isawaitable(result):
            result = runner.run(finish(result))
        return Answer(id=question.id, judgement=judgement(result))
    except ScoreError as error:
        return Answer(id=question.id, error=str(error))


def _private_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Take the two pipes away from descriptors 0 and 1, so that `print` and `input` cannot touch them."""
    questions, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    return questions, answers


def _listen(questions: BinaryIO, asked: SimpleQueue[Question | None]) -> None:
    """Pass questions on; at the end of the pipe, ask the worker to end, and make it end if it does not."""
    while (question := read(questions, Question)) is not None:
        asked.put(question)
    asked.put(None)
    time.sleep(GRACE_SECONDS)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _send(answers: BinaryIO, message: Hello | Answer) -> None:
    # The owner may be gone already; the end of the other pipe then ends this worker.
    with contextlib.suppress(BrokenPipeError):
        answers.write(pack(message))
        answers.flush()


def _die_with_owner() -> None:
    """Ask Linux to kill this process with its owner: a function that holds the interpreter's lock stops `_listen`."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _end_descendants() -> None:
    """End what reward functions started and left behind: they share this worker's process group."""
    if os.getpgrp() == os.getpid():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.killpg(os.getpgrp(), signal.SIGTERM)


if __name__ == "__main__":
    main()
