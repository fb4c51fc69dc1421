"""Random schedules over the real core and a tiny model: admit, abort, fork, swap, preempt, finish, in any order.

After every step no block is lost and every new token is of the version that was live; in the end every request has
ended once, and its tokens are those that plain Hugging Face code draws. `HEADRACE_SCHEDULES` says how many are tried.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from headrace.config.schema import EngineConfig
from headrace.engines.base import Delta, Request, Sampling
from headrace.engines.embedded.base import Runner
from headrace.engines.embedded.core import EngineCore
from headrace.engines.embedded.kv_cache import BlockPool
from headrace.engines.embedded.sequence import Sequence
from headrace.engines.embedded.setup import MakeRunner, make_host_runner
from headrace.engines.requests import fork_requests, uniforms
from headrace.models.attention import ATTENTION
from headrace.models.loading import named_weights

SCHEDULES = int(os.environ.get("HEADRACE_SCHEDULES", "300"))
AT_FIRST = 80
"""So many of them are tried by `make test`, the others by `make slow`."""
VOCABULARY = 16
MAX_LENGTH = 24

Weights = dict[str, torch.Tensor]


@dataclass
class Models:
    """The model that is served, and the same architecture in plain Hugging Face code."""

    served: Any
    plain: Any
    first: Weights = field(init=False)
    live: Weights = field(init=False)
    reference: Weights = field(init=False)

    def __post_init__(self) -> None:
        self.live, self.reference = named_weights(self.served), named_weights(self.plain)
        self.first = {name: weight.clone() for name, weight in self.live.items()}

    def install(self, weights: Weights) -> None:
        for name, weight in self.live.items():
            weight.copy_(weights[name])

    def logits(self, weights: Weights, rows: list[list[int]]) -> torch.Tensor:
        """[rows, T, V] of whole sequences, without a cache; what is padded at their ends they do not see."""
        padded = [row + [0] * (MAX_LENGTH - len(row)) for row in rows]
        with torch.no_grad():
            for name, weight in self.reference.items():
                weight.copy_(weights[name])
            logits: torch.Tensor = self.plain(torch.tensor(padded), use_cache=False).logits.double()
        return logits


@pytest.fixture(scope="module")
def models() -> Models:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        max_position_embeddings=MAX_LENGTH,
        initializer_range=0.7,
    )
    return Models(
        # A config of its own each: the choice of attention is written into it.
        LlamaForCausalLM._from_config(deepcopy(config), attn_implementation=ATTENTION).eval(),
        LlamaForCausalLM._from_config(deepcopy(config), attn_implementation="eager").eval(),
    )


@dataclass(eq=False)
class Watched:
    """A request, what it was answered, and what its answer must say."""

    request: Request
    sequence: Sequence
    born: int
    deltas: list[Delta] = field(default_factory=list)
    live: list[int] = field(default_factory=list)
    """The version that was live in the pass of each sampled token."""
    ended: int | None = None

    def answer(self, name: str) -> list[Any]:
        return [value for delta in self.deltas for value in getattr(delta, name).tolist()]


def gathering(gather: int) -> MakeRunner:
    """A runner for which prompts wait for each other, as on a GPU."""

    def make(model: Any, config: EngineConfig, max_length: int, staged: int) -> tuple[Runner, BlockPool]:
        runner, pool = make_host_runner(model, config, max_length, staged)
        runner.gather = gather
        return runner, pool

    return make


class Schedule:
    def __init__(self, models: Models, seed: int) -> None:
        self.models = models
        self.random = random.Random(seed)
        self.names = count()
        pick = self.random.choice
        self.config = EngineConfig(
            slots=pick([1, 2, 3, 5]),
            block_size=pick([1, 2, 3, 4]),
            cache_tokens=pick([12, 20, 36, 60]),
            prefill_chunk=pick([1, 3, 8, 40]),
            kv=pick(["keep", "recompute"]),
        )
        self.weights: dict[int, Weights] = {0: models.first}
        models.install(models.first)
        clock = count()
        self.core = EngineCore(
            models.served,
            self.config,
            name="core",
            max_length=MAX_LENGTH,
            version=0,
            clock=lambda: 0.1 * next(clock),
            make_runner=gathering(pick([0, 1, 2])),
        )
        self.watched: dict[str, Watched] = {}
        self.happened: Counter[str] = Counter()
        self.prompts = [[self.random.randrange(VOCABULARY) for _ in range(12)] for _ in range(2)]

    def run(self) -> None:
        self.admit()
        for _ in range(self.random.randrange(6, 26)):
            act = self.random.choices(
                [self.step, self.admit, self.fork, self.abort, self.swap], weights=[70, 14, 8, 4, 4]
            )[0]
            act()
            self.check()
        self.drain()
        self.core.close()

    def step(self) -> None:
        before = {w: w.sequence.sampled for w in self.open()}
        version, stats = self.core.version, self.core.counters()
        self.take(self.core.step())
        for watched, sampled in before.items():
            watched.live += [version] * (watched.sequence.sampled - sampled)
        new = sum(watched.sequence.sampled - sampled for watched, sampled in before.items())
        assert self.core.counters().generated_tokens == stats.generated_tokens + new
        self.happened["tokens"] += new
        self.happened["preempted"] += self.core.counters().preemptions - stats.preemptions

    def admit(self) -> None:
        prompt = self.random.choice(self.prompts)[: self.random.randrange(1, 13)]
        prompt = prompt + [self.random.randrange(VOCABULARY) for _ in range(self.random.choice([0, 0, 1, 3]))]
        group = self.random.choice(["", f"g{next(self.names)}"])
        self.submit([self.request(prompt, group) for _ in range(self.random.choice([1, 1, 2, 3]))])

    def request(self, prompt: list[int], group: str) -> Request:
        sampling = Sampling(
            max_tokens=self.random.randrange(1, 9),
            temperature=self.random.choice([0.0, 1.0, 0.6]),
            seed=self.random.randrange(1000),
            stop_token_ids=self.random.choice([(), (3,)]),
        )
        return Request(
            id=f"r{next(self.names)}",
            token_ids=np.array(prompt, np.int32),
            sampling=sampling,
            group=group,
            priority=self.random.choice([0, 0, 0, 1]),
        )

    def fork(self) -> None:
        candidates = [w for w in self.open() if w.sequence.sampled and w.request.id.count("/") < 2]
        if candidates:
            parent = self.random.choice(candidates)
            tokens = list(parent.sequence.tokens)
            at = self.random.choice([len(tokens), self.random.randrange(1, len(tokens) + 1)])
            forks = fork_requests(parent.request, tokens, at, self.random.choice([1, 2, 3]))
            new = [fork for fork in forks if fork.id not in self.watched]
            self.submit(new)
            self.happened["forked"] += len(new)

    def abort(self) -> None:
        if self.open():
            watched = self.random.choice(self.open())
            served = watched.request.id in self.core.sequences
            self.take(self.core.abort([watched.request.id]))
            assert (watched.ended is not None) == served, "only what was refused at once has its end yet to come"

    def swap(self) -> None:
        version = self.core.version + 1
        noise = torch.Generator().manual_seed(version)
        self.weights[version] = {
            name: weight + 0.3 * torch.randn(weight.shape, generator=noise)
            for name, weight in self.weights[version - 1].items()
        }
        self.models.install(self.weights[version])
        self.core.adopt(version)
        self.happened["swapped"] += 1

    def drain(self) -> None:
        """Whoever is first in rank gains a token each step, so the work left bounds the steps."""
        limit = 2 * sum(w.sequence.limit for w in self.open()) + len(self.open()) + 1
        for _ in range(limit):
            if not self.core.has_work:
                break
            self.step()
            self.check()
        assert not self.open() and not self.core.has_work, f"no end after {limit} steps"
        stats = self.core.counters()
        assert (stats.running, stats.waiting, stats.free_blocks) == (0, 0, stats.total_blocks)

    def open(self) -> list[Watched]:
        return [w for w in self.watched.values() if w.ended is None]

    def submit(self, requests: list[Request]) -> None:
        self.core.submit(requests)
        for request in requests:
            # A prompt without room under the longest length is refused at once.
            sequence = self.core.sequences.get(request.id) or Sequence(request, 0)
            self.watched[request.id] = Watched(request, sequence, self.core.version)

    def take(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            watched = self.watched[delta.id]
            assert watched.ended is None, "a delta came after the last one"
            watched.deltas.append(delta)
            if delta.finish is not None:
                watched.ended = self.core.version
                self.happened[delta.finish] += 1

    def check(self) -> None:
        """Every block is free or counted by exactly those who hold it."""
        scheduler, pool = self.core.scheduler, self.core.scheduler.pool
        held = Counter(block for sequence in scheduler.running for block in sequence.blocks)
        held.update(scheduler.kept_blocks())
        assert all(pool.references(block) == held[block] for block in range(pool.total))
        assert pool.free + len(held) == pool.total
        assert sorted([*pool.free_blocks(), *held]) == list(range(pool.total)), "a block is lost or twice free"
        open_ids = {w.request.id for w in self.open()}
        queued = [s.id for s in [*scheduler.running, *scheduler.waiting]]
        assert sorted(queued) == sorted(self.core.sequences) and set(queued) <= open_ids
        assert all(not sequence.blocks for sequence in scheduler.waiting)

    def check_answers(self) -> None:
        for watched in self.watched.values():
            tokens = watched.answer("token_ids")
            assert watched.answer("versions") == watched.live
            assert len(tokens) == len(watched.live)
            assert [d.finish is None for d in watched.deltas] == [True] * (len(watched.deltas) - 1) + [False]
            self.check_ending(watched, tokens)
        # Kept keys and values of older versions give other numbers, to running sequences and to their forks.
        kept = self.config.kv == "keep"
        exact = [w for w in self.watched.values() if not kept or (not w.request.parent and w.born == w.ended)]
        for version, weights in self.weights.items():
            mine = [w for w in exact if version in w.live]
            if mine:
                rows = [w.request.token_ids.tolist() + w.answer("token_ids") for w in mine]
                for watched, row, logits in zip(mine, rows, self.models.logits(weights, rows), strict=True):
                    self.check_tokens(watched, row, logits, version)

    def check_ending(self, watched: Watched, tokens: list[int]) -> None:
        finish, sampling = watched.deltas[-1].finish, watched.request.sampling
        length = len(watched.request.token_ids) + len(tokens)
        full = len(tokens) == sampling.max_tokens or length == MAX_LENGTH
        stopped = bool(tokens) and tokens[-1] in sampling.stop_token_ids
        if finish == "failed":
            capacity = self.core.counters().total_blocks * self.config.block_size
            assert length > capacity or len(watched.request.token_ids) >= MAX_LENGTH
        elif finish != "aborted":
            assert finish == ("stop" if stopped else "length") and (stopped or full)
        assert not set(tokens[:-1]) & set(sampling.stop_token_ids)

    def check_tokens(self, watched: Watched, row: list[int], logits: torch.Tensor, version: int) -> None:
        """Each token is what plain code draws after those before it, under the weights of its version."""
        sampling, first, recorded = watched.request.sampling, len(watched.request.token_ids), watched.answer("logprobs")
        logprobs = (logits / (sampling.temperature or 1.0)).log_softmax(-1).numpy()
        for at in [first + i for i, live in enumerate(watched.live) if live == version]:
            choices, token = logprobs[at - 1], row[at]
            assert abs(recorded[at - first] - choices[token]) < 1e-4
            if sampling.temperature == 0:
                assert choices[token] > choices.max() - 1e-4
            else:
                end = np.exp(choices).cumsum()[token]
                u = uniforms([sampling.seed], [at])[0]
                assert end - np.exp(choices[token]) - 1e-4 < u < end + 1e-4
            self.happened["compared"] += 1


@pytest.mark.timeout(300 + SCHEDULES // 5)
@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param(range(min(AT_FIRST, SCHEDULES)), id="at first"),
        pytest.param(range(AT_FIRST, SCHEDULES), id="the others", marks=pytest.mark.slow),
    ],
)
def test_no_schedule_leaks_a_block_mistags_a_token_or_stalls(models: Models, seeds: range) -> None:
    happened: Counter[str] = Counter()
    for seed in seeds:
        try:
            schedule = Schedule(models, seed)
            schedule.run()
            schedule.check_answers()
        except (AssertionError, RuntimeError) as error:
            error.add_note(f"in schedule {seed}")
            raise
        happened.update(schedule.happened)
    kinds = ["tokens", "compared", "preempted", "forked", "aborted", "swapped", "length", "stop", "failed"]
    assert all(happened[kind] >= len(seeds) // 10 for kind in kinds), happened
    print(dict(happened))


def test_what_broke_is_not_shared(models: Models) -> None:
    """A block with numbers that are not finite is cleared: a later request must not take it for its prompt's."""
    weights = {name: weight.clone() for name, weight in models.first.items()}
    weights["model.embed_tokens.weight"][7] = torch.nan
    models.install(weights)
    config = EngineConfig(slots=2, block_size=2, cache_tokens=40, prefill_chunk=8)
    core = EngineCore(models.served, config, name="core", max_length=MAX_LENGTH, version=0)
    finishes = []
    for prompt in ([1, 2, 3, 7, 5], [1, 2, 3, 7, 5], [1, 2, 3, 4, 5]):
        request = Request(id="a", token_ids=np.array(prompt, np.int32), sampling=Sampling(max_tokens=1))
        core.submit([request])
        finishes += [delta.finish for delta in core.step()]
    assert finishes == ["failed", "failed", "length"]
