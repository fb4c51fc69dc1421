"""The calling convention of reward functions, the same in worker processes and in threads.

A function gets the arguments that it declares, by name:

    completion   the policy's answer, as text (every reward function takes it)
    prompt       the question: its text, or the messages if there is more than one beside the system's
    messages     the prompt's messages, always as a list
    data         all other fields of the prompt
    <field>      one field of the prompt's data, such as `answer`
    **fields     everything above

The function returns a number, or a dict with "reward" and further numbers to record.

A function that takes `completions` instead (or `prompts`, or `completion_ids`) is in list style, the style of TRL. It
gets lists, always of one answer:

    completions      [the answer]: text, or a list with one message if the prompt was given as messages
    prompts          [the prompt]: text, or messages, as it was given
    completion_ids   [the token ids of the answer]
    <field>          [that field of the prompt's data]
    **fields         everything above

It returns a list with one number, or with None if it does not judge such a prompt.

Functions of both styles may be `async`.
"""

import asyncio
import hashlib
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from pathlib import Path
from typing import Any

import msgspec

from headrace.errors import ConfigError
from headrace.reference import describe
from headrace.scoring.base import Judgement, ScoreError, number

RewardFunction = Callable[..., Any]

LIST_STYLE = {"completions", "prompts", "completion_ids"}
"""The parameters by which a function in list style is known."""


class Question(msgspec.Struct, kw_only=True):
    """The question to a reward function: a prompt and an answer, as plain data."""

    completion: str
    messages: list[dict[str, str]]
    text: str | None = None
    data: dict[str, Any] = {}
    as_text: bool = False
    """Whether the prompt was given as text. Then the messages were made from it."""
    token_ids: list[int] = []
    """The token ids of the answer."""

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

    def columns(self) -> dict[str, list[Any]]:
        """Return everything that a reward function in list style may ask for, by name."""
        prompt, completion = self.fields()["prompt"], self.completion
        answer: Any = completion
        if self.text is None and not self.as_text:
            prompt, answer = self.messages, [{"role": "assistant", "content": completion}]
        columns = {name: [value] for name, value in self.data.items()}
        return {**columns, "prompts": [prompt], "completions": [answer], "completion_ids": [self.token_ids]}


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
    if not takes_all and not {"completion", *LIST_STYLE} & parameters.keys():
        raise ConfigError(
            f"{name} takes ({', '.join(parameters)}), but a reward function must take `completion` "
            "(or `completions`, in list style)"
        )


def in_list_style(function: RewardFunction) -> bool:
    """Return whether the function takes lists, and returns a list."""
    parameters = inspect.signature(function).parameters.keys()
    return bool(LIST_STYLE & parameters) and "completion" not in parameters


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
    available = question.columns() if in_list_style(function) else question.fields()
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
    return judgement(result) if not in_list_style(function) else _judgement_of_one(result)


def _judgement_of_one(result: Any) -> Judgement:
    """Turn the result of a function in list style, for one answer, into a judgement. Raises `ScoreError`."""
    if not isinstance(result, Iterable) or isinstance(result, str | dict):
        raise ScoreError(f"the reward function gave a {type(result).__name__}, not a list of numbers")
    try:
        numbers = list(result)
    except Exception as error:  # Such as of a generator, or of an array without dimensions.
        raise ScoreError(f"the reward function raised {describe(error)}") from error
    if len(numbers) != 1:
        raise ScoreError(f"the reward function gave {len(numbers)} numbers for 1 answer")
    [reward] = numbers
    return Judgement(reward=None if reward is None else number(reward, "the reward function gave"))


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
