"""A reward worker: `python -m headrace.scoring.worker_main`, one judgement at a time."""

from __future__ import annotations

import asyncio
import inspect

from headrace.channel.worker_side import Owner, die_with_owner, end_descendants
from headrace.errors import ConfigError
from headrace.reference import describe, import_function
from headrace.scoring.base import ScoreError
from headrace.scoring.functions import Question, RewardFunction, call, check_signature, finish, judgement
from headrace.scoring.messages import Answer, Setup


def main() -> None:
    """Say hello, then answer questions until the owner closes the pipe."""
    die_with_owner()
    owner = Owner()
    function = owner.greet(Setup, load)
    if function is None:
        return
    with asyncio.Runner() as runner:
        for id, question in owner.questions(Question):
            if question is not None:
                owner.answer(id, answer(function, question, runner))
    end_descendants()


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
        return Answer(judgement=judgement(result))
    except ScoreError as error:
        return Answer(error=str(error))


if __name__ == "__main__":
    main()
