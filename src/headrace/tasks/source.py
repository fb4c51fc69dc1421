"""An endless, seeded, resumable order of prompts.

The order is a pure function of (seed, number of prompts): the n-th draw is the same in every run, on every machine and
after every restart, and each epoch has every prompt once. Only the permutation of one epoch is in memory.

With a curriculum, prompts that rest are skipped in this order, and prompts to retry are inserted. The state of the
curriculum depends on the outcomes of earlier attempts alone, so it can be rebuilt from a journal. Time is counted in
group attempts, whose ids are the same after a restart.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import overload

import numpy as np
import numpy.typing as npt

from headrace.errors import DataError
from headrace.types import Prompt, splitmix64

LONGEST_REST = 8
"""The longest rest of a prompt, in epochs."""
RETRIES = 2
RETRY_EVERY = 4
"""At most one draw in `RETRY_EVERY` is a retry, so that prompts that nobody can solve do not crowd out the others."""


class NumberedPrompts(Sequence[Prompt]):
    """A sequence that is defined by its length and by the prompt at each position."""

    @abstractmethod
    def at(self, index: int) -> Prompt:
        """Return the prompt at this position, which is not negative."""

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...
    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        if isinstance(index, slice):
            return [self.at(i) for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return self.at(index % len(self))


class Curriculum:
    """The state of the prompts that were tried, which says which prompts are worth drawing.

    A prompt that every answer solved rests after its epoch: for 1 epoch, then for 2, 4 and 8, each time that it is
    solved again. A prompt that no answer solved is drawn again between two others, at most `RETRIES` times in a row.
    Every prompt is drawn again at some time.
    """

    def __init__(self, prompts: int) -> None:
        self._epoch = prompts
        self._solved: dict[str, tuple[int, int]] = {}
        """How often in a row each solved prompt was solved, and the attempt from which on it is drawn again, by prompt
        id."""
        self._tried: dict[str, int] = {}
        """How often in a row no answer solved a prompt, by prompt id."""
        self._retries: dict[str, None] = {}
        """The prompts to draw again, oldest first."""

    def note(self, prompt_id: str, right: int, answers: int, at: int) -> None:
        """Record that in attempt `at`, `right` of the `answers` answers to a prompt were right."""
        self._retries.pop(prompt_id, None)
        if right == answers:
            times = self._solved.get(prompt_id, (0, 0))[0] + 1
            self._solved[prompt_id] = (times, at + self._epoch * (1 + min(2 ** (times - 1), LONGEST_REST)))
        else:
            self._solved.pop(prompt_id, None)
        failures = self._tried.pop(prompt_id, 0) + 1
        if right == 0 and failures <= RETRIES:
            self._tried[prompt_id] = failures
            self._retries[prompt_id] = None

    def rests(self, prompt_id: str, at: int) -> bool:
        """Return whether a prompt is skipped in attempt `at`."""
        return at < self._solved.get(prompt_id, (0, 0))[1]

    def retry(self, at: int) -> str | None:
        """Return the prompt to draw again in attempt `at`; None if no retry is due."""
        if not self._retries or at % RETRY_EVERY:
            return None
        prompt_id = next(iter(self._retries))
        del self._retries[prompt_id]
        return prompt_id


Position = int | dict[str, int]
"""The position of a source, which a journal can hold. A source of several tasks has a position in each of them."""


class Source(ABC):
    """A source that draws the prompts of a run."""

    position: Position
    """The position in the order. Set it to another source's position to continue from there."""

    @abstractmethod
    def leave_out(self, prompt_id: str) -> None:
        """Draw this prompt no more, because it cannot be answered. Raises `DataError` if no prompt is left."""

    @abstractmethod
    def draw(self, at: int = 0) -> Prompt:
        """Return the next prompt, for the group attempt `at`. Only a curriculum uses `at`."""

    @abstractmethod
    def outcome(self, at: int, prompt_id: str, rewards: Sequence[float]) -> None:
        """Record the rewards of the answers to this prompt in the group attempt `at`."""

    @abstractmethod
    def restore(self, outcomes: Iterable[tuple[int, str, int, int]]) -> None:
        """Take over earlier outcomes, oldest first: (group attempt, prompt id, right answers, number of answers)."""


class PromptSource(Source):
    """A source that draws prompts, each epoch in a new order. With a curriculum, some are skipped or drawn again."""

    def __init__(self, prompts: Sequence[Prompt], seed: int, *, curriculum: bool = False, share: float = 1.0) -> None:
        """`share` is the share of these prompts among all draws of the run. It says how long an epoch takes."""
        if not len(prompts):
            raise DataError("the task has no training prompts")
        self._prompts = prompts
        self._seed = seed
        self.position: int = 0
        """The position in the order, over all epochs. Set it to another source's position to continue from there."""
        self._epoch = -1
        self._left_out: set[str] = set()
        self._order: npt.NDArray[np.int64] = np.empty(0, np.int64)
        self._curriculum = Curriculum(round(len(prompts) / share)) if curriculum else None
        self._by_id = {prompt.id: prompt for prompt in prompts} if curriculum else {}

    def leave_out(self, prompt_id: str) -> None:
        """Draw this prompt no more, because it cannot be answered. Raises `DataError` if no prompt is left.

        The prompt keeps its place in the order, so all other prompts are drawn where they would be.
        """
        self._left_out.add(prompt_id)
        if len(self._left_out) >= len(self._prompts):
            raise DataError("every training prompt is too long to be answered ([engine] max_length)")

    def draw(self, at: int = 0) -> Prompt:
        """Return the next prompt, for the group attempt `at`. Only a curriculum uses `at`."""
        if self._curriculum is None:
            return self._next_in_order()
        again = self._curriculum.retry(at)
        if again in self._by_id:
            return self._by_id[again]
        for _ in range(len(self._prompts)):
            prompt = self._next_in_order()
            if not self._curriculum.rests(prompt.id, at):
                return prompt
        return self._next_in_order()  # all of them rest

    def outcome(self, at: int, prompt_id: str, rewards: Sequence[float]) -> None:
        """Record the rewards of the answers to this prompt in the group attempt `at`."""
        if rewards:
            self.restore([(at, prompt_id, sum(reward >= 1.0 for reward in rewards), len(rewards))])

    def restore(self, outcomes: Iterable[tuple[int, str, int, int]]) -> None:
        """Take over earlier outcomes, oldest first: (group attempt, prompt id, right answers, number of answers)."""
        if self._curriculum is not None:
            for at, prompt_id, right, answers in outcomes:
                self._curriculum.note(prompt_id, right, answers, at)

    def _next_in_order(self) -> Prompt:
        while True:
            epoch, offset = divmod(self.position, len(self._prompts))
            if epoch != self._epoch:
                self._order = permutation(self._seed, epoch, len(self._prompts))
                self._epoch = epoch
            self.position += 1
            prompt = self._prompts[int(self._order[offset])]
            if prompt.id not in self._left_out:
                return prompt


def permutation(seed: int, epoch: int, size: int) -> npt.NDArray[np.int64]:
    """Return the order of one epoch. It sorts keyed hashes, so that it depends on no library's random stream."""
    key = splitmix64(np.asarray([seed % 2**64], np.uint64))
    key = splitmix64(key ^ np.asarray([epoch % 2**64], np.uint64))
    # Two sort keys are never equal, because the hash is a bijection.
    return np.argsort(splitmix64(np.arange(size, dtype=np.uint64) ^ key), kind="stable")
