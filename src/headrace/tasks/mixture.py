"""Several tasks as one: prompts are drawn from each task in proportion to its weight.

The id of a prompt begins with the name of its task, so prompts of different tasks never have the same id. Which task
the n-th draw takes depends on the seed, on n and on the weights alone, so a resumed run continues exactly, and other
weights count from the next draw on. Each task has an order, epochs and a curriculum of its own.
"""

import asyncio
import bisect
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, chain, zip_longest
from typing import Any

import msgspec
import numpy as np

from headrace.errors import DataError
from headrace.tasks.base import Environment, Task
from headrace.tasks.source import NumberedPrompts, Position, PromptSource, Source
from headrace.types import Prompt, splitmix64

_STRIDE = 0x9E3779B97F4A7C15
"""2^64 divided by the golden ratio. The multiples of this number, modulo 2^64, are spread more evenly than at random,
so every stretch of draws is close to the weights."""
DRAWS = ""
"""The name under which a position has the number of draws. No task has this name."""


class Mixture(Task):
    """A task of several tasks, by their names."""

    def __init__(self, tasks: Mapping[str, Task], weights: Mapping[str, float]) -> None:
        """`weights` are the shares of the tasks, relative to each other."""
        self.tasks = dict(tasks)
        self.weights = {name: weights[name] for name in tasks}
        self.prompts = {name: NamedPrompts(name, task.train) for name, task in tasks.items()}
        """The training prompts of each task."""
        for name, prompts in self.prompts.items():
            if not len(prompts):
                raise DataError(f"[tasks.{name}]: the task has no training prompts")
        self.train = ChainedPrompts(list(self.prompts.values()))
        # The tasks take turns, so that the first prompts, which are evaluated during training, are of all tasks.
        turns = zip_longest(*(NamedPrompts(name, task.heldout) for name, task in tasks.items()))
        self.heldout = [prompt for prompt in chain.from_iterable(turns) if prompt is not None]

    def episode(self, prompt: Prompt) -> Environment:
        """Make a fresh environment of the prompt's own task."""
        return self.tasks[prompt.task].episode(_own(prompt))

    def demonstration(self, prompt: Prompt) -> str | None:
        """Return the right answer that the prompt's own task has."""
        return self.tasks[prompt.task].demonstration(_own(prompt))

    async def close(self) -> None:
        """Close all tasks."""
        await asyncio.gather(*(task.close() for task in self.tasks.values()))


def _own(prompt: Prompt) -> Prompt:
    """Return a prompt as its own task knows it."""
    return msgspec.structs.replace(prompt, id=prompt.id.removeprefix(f"{prompt.task}/"), task="")


class NamedPrompts(NumberedPrompts):
    """The prompts of one task, with its name in them."""

    def __init__(self, name: str, prompts: Sequence[Prompt]) -> None:
        self._name, self._prompts = name, prompts

    def __len__(self) -> int:
        return len(self._prompts)

    def at(self, index: int) -> Prompt:
        """Return the prompt at this position."""
        prompt = self._prompts[index]
        return msgspec.structs.replace(prompt, id=f"{self._name}/{prompt.id}", task=self._name)


class ChainedPrompts(NumberedPrompts):
    """The prompts of several sequences, one sequence after the other."""

    def __init__(self, parts: Sequence[Sequence[Prompt]]) -> None:
        self._parts = parts
        self._ends = list(accumulate(len(part) for part in parts))

    def __len__(self) -> int:
        return self._ends[-1]

    def at(self, index: int) -> Prompt:
        """Return the prompt at this position."""
        part = bisect.bisect_right(self._ends, index)
        return self._parts[part][index - (self._ends[part] - len(self._parts[part]))]


def make_source(task: Task, seed: int, *, curriculum: bool = False) -> Source:
    """Make the source that draws the prompts of a task."""
    if isinstance(task, Mixture):
        return MixedSource(task, seed, curriculum=curriculum)
    return PromptSource(task.train, seed, curriculum=curriculum)


class MixedSource(Source):
    """A source that draws prompts from several tasks, in proportion to their weights."""

    def __init__(self, mixture: Mixture, seed: int, *, curriculum: bool = False) -> None:
        self._names = list(mixture.tasks)
        total = sum(mixture.weights.values())
        shares = {name: weight / total for name, weight in mixture.weights.items()}
        self._ends = [round(end * 2**64) for end in accumulate(shares.values())][:-1]
        """Where the share of each task ends among 2^64 numbers; the last one ends where the numbers end."""
        self._sources = {
            # Tasks of equal size would otherwise have the same order.
            name: PromptSource(
                prompts, _mixed(seed, int.from_bytes(name.encode(), "big")), curriculum=curriculum, share=shares[name]
            )
            for name, prompts in mixture.prompts.items()
        }
        self._start = _mixed(seed, 0)
        self._draws = 0

    @property
    def position(self) -> Position:
        """The position in the order of each task, and the number of draws."""
        return {DRAWS: self._draws, **{name: source.position for name, source in self._sources.items()}}

    @position.setter
    def position(self, position: Position) -> None:
        if isinstance(position, int):  # Only the number of draws is known.
            self._draws, drawn = position, [self.task_of(draw) for draw in range(position)]
            position = {name: drawn.count(name) for name in self._names}
        self._draws = position.get(DRAWS, self._draws)
        for name, source in self._sources.items():
            source.position = position.get(name, 0)

    def task_of(self, draw: int) -> str:
        """Return the name of the task that a draw takes its prompt from. Draws are counted from 0."""
        return self._names[bisect.bisect_right(self._ends, (self._start + draw * _STRIDE) % 2**64)]

    def draw(self, at: int = 0) -> Prompt:
        """Return the next prompt, for the group attempt `at`. Only a curriculum uses `at`."""
        name = self.task_of(self._draws)
        self._draws += 1
        return self._sources[name].draw(at)

    def leave_out(self, prompt_id: str) -> None:
        """Draw this prompt no more. Raises `DataError` if no prompt of its task is left."""
        name = _task_of_id(prompt_id)
        try:
            self._sources[name].leave_out(prompt_id)
        except DataError as error:
            raise DataError(f"[tasks.{name}]: {error}") from error

    def outcome(self, at: int, prompt_id: str, rewards: Sequence[float]) -> None:
        """Record the rewards of the answers to this prompt in the group attempt `at`."""
        self._sources[_task_of_id(prompt_id)].outcome(at, prompt_id, rewards)

    def restore(self, outcomes: Iterable[tuple[int, str, int, int]]) -> None:
        """Take over earlier outcomes, oldest first: (group attempt, prompt id, right answers, number of answers)."""
        for outcome in outcomes:
            if (source := self._sources.get(_task_of_id(outcome[1]))) is not None:
                source.restore([outcome])


def _task_of_id(prompt_id: str) -> str:
    return prompt_id.partition("/")[0]


def _mixed(seed: int, number: int) -> int:
    """Return 64 bits that depend on both numbers."""
    words: Any = splitmix64(np.asarray([seed % 2**64], np.uint64))
    for shift in range(0, max(1, number.bit_length()), 64):
        words = splitmix64(words ^ np.asarray([(number >> shift) % 2**64], np.uint64))
    return int(words[0])
