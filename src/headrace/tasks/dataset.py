"""The plain task of one question and one answer, and prompts from the rows of a file or dataset.

Ids never change, and training and held-out prompts never overlap.

Every row is checked before anything starts. A bad row raises a `DataError` that names the file and the row.
"""

from __future__ import annotations

import copy
import hashlib
import heapq
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.errors import DataError
from headrace.tasks.base import Environment, EnvironmentStep, Task, written_answer
from headrace.tasks.records import Table, read_file, renamed
from headrace.types import Prompt


class SingleTurnTask(Task):
    """A task whose prompts are each answered once. It gives no reward of its own; the run's scorers do."""

    def __init__(
        self,
        train: Sequence[Prompt],
        heldout: Sequence[Prompt],
        demonstration_field: str | None = None,
    ) -> None:
        """`demonstration_field` names the field of a prompt's `data` that holds a right answer."""
        self.train = train
        self.heldout = heldout
        self._demonstration_field = demonstration_field

    def episode(self, prompt: Prompt) -> SingleTurn:
        """Make a fresh environment for one rollout of this prompt."""
        return SingleTurn(prompt)

    def demonstration(self, prompt: Prompt) -> str | None:
        """Return the right answer in the prompt's data; None if it has none as text or as a number."""
        return written_answer(prompt, self._demonstration_field)


class SingleTurn(Environment):
    """An `Environment` of one turn, without a reward."""

    def __init__(self, prompt: Prompt) -> None:
        self._prompt = prompt

    async def reset(self) -> list[dict[str, str]]:
        """Return the prompt's messages. A prompt that is plain text has none, and is opened as it is."""
        return list(self._prompt.messages or [])

    async def step(self, completion: str) -> EnvironmentStep:
        """End the episode: the answer is its only turn."""
        return EnvironmentStep(done=True)


class PromptFormat(msgspec.Struct, frozen=True, kw_only=True):
    """How a row becomes a prompt."""

    system: str | None = None
    """A system message before a prompt that is given as text."""
    fields: Mapping[str, str] = {}
    """New name of a field -> its name in the row."""
    chat: bool = True
    """Whether a prompt that is text becomes a user's message. Otherwise it stays plain text."""


def load_prompts(path: str | Path, *, system: str | None = None) -> Prompts:
    """Load the prompts of a file, in its order. See `Prompts`."""
    return Prompts(read_file(Path(path)), PromptFormat(system=system))


class Prompts(Sequence[Prompt]):
    """The prompts of a table's rows, in their order, or of some of the rows.

    A row is an object with `prompt` (text, or messages), optionally `id`, and any fields that the reward function
    needs. Every row is checked here. Rows that are in memory become prompts at once, and their ids are their own `id`
    or a hash of their content. Rows that are not in memory become prompts each time they are asked for, and their ids
    are their numbers, which do not change because the dataset is pinned to a commit.
    """

    def __init__(self, table: Table, form: PromptFormat) -> None:
        self._table, self._form = table, form
        self._made: list[Prompt] | None = None if table.ids else [self._make(row) for row in range(len(table.rows))]
        self._rows: npt.NDArray[np.int64] = np.arange(len(table.rows))
        if self._made is not None:
            self._check_ids(self._made)
        self.keys = np.fromiter(map(_key, self), np.uint64, len(self))
        """A hash of what each prompt asks. Two prompts that ask the same have the same key."""

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...

    @overload
    def __getitem__(self, index: slice) -> Prompts: ...

    def __getitem__(self, index: int | slice) -> Prompt | Prompts:
        if isinstance(index, slice):
            return self.select(np.arange(len(self))[index])
        row = int(self._rows[index])
        return self._make(row) if self._made is None else self._made[row]

    def select(self, positions: npt.NDArray[np.int64]) -> Prompts:
        """Return the prompts at these positions. The rows are not read again."""
        chosen = copy.copy(self)
        chosen._rows, chosen.keys = self._rows[positions], self.keys[positions]
        return chosen

    @property
    def numbered(self) -> bool:
        """Whether the ids are the numbers of rows, so that a prompt is not needed for its id."""
        return self._made is None

    def id(self, position: int) -> str:
        """Return the id of the prompt at this position."""
        row = int(self._rows[position])
        return self._id(row) if self._made is None else self._made[row].id

    def where(self, position: int) -> str:
        """Return how a message names the prompt at this position."""
        return self._table.where(int(self._rows[position]))

    @property
    def origin(self) -> str:
        """The file or dataset that the prompts come from."""
        return self._table.origin

    def _make(self, row: int) -> Prompt:
        table = self._table
        return _prompt(table.rows[row], table.where(row), self._form, self._id(row) if table.ids else None)

    def _id(self, row: int) -> str:
        return f"{self._table.ids}{row}"

    def _check_ids(self, prompts: list[Prompt]) -> None:
        rows: dict[str, int] = {}
        for row, prompt in enumerate(prompts):
            if (first := rows.setdefault(prompt.id, row)) != row:
                table = self._table
                seen = f"{table.noun} {first + table.first}"
                raise DataError(f"{table.where(row)}: the id {prompt.id!r} is already that of {seen}")


def split_heldout(prompts: Prompts, count: int) -> tuple[Prompts, Prompts]:
    """Split prompts into (training, held-out), with exactly `count` held-out prompts, chosen by a hash of their ids.

    A prompt whose content occurs more than once is never held out, so the two sides cannot share a prompt.
    """
    _, back, copies = np.unique(prompts.keys, return_inverse=True, return_counts=True)
    candidates = np.flatnonzero(copies[back] == 1)
    if count and (len(candidates) < count or len(prompts) == count):
        raise DataError(
            f"{prompts.origin} has {len(prompts)} prompts, {len(candidates)} of them different from all others: "
            f"{count} cannot be held out"
        )
    ids = ((int(position), prompts.id(int(position))) for position in (candidates if count else ()))
    least = heapq.nsmallest(count, ((_hash(b"heldout/" + id.encode()), id, position) for position, id in ids))
    chosen = np.sort(np.array([position for *_, position in least], np.int64))
    return prompts.select(np.setdiff1d(np.arange(len(prompts)), chosen)), prompts.select(chosen)


def check_contents(train: Prompts, heldout: Prompts) -> None:
    """Raise `DataError` if a held-out prompt asks the same as a training prompt."""
    both = np.flatnonzero(np.isin(heldout.keys, train.keys))
    if len(both):
        seen = int(np.flatnonzero(train.keys == heldout.keys[both[0]])[0])
        where = f"{heldout.where(int(both[0]))}: this prompt is also trained on"
        raise DataError(f"{where} ({train.where(seen)})")


def check_disjoint(train: Prompts, heldout: Prompts) -> None:
    """Raise `DataError` if training and held-out prompts share an id or a prompt."""
    check_contents(train, heldout)
    held = {heldout.id(position): position for position in range(len(heldout))}
    for position in range(0 if train.numbered else len(train)):
        if (seen_at := held.get(id := train.id(position))) is not None:
            raise DataError(f"{heldout.where(seen_at)}: the id {id!r} is also in {train.where(position)}")


def prompt_content(prompt: Prompt) -> str:
    """Return a key of what the policy is shown. Two prompts have the same key exactly if they ask the same."""
    return _hash(msgspec.json.encode([prompt.messages, prompt.text]))


def _key(prompt: Prompt) -> int:
    return int(prompt_content(prompt)[:16], 16)


def _prompt(row: Any, where: str, form: PromptFormat, id: str | None) -> Prompt:
    """Make a prompt of a row. Without an `id` that is given, it is the row's own, or a hash of its content."""
    if not isinstance(row, dict):
        raise DataError(f'{where} must be an object with a "prompt", not {_kind(row)}')
    record = renamed(row, form.fields, where)
    if "prompt" not in record:
        names = ", ".join(record) or "nothing"
        raise DataError(
            f'{where} has no "prompt" (it has: {names}); name the field in [task] fields = {{prompt = "..."}}'
        )
    data = {key: value for key, value in record.items() if key not in ("prompt", "id")}
    if id is None:
        id = record.get("id")
        if id is None:
            id = _hash(msgspec.json.encode({"prompt": record["prompt"], "data": data}, order="deterministic"))
        if isinstance(id, bool) or not isinstance(id, str | int) or id == "":
            raise DataError(f'{where}: "id" must be text or a whole number, not {_kind(id)}')
    if form.chat:
        messages = _messages(record["prompt"], where, form.system)
        return Prompt(id=str(id), messages=messages, data=data, as_text=isinstance(record["prompt"], str))
    if not isinstance(record["prompt"], str) or not record["prompt"]:
        kind = _kind(record["prompt"])
        raise DataError(f'{where}: "prompt" must be text, because [task] format = "text", not {kind}')
    return Prompt(id=str(id), text=record["prompt"], data=data)


def _messages(value: Any, where: str, system: str | None) -> list[dict[str, str]]:
    if isinstance(value, str):
        if not value.strip():
            raise DataError(f'{where}: "prompt" is empty')
        opening = [] if system is None else [{"role": "system", "content": system}]
        return [*opening, {"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise DataError(f'{where}: "prompt" must be text or a list of messages, not {_kind(value)}')
    for number, message in enumerate(value, start=1):
        fields = message if isinstance(message, dict) else {}
        if not isinstance(fields.get("role"), str) or not isinstance(fields.get("content"), str):
            raise DataError(f'{where}: message {number} of "prompt" needs "role" and "content", both text')
        if odd := [key for key, field in fields.items() if not isinstance(field, str)]:
            raise DataError(f'{where}: {odd[0]!r} in message {number} of "prompt" must be text')
    if value[-1]["role"] == "assistant":
        raise DataError(f'{where}: the last message of "prompt" is the assistant\'s: nothing is left to say')
    return value


def _hash(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=12).hexdigest()


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if value in ("", []):
        return "empty"
    names = {bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list", dict: "an object"}
    return names.get(type(value), type(value).__name__)
