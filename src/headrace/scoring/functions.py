"""The calling convention of reward functions, the same in worker processes and in threads.

A function gets the arguments that it declares, by name:

    completion   the policy's answer, as text (every reward function takes it)
    prompt       the question: its text, or the messages if there is more than one beside the system's
    messages     the prompt's messages, always as a list
    data         all other fields of the prompt
    <field>      one field of the prompt's data, such as `answer`
    **fields     everything above

The function returns a number, or a dict with "reward" and further numbers to record. It may be `async`.
"""

import asyncio
import hashlib
import inspect
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec

from headrace.errors import ConfigError
from headrace.reference import describe
from headrace.scoring.base import Judgement, ScoreError, number

RewardFunction = Callable[..., Any]


class Question(msgspec.Struct, kw_only=True):
    """The question to a reward function: a prompt and an answer, as plain data."""

    completion: str
    messages: list[dict[str, str]]
    text: str | None = None
    data: dict[str, Any] = {}

    def fields(self) -> dict[str, Any]:
        """Return everything that a reward function may ask for, by name."""
        spoken = [message for message in self.messages if message.get("role") != "system"]
        prompt: Any = self.messages
        if self.text is not None:
            prompt = self.text
        elif len(spoken) == 1:
            prompt = spoken[0]["content"]
        shared = {"messages": self.messages, "data": self.data}
        return {**shared, **self.data, "completion": self.completion, "prompt": prompt}


class RewardSetup(msgspec.Struct, kw_only=True):
    """The first frame to a reward worker: the function that it serves."""

    reference: str
    arguments: dict[str, Any] | None = None
    """The arguments of a factory. If they are given, the reference names a factory, which is called once with them and
    returns the reward function."""


class ScoreReply(msgspec.Struct, kw_only=True):
    """A worker's answer to one `Question`: a judgement, or the reason why there is none."""

    judgement: Judgement | None = None
    error: str = ""


def check_signature(function: RewardFunction, name: str) -> None:
    """Raise `ConfigError` if the function could never be called as a reward function."""
    try:
        parameters = inspect.signature(function).parameters
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{name} has no signature, so it cannot be a reward function") from error
    takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    if "completion" not in parameters and not takes_all:
        raise ConfigError(f"{name} takes ({', '.join(parameters)}), but a reward function must take `completion`")


def is_reward_function(candidate: object) -> bool:
    """Return whether `candidate` could be called as a reward function."""
    if not callable(candidate) or inspect.isclass(candidate):
        return False
    try:
        check_signature(candidate, "")
    except ConfigError:
        return False
    return True


def source_version(function: RewardFunction) -> str:
    """Return a short digest of the function's source file, as its version; empty if there is no such file."""
    try:
        name = inspect.getsourcefile(inspect.unwrap(function))
    except (TypeError, ValueError):  # Not a Python function, or wrapped in a cycle.
        return ""
    file = Path(name or "")
    return hashlib.blake2b(file.read_bytes(), digest_size=6).hexdigest() if file.is_file() else ""


def call(function: RewardFunction, question: Question) -> Any:
    """Call the function with the arguments that it declares. An awaitable is returned as it is. Raises `ScoreError`."""
    available = question.fields()
    positional: list[Any] = []
    named: dict[str, Any] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            named = {**available, **named}
        elif parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            continue
        elif name not in available:
            if parameter.default is inspect.Parameter.empty:
                has = ", ".join(sorted(question.data)) or "no fields"
                raise ScoreError(f"the reward function wants {name!r}, which this prompt does not have (it has {has})")
        elif parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
            positional.append(available.pop(name))
        else:
            named[name] = available[name]
    try:
        return function(*positional, **named)
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        raise ScoreError(f"the reward function raised {describe(error)}") from error


def judge(function: RewardFunction, question: Question, run: Callable[[Coroutine[Any, Any, Any]], Any]) -> Judgement:
    """Judge one answer. `run` runs what an async function returns to its end. Raises `ScoreError`."""
    result = call(function, question)
    if inspect.isawaitable(result):
        result = run(_finish(result))
    return judgement(result)


async def _finish(result: Awaitable[Any]) -> Any:
    try:
        return await result
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        raise ScoreError(f"the reward function raised {describe(error)}") from error


def judgement(result: Any) -> Judgement:
    """Turn the result of a reward function into a judgement. Raises `ScoreError`."""
    if not isinstance(result, dict):
        return Judgement(reward=number(result, "the reward function gave"))
    if "reward" not in result:
        raise ScoreError(f'the reward function gave a dict without "reward" (it has {", ".join(map(str, result))})')
    numbers = {str(key): number(value, f"the reward function gave, as {key!r},") for key, value in result.items()}
    return Judgement(reward=numbers.pop("reward"), metrics=numbers)
