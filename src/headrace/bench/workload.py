"""Work that is the same in every run: a random Llama model, prompts of one length, and answers that never end early."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

from headrace.bench.lengths import make_lengths
from headrace.tasks.base import EnvironmentStep
from headrace.types import Prompt

DRAWN = 1 << 16
"""The number of lengths that are drawn. After that, they are used again from the first."""
ALPHABET = "abcdefghijklmnopqrstuvwxyz "
SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 256,
}


def write_model(directory: Path) -> None:
    """Write a model directory with a tokenizer of single characters.

    There is no end token, so every answer has its full length.
    """
    directory.mkdir(parents=True)
    write_tokenizer(directory)
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 4096, **SHAPE}
    config |= {"bos_token_id": None, "eos_token_id": None, "tie_word_embeddings": True, "initializer_range": 0.05}
    (directory / "config.json").write_text(json.dumps(config))


def write_tokenizer(directory: Path) -> None:
    """Write a tokenizer of single characters, without an end token."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate([*ALPHABET, "?"])}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text("{}")


class LengthsTask:
    """A task with prompts of `length` characters and random rewards.

    Answers get the lengths of `lengths`, in the order in which their episodes begin.
    """

    def __init__(self, length: int, lengths: str, seed: int, heldout: int) -> None:
        draw = self._draw = random.Random(seed)
        self.train = [Prompt(id=str(number), text="".join(draw.choices(ALPHABET, k=length))) for number in range(4096)]
        self.heldout: list[Prompt] = []
        self._lengths = itertools.cycle(make_lengths(lengths, DRAWN, seed).tolist())

    def episode(self, prompt: Prompt) -> LengthsEpisode:
        """Return an episode whose answer has the next length."""
        return LengthsEpisode(next(self._lengths), float(self._draw.random() < 0.5))

    def demonstration(self, prompt: Prompt) -> str | None:
        """Return None, because there is no right answer."""
        return None

    async def close(self) -> None:
        """Do nothing, because nothing is held."""


class FixedTask:
    """A task with prompts of `length` characters. The reward, 0 or 1, is a hash of the answer."""

    def __init__(self, length: int, seed: int, heldout: int) -> None:
        draw = random.Random(seed)
        self.train = [Prompt(id=str(number), text="".join(draw.choices(ALPHABET, k=length))) for number in range(4096)]
        self.heldout: list[Prompt] = []

    def episode(self, prompt: Prompt) -> FixedEpisode:
        """Return an episode of one turn."""
        return FixedEpisode()

    def demonstration(self, prompt: Prompt) -> str | None:
        """Return None, because there is no right answer."""
        return None

    async def close(self) -> None:
        """Do nothing, because nothing is held."""


class FixedEpisode:
    """An episode of one turn, with a reward that is a hash of the answer."""

    async def reset(self) -> list[dict[str, str]]:
        """Return no messages, so that the text of the prompt is used as it is."""
        return []

    async def step(self, completion: str) -> EnvironmentStep:
        """End the episode."""
        return EnvironmentStep(done=True, reward=float(sum(completion.encode()) % 2))

    async def close(self) -> None:
        """Do nothing, because nothing is held."""


class LengthsEpisode(FixedEpisode):
    """An episode of one turn with an answer of a given length, and a reward that is given in advance."""

    def __init__(self, length: int, coin: float) -> None:
        self.max_tokens = length
        self._coin = coin

    async def step(self, completion: str) -> EnvironmentStep:
        """End the episode. The reward does not depend on the answer."""
        return EnvironmentStep(done=True, reward=self._coin)


def loop_config(
    directory: Path,
    name: str,
    *,
    prompt: int,
    answer: int,
    versions: int,
    depth: int,
    threads: int,
    keep_rollouts: bool = False,
) -> Any:
    """Return the configuration of one measured run."""
    from headrace.config import make_config

    return make_config(
        {
            "run": {"name": name, "directory": str(directory), "versions": versions},
            "model": {"path": str(directory / "model"), "weights": "random"},
            "task": {
                "kind": "environment",
                "factory": "headrace.bench.workload:FixedTask",
                "config": {"length": prompt},
            },
            "engine": {"slots": 8, "max_length": prompt + answer + 16, "threads": threads, "kv": "keep"},
            "rollouts": {"group_size": 8, "max_tokens": answer},
            "buffer": {"groups": 4, "depth": depth},
            "training": {"threads": threads, "share_prefixes": False, "learning_rate": 1e-5},
            "observe": {"display": "none", "keep_rollouts": keep_rollouts},
        }
    )
