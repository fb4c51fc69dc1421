"""Work that is the same in every run: a random Llama model, prompts of one length, and answers that never end early.

The lengths of answers are fixed in advance, so that every run does the same work, whatever its weights are.
"""

from __future__ import annotations

import itertools
import json
import math
import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.bench.options import parse_lengths
from headrace.buffer.reader import open_readonly
from headrace.config import Config, make_config
from headrace.observe.progress import NoProgress
from headrace.pipeline.launch import start_run
from headrace.pipeline.run_session import RunSession
from headrace.tasks.base import EnvironmentStep
from headrace.tasks.dataset import SingleTurn, SingleTurnTask
from headrace.types import Prompt

SPREAD = 0.8
"""The sigma of the lognormal distribution of answer lengths."""
MEDIAN, SIGMA, LONG_SHARE, LONG_FACTOR = 4.0, 0.8, 0.1, 10
"""The lengths of the long-tail study: lognormal, and one answer in ten is ten times longer."""
DRAWN = 1 << 16
"""The number of lengths that are drawn. After that, they are used again from the first."""
WARM_VERSIONS = 2
"""The number of first versions that are not counted, because kernels are loaded and graphs captured in them."""
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


def make_lengths(text: str, count: int, seed: int) -> npt.NDArray[np.int64]:
    """Return the lengths of `count` answers. `text` is `equal:N`, `lognormal:MEAN:CUT` or `long-tail:CUT`."""
    if text.startswith("long-tail:"):
        return _long_tail(count, int(text.partition(":")[2]), seed)
    kind, mean, cut = parse_lengths(text)
    return np.full(count, mean) if kind == "equal" else draw_lengths(count, mean, cut, seed)


def longest_of(text: str) -> int:
    """Return the largest length that `make_lengths` can give for this text."""
    return int(text.rpartition(":")[2])


def draw_lengths(count: int, mean: float, cut: int, seed: int) -> npt.NDArray[np.int64]:
    """Draw answer lengths from a lognormal distribution with this mean, each then limited to 1 to `cut`."""
    draw = np.random.default_rng([seed, 1])
    # The mean of exp(N(mu, sigma)) is exp(mu + sigma^2 / 2).
    drawn = draw.lognormal(math.log(mean) - SPREAD**2 / 2, SPREAD, count)
    return np.clip(np.rint(drawn), 1, cut).astype(np.int64)


def _long_tail(count: int, cut: int, seed: int) -> npt.NDArray[np.int64]:
    draw = np.random.default_rng(seed)
    factors = np.where(draw.random(count) < LONG_SHARE, LONG_FACTOR, 1)
    drawn = factors * MEDIAN * np.exp(SIGMA * draw.standard_normal(count))
    return np.clip(drawn.round(), 1, cut).astype(np.int64)


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


class LengthsTask(SingleTurnTask):
    """A task with prompts of `length` characters and random rewards.

    Answers get the lengths of `lengths`, in the order in which their episodes begin.
    """

    def __init__(self, length: int, lengths: str, seed: int, heldout: int) -> None:
        draw = self._draw = random.Random(seed)
        texts = ["".join(draw.choices(ALPHABET, k=length)) for _ in range(4096)]
        super().__init__([Prompt(id=str(number), text=text) for number, text in enumerate(texts)], heldout=[])
        self._lengths = itertools.cycle(make_lengths(lengths, DRAWN, seed).tolist())

    def episode(self, prompt: Prompt) -> LengthsEpisode:
        """Return an episode whose answer has the next length."""
        return LengthsEpisode(prompt, next(self._lengths), float(self._draw.random() < 0.5))


class LengthsEpisode(SingleTurn):
    """An episode of one turn with an answer of a given length, and a reward that is given in advance."""

    def __init__(self, prompt: Prompt, length: int, coin: float) -> None:
        super().__init__(prompt)
        self.max_tokens = length
        self._coin = coin

    async def step(self, completion: str) -> EnvironmentStep:
        """End the episode. The reward does not depend on the answer."""
        return EnvironmentStep(done=True, reward=self._coin)


def run_config(
    directory: Path,
    name: str,
    *,
    versions: int,
    depth: int,
    prompt: int,
    lengths: str,
    groups: int,
    group_size: int,
    **changes: dict[str, Any],
) -> Config:
    """Return the configuration of one measured run. `changes` are keys of its sections."""
    longest = longest_of(lengths)
    sections: dict[str, dict[str, Any]] = {
        "run": {"name": name, "directory": str(directory), "versions": versions},
        "model": {"path": str(directory / "model"), "weights": "random"},
        "task": {
            "kind": "environment",
            "factory": "headrace.bench.workload:LengthsTask",
            "config": {"length": prompt, "lengths": lengths},
        },
        "engine": {"max_length": prompt + longest + 16, "kv": "keep"},
        "rollouts": {"group_size": group_size, "max_tokens": longest},
        "buffer": {"groups": groups, "depth": depth},
        "training": {"learning_rate": 1e-6},
        "observe": {"display": "none", "keep_rollouts": False},
    }
    return make_config({key: sections.get(key, {}) | changes.get(key, {}) for key in sections | changes})


def tiny_config(directory: Path, name: str, *, prompt: int, answer: int, threads: int, **given: Any) -> Config:
    """Return the configuration of a run of the random Llama with equal answers. `given` is passed to `run_config`."""
    return run_config(
        directory,
        name,
        prompt=prompt,
        lengths=f"equal:{answer}",
        groups=4,
        group_size=8,
        engine={"slots": 8, "threads": threads},
        training={"threads": threads, "share_prefixes": False, "learning_rate": 1e-5},
        **given,
    )


def measure_run(config: Config, depth: int, warm: int) -> tuple[dict[str, Any], RunSession]:
    """Make a run. Return its steady rate, the idle shares of both sides and the lag of its tokens, and how it ended."""
    outcome = start_run(config, NoProgress())
    with open_readonly(outcome.run_dir.journal) as journal:
        steps = [msgspec.structs.asdict(step) for step in journal.steps()]
    names = ("trainer_idle_fraction", "engine_idle_fraction", "lag_mean", "lag_max")
    return steady_rate(steps, depth, warm) | {name: outcome.summary[name] for name in names}, outcome


def steady_rate(steps: list[dict[str, Any]], depth: int, warm: int) -> dict[str, float]:
    """Return the consumed tokens per second, without the first `warm` and the last `depth` versions.

    The last `depth` versions are trained while nothing is generated any more, so their rate is too high. The rate of as
    many first versions may be too high as well: they are generated while the trainer still starts.
    """
    counted = steps[warm : len(steps) - depth]
    seconds = counted[-1]["ended"] - steps[warm - 1]["ended"]
    tokens = sum(step["trained_tokens"] for step in counted)
    training_seconds = sum(step["seconds"] for step in counted)
    return {
        "tokens_per_second": tokens / seconds,
        "seconds": seconds,
        "tokens": tokens,
        "versions": len(counted),
        "training_seconds": training_seconds,
        "training_tokens_per_second": tokens / training_seconds,
    }
