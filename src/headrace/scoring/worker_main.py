"""A reward worker: `python -m headrace.scoring.worker_main`. It judges one answer at a time."""

import asyncio

import msgspec

from headrace.channel.worker_side import Owner, die_with_parent, end_descendants
from headrace.reference import call_factory, import_function
from headrace.scoring.base import ScoreError
from headrace.scoring.functions import (
    Question,
    RewardFunction,
    RewardSetup,
    ScoreReply,
    check_signature,
    judge,
    source_version,
)


def main() -> None:
    """Load the reward function, then answer questions until the owner closes the pipe."""
    die_with_parent()
    owner = Owner()
    loaded = owner.greet(RewardSetup, _load)
    if loaded is None:
        return
    function, version = loaded
    # All async functions of a worker share one event loop.
    with asyncio.Runner() as runner:
        for id, question in owner.questions(Question):
            if question is None:
                continue
            try:
                judgement = judge(function, question, runner.run)
                owner.answer(id, ScoreReply(judgement=msgspec.structs.replace(judgement, version=version)))
            except ScoreError as error:
                owner.answer(id, ScoreReply(error=str(error)))
    end_descendants()


def _load(setup: RewardSetup) -> tuple[RewardFunction, str]:
    """Return the reward function that the first frame names, and the version of it. Raises `ConfigError`."""
    found = import_function(setup.reference)
    version = source_version(found)
    if setup.arguments is not None:
        found = call_factory(setup.reference, found, **setup.arguments)
    check_signature(found, setup.reference)
    return found, version


if __name__ == "__main__":
    main()
