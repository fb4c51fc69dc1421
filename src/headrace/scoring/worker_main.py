"""A reward worker: `python -m headrace.scoring.worker_main`. It judges one answer at a time."""

from __future__ import annotations

import asyncio
import inspect
from dataclasses import dataclass

import msgspec

from headrace.channel.worker_side import Owner, die_with_parent, end_descendants
from headrace.reference import call_factory, import_function
from headrace.scoring.base import ScoreError
from headrace.scoring.functions import (
    Question,
    RewardFunction,
    call,
    check_signature,
    finish,
    judgement,
    source_version,
)
from headrace.scoring.messages import RewardSetup, ScoreReply


@dataclass(frozen=True)
class Loaded:
    """A reward function, and the version of it that this worker has loaded."""

    function: RewardFunction
    version: str


def main() -> None:
    """Load the reward function, then answer questions until the owner closes the pipe."""
    die_with_parent()
    owner = Owner()
    loaded = owner.greet(RewardSetup, load)
    if loaded is None:
        return
    with asyncio.Runner() as runner:
        for id, question in owner.questions(Question):
            if question is not None:
                owner.answer(id, answer(loaded, question, runner))
    end_descendants()


def load(setup: RewardSetup) -> Loaded:
    """Load the reward function that the first frame names. Raises `ConfigError`."""
    found = import_function(setup.reference)
    version = source_version(found)
    if setup.arguments is not None:
        found = call_factory(setup.reference, found, **setup.arguments)
    check_signature(found, setup.reference)
    return Loaded(found, version)


def answer(loaded: Loaded, question: Question, runner: asyncio.Runner) -> ScoreReply:
    """Judge one answer. All async functions of a worker share one event loop."""
    try:
        result = call(loaded.function, question)
        if inspect.isawaitable(result):
            result = runner.run(finish(result))
        return ScoreReply(judgement=msgspec.structs.replace(judgement(result), version=loaded.version))
    except ScoreError as error:
        return ScoreReply(error=str(error))


if __name__ == "__main__":
    main()
