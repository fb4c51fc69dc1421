"""The plain task of one question and one answer, and prompts from JSON lines.

Ids never change, and training and held-out prompts never overlap.

Every line is checked before anything starts. A bad line raises a `DataError` that names the file and the line.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from headrace.errors import DataError
from headrace.tasks.base import Environment, EnvironmentStep, Task, written_answer
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


def load_prompts(path: str | Path, *, system: str | None = None) -> list[Prompt]:
    """Load the prompts of a file, in its order: `prompts[i]` is line `i + 1`.

    A line is an object with `prompt` (text, or messages), optionally `id`, and any fields that the reward function
    needs. Without an `id`, a line's id is a hash of its content. A text becomes a user's message, after `system` if
    that is given.
    """
    path = Path(path)
    if not path.is_file():
        raise DataError(f"{path}: there is no such file")
    content = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    if not content.strip():
        raise DataError(f"{path} is empty")
    prompts: list[Prompt] = []
    lines: dict[str, int] = {}
    for number, line in enumerate(content.removesuffix(b"\n").split(b"\n"), start=1):
        where = f"{path}, line {number}"
        prompt = _prompt(line, where, system)
        if (first := lines.setdefault(prompt.id, number)) != number:
            raise DataError(f"{where}: the id {prompt.id!r} is already that of line {first}")
        prompts.append(prompt)
    return prompts


def split_heldout(
    prompts: Sequence[Prompt], count: int, origin: str = "the dataset"
) -> tuple[list[Prompt], list[Prompt]]:
    """Split prompts into (training, held-out), with exactly `count` held-out prompts, chosen by a hash of their ids.

    A prompt whose content occurs more than once is never held out, so the two sides cannot share a prompt.
    """
    copies = Counter(map(prompt_content, prompts))
    candidates = [prompt.id for prompt in prompts if copies[prompt_content(prompt)] == 1]
    if count and (len(candidates) < count or len(prompts) == count):
        raise DataError(
            f"{origin} has {len(prompts)} prompts, {len(candidates)} of them different from all others: "
            f"{count} cannot be held out"
        )
    chosen = set(sorted(candidates, key=lambda id: (_hash(b"heldout/" + id.encode()), id))[:count])
    train = [prompt for prompt in prompts if prompt.id not in chosen]
    heldout = [prompt for prompt in prompts if prompt.id in chosen]
    return train, heldout


def check_disjoint(
    train: Sequence[Prompt], heldout: Sequence[Prompt], train_path: str | Path, heldout_path: str | Path
) -> None:
    """Raise `DataError` if two files, loaded by `load_prompts`, share an id or a prompt."""
    ids = {prompt.id: line for line, prompt in enumerate(train, start=1)}
    contents = {prompt_content(prompt): line for line, prompt in enumerate(train, start=1)}
    for line, prompt in enumerate(heldout, start=1):
        if (seen := contents.get(prompt_content(prompt))) is not None:
            raise DataError(f"{heldout_path}, line {line}: this prompt is also trained on ({train_path}, line {seen})")
        if (seen := ids.get(prompt.id)) is not None:
            raise DataError(f"{heldout_path}, line {line}: the id {prompt.id!r} is also in {train_path}, line {seen}")


def prompt_content(prompt: Prompt) -> str:
    """Return a key of what the policy is shown. Two prompts have the same key exactly if they ask the same."""
    return _hash(msgspec.json.encode([prompt.messages, prompt.text]))


def _prompt(line: bytes, where: str, system: str | None) -> Prompt:
    if not line.strip():
        raise DataError(f"{where}: the line is empty")
    try:
        record = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"{where} is not JSON: {error}") from error
    if not isinstance(record, dict):
        raise DataError(f'{where} must be an object with a "prompt", not {_kind(record)}')
    if "prompt" not in record:
        raise DataError(f'{where} has no "prompt" (it has: {", ".join(record) or "nothing"})')
    data = {key: value for key, value in record.items() if key not in ("prompt", "id")}
    id = record.get("id")
    if id is None:
        id = _hash(msgspec.json.encode({"prompt": record["prompt"], "data": data}, order="deterministic"))
    if isinstance(id, bool) or not isinstance(id, str | int) or id == "":
        raise DataError(f'{where}: "id" must be text or a whole number, not {_kind(id)}')
    messages = _messages(record["prompt"], where, system)
    return Prompt(id=str(id), messages=messages, data=data, as_text=isinstance(record["prompt"], str))


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
    return names[type(value)]
