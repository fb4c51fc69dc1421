"""The options of the engine benchmark, their check, and the requests that follow from them.

The same options always give the same requests. No torch is imported, so a mistake in the options is reported before
anything is loaded.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.engines.base import Request, Sampling
from headrace.errors import UserError
from headrace.types import Int32Array

PEERS = ("transformers", "generate")
SPREAD = 0.8
"""The sigma of the lognormal distribution of answer lengths."""
WARM_TOKENS = 64
"""The length of the longest answer in the warm-up round, in tokens; the others are scaled in proportion. It is so large
that no answer has ended when the last request of a full batch begins. Otherwise the warm-up would never reach the
largest batch, and its CUDA graph would be captured in the measured round."""


class EngineBench(msgspec.Struct, frozen=True, kw_only=True):
    """The options of `headrace bench engine`, as they were given."""

    model: str
    random_weights: bool = False
    batch: int = 256
    requests: int = 0
    """The number of requests; 0 takes as many as `batch`."""
    prompt: int = 64
    """The number of tokens of a prompt."""
    group_size: int = 1
    """The number of requests with the same prompt."""
    generate: int = 512
    """The number of tokens of an answer, unless `lengths` or `tail` says otherwise."""
    lengths: str = ""
    """`lognormal:MEAN:CUT`: answer lengths are drawn from a lognormal distribution, and cut at `CUT`."""
    tail: str = ""
    """`ROWS:LENGTH`: the last `ROWS` requests have answers of `LENGTH` tokens, and run on when all others have
    ended."""
    fork: str = ""
    """`N:AT`: a running sequence is forked `N` times after its first `AT` tokens."""
    swap_every: float = 0.0
    """Seconds between two swaps of the weights; 0 measures no swaps."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    dtype: str = ""
    device: str = "auto"
    graphs: bool | None = None
    compile: bool | None = None
    block_size: int = 0
    prefill_chunk: int = 0
    threads: int = 0
    rescore: float = 0.01
    peers: tuple[str, ...] = ()
    seed: int = 0


@dataclass(frozen=True)
class Work:
    """The requests of one round. Request i has the prompt `prompts[i]` and an answer of `lengths[i]` tokens."""

    prompts: list[Int32Array]
    lengths: list[int]
    tail_rows: int = 0
    """The number of requests in the tail: the last ones, which still run when all others have ended."""
    fork: tuple[int, int] | None = None
    """The number of forks, and the number of tokens before them; None if nothing is forked."""
    group_size: int = 1
    """The number of successive requests with the same prompt."""
    sampling: Sampling = field(default_factory=lambda: Sampling(max_tokens=1))

    @property
    def tokens(self) -> int:
        """The number of tokens to generate, over all requests."""
        return sum(self.lengths)

    def requests(self, name: str) -> list[Request]:
        """Return the requests of the round, each with a seed of its own."""
        return [
            self.request(f"{name}/{i}", prompt, length, seed=i, group=self._group(name, i))
            for i, (prompt, length) in enumerate(zip(self.prompts, self.lengths, strict=True))
        ]

    def request(
        self, name: str, prompt: Int32Array, length: int, *, seed: int, parent: str = "", group: str = ""
    ) -> Request:
        """Return one request with the sampling settings of this work."""
        sampling = msgspec.structs.replace(self.sampling, max_tokens=length, seed=self.sampling.seed + seed)
        return Request(id=name, token_ids=prompt, sampling=sampling, parent=parent, group=group)

    def _group(self, name: str, number: int) -> str:
        return f"{name}/group-{number // self.group_size}" if self.group_size > 1 else ""

    def warm_up(self) -> Work:
        """Return a short round that goes through the same batch sizes, because its answers end in the same order."""
        longest = max(self.lengths)
        scaled = [
            max(2, round(length * WARM_TOKENS / longest)) if longest > WARM_TOKENS else length
            for length in self.lengths
        ]
        return dataclasses.replace(self.rolled(1), lengths=scaled, tail_rows=0, fork=None)

    def rolled(self, by: int) -> Work:
        """Return the same round with other prompts, so that no cache holds a prefix of them."""
        return dataclasses.replace(self, prompts=[np.roll(prompt, by) for prompt in self.prompts])


def make_work(options: EngineBench, vocabulary: int) -> Work:
    """Return the round that is measured."""
    draw = np.random.default_rng(options.seed)
    count = options.requests or options.batch
    groups = draw.integers(0, vocabulary, (-(-count // options.group_size), options.prompt)).astype(np.int32)
    prompts = list(np.repeat(groups, options.group_size, axis=0)[:count])
    lengths = [options.generate] * count
    rows = 0
    if options.lengths:
        mean, cut = parse_lengths(options.lengths)
        lengths = draw_lengths(count, mean, cut, options.seed).tolist()
    if options.tail:
        rows, longest = parse_pair("--tail", "ROWS:LENGTH", options.tail)
        lengths[count - rows :] = [longest] * rows
    return Work(
        prompts=prompts,
        lengths=lengths,
        tail_rows=rows,
        fork=parse_pair("--fork", "N:AT", options.fork) if options.fork else None,
        group_size=options.group_size,
        sampling=Sampling(
            max_tokens=1,
            temperature=options.temperature,
            top_p=options.top_p,
            top_k=options.top_k,
            seed=options.seed << 32,
        ),
    )


def draw_lengths(count: int, mean: float, cut: int, seed: int) -> npt.NDArray[np.int64]:
    """Draw answer lengths from a lognormal distribution with this mean, each then limited to 1 to `cut`."""
    draw = np.random.default_rng([seed, 1])
    # The mean of exp(N(mu, sigma)) is exp(mu + sigma^2 / 2).
    drawn = draw.lognormal(math.log(mean) - SPREAD**2 / 2, SPREAD, count)
    return np.clip(np.rint(drawn), 1, cut).astype(np.int64)


def check_options(options: EngineBench) -> None:
    """Raise a one-line `UserError` for the first option that makes no sense."""
    count = options.requests or options.batch
    least_one = {"batch": options.batch, "prompt": options.prompt, "group-size": options.group_size}
    for name, value in (least_one | {"generate": options.generate}).items():
        if value < 1:
            raise UserError(f"--{name} {value}: must be at least 1")
    for name, number in (("--requests", options.requests), ("--threads", options.threads), ("--top-k", options.top_k)):
        if number < 0:
            raise UserError(f"{name} {number}: must not be negative")
    if not 0 < options.top_p <= 1:
        raise UserError(f"--top-p {options.top_p:g}: must be above 0 and at most 1")
    if options.temperature < 0 or options.swap_every < 0:
        raise UserError("--temperature and --swap-every must not be negative")
    if not 0 <= options.rescore <= 1:
        raise UserError(f"--rescore {options.rescore:g}: a share of the rows, from 0 to 1")
    if options.dtype not in ("", "float32", "bfloat16"):
        raise UserError(f"--dtype {options.dtype}: float32 or bfloat16")
    if options.device not in ("auto", "cpu", "cuda"):
        raise UserError(f"--device {options.device}: auto, cpu or cuda")
    if unknown := [peer for peer in options.peers if peer not in PEERS]:
        raise UserError(f"--peer {unknown[0]}: one of {', '.join(PEERS)}")
    if options.peers and options.temperature == 0:
        raise UserError("--peer needs a --temperature above 0: peers sample too")
    _check_scenarios(options, count)


def _check_scenarios(options: EngineBench, count: int) -> None:
    if options.lengths:
        parse_lengths(options.lengths)
    if options.tail:
        rows, longest = parse_pair("--tail", "ROWS:LENGTH", options.tail)
        if options.lengths:
            raise UserError("--tail and --lengths both say how long answers are: give one")
        if rows >= count or count > options.batch:
            raise UserError(f"--tail {options.tail}: needs more requests than {rows}, all of them in one batch")
        if longest <= options.generate:
            raise UserError(f"--tail {options.tail}: must be longer than --generate {options.generate}")
    if options.fork:
        _, at = parse_pair("--fork", "N:AT", options.fork)
        if at <= options.prompt:
            raise UserError(f"--fork {options.fork}: the pivot must lie after the prompt of {options.prompt} tokens")


def parse_pair(option: str, form: str, text: str) -> tuple[int, int]:
    """Parse two positive numbers with a colon between them."""
    first, _, second = text.partition(":")
    if not (first.isdecimal() and second.isdecimal() and int(first) and int(second)):
        raise UserError(f"{option} {text}: must be {form}, two whole numbers above 0")
    return int(first), int(second)


def parse_lengths(text: str) -> tuple[float, int]:
    """Return the mean and the cut of `lognormal:MEAN:CUT`."""
    kind, _, rest = text.partition(":")
    if kind != "lognormal":
        raise UserError(f"--lengths {text}: must be lognormal:MEAN:CUT")
    return parse_pair("--lengths lognormal", "lognormal:MEAN:CUT", rest)
