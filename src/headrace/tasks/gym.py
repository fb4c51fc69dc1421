"""Any reasoning-gym dataset as a task. The dataset's own verifier is the reward function (`verifier`).

Held-out questions come from another seed and are fixed first. A training question that equals a held-out one is
replaced by the next that does not, so the two sets never overlap. Training questions are generated only when they are
drawn.
"""

import dataclasses
import difflib
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from headrace.errors import ConfigError
from headrace.tasks.dataset import SingleTurnTask
from headrace.tasks.source import NumberedPrompts
from headrace.types import Prompt

VERIFIER = "headrace.tasks.gym:verifier"
"""The reference that reward workers are started with. It is called with the arguments of `verifier`."""

_HELDOUT_SEED_OFFSET = 10**9
"""The distance to the held-out seed. It is large because these datasets derive item i from `seed + i`."""


class GymTask(SingleTurnTask):
    """A task of `size` training questions of a dataset, and `heldout` different ones."""

    def __init__(
        self,
        name: str,
        *,
        config: dict[str, Any] | None = None,
        seed: int = 0,
        size: int = 10_000,
        heldout: int = 0,
        system: str | None = None,
        suffix: str = "",
        answer_pattern: str | None = None,
    ) -> None:
        """`suffix` follows every question; `answer_pattern` finds the answer in a completion (see `extract_answer`)."""
        self._pattern = compile_pattern(answer_pattern)
        config = config or {}
        make = partial(_prompt, system=system, suffix=suffix)
        chosen: list[dict[str, Any]] = []
        if heldout:
            held_seed = (seed + _HELDOUT_SEED_OFFSET) % 2**32
            # Some questions come twice, so more are generated than are needed.
            source = create_dataset(name, {**config, "seed": held_seed, "size": 4 * heldout + 16})
            chosen = _distinct(name, source, heldout)
        data = create_dataset(name, {**config, "seed": seed, "size": size})
        super().__init__(
            GymPrompts(data, f"{name}/{seed}", make, avoid=frozenset(entry["question"] for entry in chosen)),
            [make(f"{name}/{seed}/heldout/{i}", entry) for i, entry in enumerate(chosen)],
        )

    def demonstration(self, prompt: Prompt) -> str | None:
        """Return the dataset's own answer; None if it has none, or if `answer_pattern` would find another one."""
        answer = prompt.data["entry"]["answer"]
        if not isinstance(answer, str) or extract_answer(self._pattern, answer) != answer:
            return None
        return answer


class GymPrompts(NumberedPrompts):
    """The training prompts of a dataset, which are generated when they are asked for."""

    def __init__(
        self, dataset: Any, origin: str, make: Callable[[str, dict[str, Any]], Prompt], avoid: frozenset[str]
    ) -> None:
        self._dataset = dataset
        self._origin = origin
        self._make = make
        self._avoid = avoid

    def __len__(self) -> int:
        return len(self._dataset)

    def at(self, index: int) -> Prompt:
        """Return the question at this position or, if it is held out, the next one that is not."""
        size = len(self)
        for step in range(size):
            entry = self._dataset[(index + step) % size]
            if entry["question"] not in self._avoid:
                return self._make(f"{self._origin}/{index}", entry)
        raise ConfigError(f"[task] name: every question of {self._origin} is held out; there are too few of them")


def _prompt(id: str, entry: dict[str, Any], *, system: str | None, suffix: str) -> Prompt:
    opening = [] if system is None else [{"role": "system", "content": system}]
    question = {"role": "user", "content": entry["question"] + suffix}
    return Prompt(id=id, messages=[*opening, question], data={"entry": pack(entry)})


def verifier(name: str, config: dict[str, Any], answer_pattern: str | None) -> Callable[..., dict[str, float]]:
    """Make the reward function of a dataset. Each reward worker calls this once."""
    dataset = create_dataset(name, {**config, "seed": 0, "size": 1})
    pattern = compile_pattern(answer_pattern)

    def verify(completion: str, entry: dict[str, Any]) -> dict[str, float]:
        answer = extract_answer(pattern, completion)
        if answer is None:
            return {"reward": 0.0, "answered": 0.0}
        return {"reward": float(dataset.score_answer(answer, unpack(entry))), "answered": 1.0}

    return verify


def create_dataset(name: str, config: dict[str, Any]) -> Any:
    """Make a reasoning-gym dataset. A mistake in its name or configuration raises a one-line `ConfigError`."""
    try:
        from reasoning_gym.factory import DATASETS
        from reasoning_gym.factory import create_dataset as create
    except ModuleNotFoundError as error:
        raise ConfigError(
            f'[task] kind = "gym" needs reasoning-gym: pip install "headrace[tasks]" ({error.name} is missing)'
        ) from error
    if name not in DATASETS:
        close = difflib.get_close_matches(name, DATASETS, n=3)
        hint = f"; did you mean {', '.join(close)}?" if close else ""
        raise ConfigError(f"[task] name: reasoning-gym has no dataset {name!r}{hint}")
    keys = [field.name for field in dataclasses.fields(DATASETS[name][1]) if field.init]
    if unknown := [key for key in config if key not in keys]:
        allowed = ", ".join(key for key in keys if key not in ("seed", "size"))
        raise ConfigError(f"[task] config: {name} has no key {unknown[0]!r}; it takes {allowed}")
    try:
        return create(name, **config)
    except (AssertionError, ValueError, TypeError, KeyError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"[task] config: reasoning-gym refuses it for {name}: {first}") from error


def compile_pattern(pattern: str | None) -> re.Pattern[str] | None:
    """Compile the configured `answer_pattern`. Dots match line breaks."""
    if pattern is None:
        return None
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ConfigError(f"[task] answer_pattern: {pattern!r} is not a regular expression: {error}") from error


def extract_answer(pattern: re.Pattern[str] | None, completion: str) -> str | None:
    """Return the first group (or the whole) of the pattern's *last* match, since a policy may change its mind.

    Without a pattern the whole completion is the answer. Return None if the pattern does not match.
    """
    if pattern is None:
        return completion.strip()
    matches = list(pattern.finditer(completion))
    if not matches:
        return None
    found = matches[-1].group(1) if pattern.groups else matches[-1].group()
    return None if found is None else found.strip()


def pack(value: Any) -> Any:
    """Turn an entry into JSON values, from which `unpack` restores it exactly.

    Verifiers distinguish tuples from lists, and messages cannot carry integers of more than 64 bits.
    """
    if isinstance(value, tuple | set | frozenset):
        items = sorted(value, key=repr) if isinstance(value, set | frozenset) else value
        return {"$": type(value).__name__, "items": [pack(item) for item in items]}
    if isinstance(value, list):
        return [pack(item) for item in value]
    if isinstance(value, dict):
        if "$" not in value and all(isinstance(key, str) for key in value):
            return {key: pack(item) for key, item in value.items()}
        return {"$": "dict", "items": [[pack(key), pack(item)] for key, item in value.items()]}
    if isinstance(value, int) and value.bit_length() > 63:
        return {"$": "int", "items": str(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if hasattr(value, "item"):  # a numpy scalar
        return pack(value.item())
    raise ConfigError(f"[task] name: an entry of the dataset holds a {type(value).__name__}, which cannot be stored")


def unpack(value: Any) -> Any:
    """Restore the value that `pack` was given."""
    if isinstance(value, list):
        return [unpack(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "$" not in value:
        return {key: unpack(item) for key, item in value.items()}
    if value["$"] == "int":
        return int(value["items"])
    makers: dict[str, Callable[[Any], Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset, "dict": dict}
    return makers[value["$"]](unpack(item) for item in value["items"])


def _distinct(name: str, dataset: Any, count: int) -> list[dict[str, Any]]:
    """Return `count` entries with different questions."""
    found: dict[str, dict[str, Any]] = {}
    for index in range(len(dataset)):
        entry = dataset[index]
        found.setdefault(entry["question"], entry)
        if len(found) == count:
            return list(found.values())
    raise ConfigError(
        f"[evaluate] prompts: {name} gave only {len(found)} different questions in {len(dataset)}, not {count}"
    )
