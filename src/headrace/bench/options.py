"""The options of all benchmarks, how they measure time, and how they show their figures.

Each command has a class, and the fields are its options. A field gives the help text, the limits of its values, and the
default value. The command line is made from these fields (`cli/main.py`). No torch is imported, so a mistake in the
options is reported before anything is loaded. Figures are shown by the names that they have in `--json`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from typer import Argument, Option

from headrace.errors import UserError
from headrace.observe.summary import aligned

Model = Annotated[str, Argument(metavar="MODEL_OR_SHAPE", help="A Hugging Face directory, or a named shape.")]
Device = Annotated[Literal["auto", "cpu", "cuda"], Option(help="auto, cpu or cuda.")]
Dtype = Annotated[
    Literal["", "float32", "bfloat16"], Option(help="float32 or bfloat16; by default the second on a GPU.")
]
RandomWeights = Annotated[bool, Option("--random-weights", help="Use the directory's config alone.")]
Say = Callable[[str], None]
"""A function that gets a line of text before each part of a benchmark."""
Part = tuple[str, dict[str, str]]
"""A title, and the text of each figure under it by the name of the figure."""
MANY = 8
"""Of a list with more numbers, only their count is shown."""
REPEATS = 7


class Bench(msgspec.Struct, frozen=True, kw_only=True):
    """The options of one command, as they were given. The docstring of a subclass is the help text of its command."""

    def check(self) -> None:
        """Raise a one-line `UserError` for the first options that make no sense together."""


class EngineBench(Bench, frozen=True, kw_only=True):
    """Measure the embedded engine: tokens/s, time and bytes of a step, and the limit that memory bandwidth sets."""

    model: Model
    batch: Annotated[int, Option(help="Sequences that decode together.", min=1)] = 256
    requests: Annotated[int, Option(help="Requests in all; 0 takes as many as --batch.", min=0)] = 0
    prompt: Annotated[int, Option(help="Tokens of each prompt.", min=1)] = 64
    group_size: Annotated[int, Option(help="Requests to one prompt, one after the other.", min=1)] = 1
    generate: Annotated[int, Option(help="Tokens of each answer (without --lengths).", min=1)] = 512
    lengths: Annotated[str, Option(help="lognormal:MEAN:CUT draws the length of each answer.")] = ""
    temperature: Annotated[float, Option(help="0 is greedy.", min=0)] = 1.0
    top_p: Annotated[float, Option(help="1 keeps all.", min=0, max=1)] = 1.0
    top_k: Annotated[int, Option(help="0 keeps all.", min=0)] = 0
    dtype: Dtype = ""
    device: Device = "auto"
    graphs: Annotated[bool | None, Option("--graphs/--no-graphs", help="CUDA graphs.")] = None
    compile: Annotated[bool | None, Option("--compile/--no-compile", help="Compiled layers.")] = None
    fuse_projections: Annotated[
        bool | None, Option("--fuse-projections/--no-fuse-projections", help="One product for several projections.")
    ] = None
    router_kernel: Annotated[
        bool | None, Option("--router-kernel/--no-router-kernel", help="A kernel in place of the router's topk.")
    ] = None
    expert_kernels: Annotated[
        bool | None, Option("--expert-kernels/--no-expert-kernels", help="Headrace's kernels for experts.")
    ] = None
    quantize: Annotated[
        Literal["none", "fp8"], Option(help="fp8: linear layers in FP8. Also shows the KL to the model in full.")
    ] = "none"
    kv_dtype: Annotated[Literal["auto", "fp8"], Option(help="fp8: keys and values in FP8.")] = "auto"
    block_size: Annotated[int, Option(help="Tokens in a block of the cache; 0 takes the engine's.", min=0)] = 0
    prefill_chunk: Annotated[int, Option(help="Prompt tokens a step; 0 takes the engine's.", min=0)] = 0
    threads: Annotated[int, Option(help="Compute threads; 0 takes torch's default.", min=0)] = 0
    rescore: Annotated[float, Option(help="Share of rows that the plain model scores again.", min=0, max=1)] = 0.01
    tail: Annotated[str, Option(help="ROWS:LENGTH, the last rows run on to so many tokens.")] = ""
    swap_every: Annotated[float, Option(help="Seconds between two swaps of weights; 0 swaps none.", min=0)] = 0.0
    fork: Annotated[str, Option(help="N:AT, so many continuations from a pivot at token AT.")] = ""
    peer: Annotated[Literal["", "generate"], Option(help="generate: also measure transformers' own, padded.")] = ""
    random_weights: RandomWeights = False
    seed: Annotated[int, Option(help="Of weights, prompts, lengths and sampling.", min=0)] = 0

    def check(self) -> None:
        """See `Bench.check`."""
        count = self.requests or self.batch
        if self.top_p == 0:
            raise UserError("--top-p 0: must be above 0")
        if self.peer and self.temperature == 0:
            raise UserError("--peer needs a --temperature above 0: peers sample too")
        if self.lengths:
            parse_lengths(self.lengths)
        if self.rounded and (self.swap_every or self.peer):
            raise UserError("--quantize and --kv-dtype have neither --swap-every nor --peer")
        rows, longest = self.pair("tail")
        if rows:
            if self.lengths:
                raise UserError("--tail and --lengths both say how long answers are: give one")
            if rows >= count or count > self.batch:
                raise UserError(f"--tail {self.tail}: needs more requests than {rows}, all of them in one batch")
            if longest <= self.generate:
                raise UserError(f"--tail {self.tail}: must be longer than --generate {self.generate}")
        forks, at = self.pair("fork")
        if forks and at <= self.prompt:
            raise UserError(f"--fork {self.fork}: the pivot must lie after the prompt of {self.prompt} tokens")

    @property
    def rounded(self) -> bool:
        """Whether the engine computes with rounded numbers, so that it is compared with a model that rounds too."""
        return self.quantize != "none" or self.kv_dtype != "auto"

    def pair(self, option: Literal["tail", "fork"]) -> tuple[int, int]:
        """Return the two numbers of `--tail` or `--fork`; zeros if it is not given."""
        given, form = (self.tail, "ROWS:LENGTH") if option == "tail" else (self.fork, "N:AT")
        return parse_pair(f"--{option}", form, given) if given else (0, 0)


class DeliveryBench(Bench, frozen=True, kw_only=True):
    """Measure the delivery of weights, from publish to acknowledged, beside plain copies of the same bytes."""

    model: Annotated[str, Option("--model-shape", help="A named shape, or a Hugging Face directory.")] = "smollm2-135m"
    transports: Annotated[list[str], Option("--transport", help="How weights travel. May be repeated.")] = (
        msgspec.field(default_factory=lambda: ["shm"])
    )
    sends: Annotated[list[str], Option("--send", help="full, delta or adapter. May be repeated.")] = msgspec.field(
        default_factory=lambda: ["full"]
    )
    engines: Annotated[int, Option(help="Engine processes.", min=1)] = 1
    versions: Annotated[int, Option(help="Versions that are measured, after two others.", min=1)] = 5
    changed: Annotated[float, Option(help="Share of words in which a version differs from the last.", min=0, max=1)] = (
        0.01
    )
    per_parameter: Annotated[bool, Option("--per-parameter", help="nccl: also tensor by tensor.")] = False
    decode: Annotated[int, Option(help="Sequences that every engine decodes meanwhile.", min=0)] = 0
    staging: Annotated[str, Option(help="Where engines stage a version: device, host or none.")] = "device"
    dtype: Dtype = ""
    device: Device = "auto"
    threads: Annotated[int, Option(help="Compute threads of each process.", min=1)] = 1
    seed: Annotated[int, Option(help="Of the weights and of what changes.", min=0)] = 0

    def check(self) -> None:
        """See `Bench.check`."""
        if self.staging not in ("device", "host", "none"):
            raise UserError(f"--staging {self.staging}: one of device, host, none")
        if self.staging == "none" and ("delta" in self.sends or "nccl" in self.transports):
            raise UserError("--staging none: --send delta and --transport nccl need a second copy")
        # Imported late, because it loads numpy.
        from headrace.delivery.transports import NAMES

        if unknown := [name for name in self.transports if name not in NAMES]:
            raise UserError(f"--transport {unknown[0]}: one of {', '.join(NAMES)}")
        if unknown := [kind for kind in self.sends if kind not in ("full", "delta", "adapter")]:
            raise UserError(f"--send {unknown[0]}: one of full, delta, adapter")
        if self.per_parameter and "nccl" not in self.transports:
            raise UserError("--per-parameter is for --transport nccl: the others have no such way to send")


class TrainBench(Bench, frozen=True, kw_only=True):
    """Measure the trainer alone: tokens/s, MFU and peak memory of whole optimizer steps of full fine-tuning."""

    model: Model
    tokens: Annotated[int, Option(help="Tokens of a step, padding not counted.", min=1)] = 65536
    sequence: Annotated[int, Option(help="Tokens of each sequence (without --lengths).", min=1)] = 4096
    lengths: Annotated[str, Option(help="equal:N, or lognormal:MEAN:CUT.")] = ""
    steps: Annotated[int, Option(help="Steps that are timed.", min=1)] = 5
    micro_batch_tokens: Annotated[int, Option(help="Tokens that one pass holds.", min=1)] = 16384
    device: Device = "auto"
    pack: Annotated[bool, Option("--pack/--no-pack", help="Pack, or pad to the longest of a pass.")] = True
    chunk: Annotated[bool, Option("--chunk/--no-chunk", help="Logits by chunks, or whole.")] = True
    compile: Annotated[bool, Option("--compile/--no-compile", help="GPU: compiled layers.")] = True
    compare: Annotated[bool, Option("--compare", help="Also without packing, chunks, compilation.")] = False
    seed: Annotated[int, Option(help="Of weights, tokens and lengths.", min=0)] = 0

    @property
    def mix(self) -> str:
        """The lengths of sequences, in the form that `make_lengths` takes."""
        return self.lengths or f"equal:{self.sequence}"

    def check(self) -> None:
        """See `Bench.check`."""
        parse_lengths(self.mix)


class LoopBench(Bench, frozen=True, kw_only=True):
    """Measure the whole loop, synchronous against asynchronous, in one call.

    Without a model, a tiny one is measured on a balanced workload, with one compute thread per process. With
    --long-tail, answers have lognormal lengths, and one in ten is ten times longer.
    """

    model: Annotated[
        str, Argument(metavar="[MODEL_OR_SHAPE]", help="A model directory or a named shape; none is a tiny one.")
    ] = ""
    versions: Annotated[int, Option(help="Versions that are counted; 0 takes 30, 6 with a model.", min=0)] = 0
    in_flight: Annotated[int, Option(help="With a model: answers that are generated together.", min=1)] = 256
    lengths: Annotated[str, Option(help="With a model: equal:N or lognormal:MEAN:CUT.")] = "lognormal:256:2048"
    prompt: Annotated[int, Option(help="With a model: tokens of each prompt.", min=1)] = 64
    group_size: Annotated[int, Option(help="With a model: answers to one prompt.", min=1)] = 8
    depth: Annotated[
        int, Option(help="With a model: of the asynchronous run; 0 takes what the longest answer lasts.", min=0)
    ] = 0
    micro_batch_tokens: Annotated[int, Option(help="With a model: tokens that a training pass holds.", min=1)] = 16384
    device: Annotated[Literal["auto", "cpu", "cuda"], Option(help="With a model: auto, cpu or cuda.")] = "auto"
    seed: Annotated[int, Option(help="With a model: of weights, prompts and lengths.", min=0)] = 0
    keep: Annotated[str, Option(help="With a model: leave both runs in this directory, with timelines.")] = ""
    long_tail: Annotated[bool, Option("--long-tail", help="Without a model: one answer in ten is longer.")] = False
    rounds: Annotated[int, Option(help="With --long-tail: how often each depth is measured.", min=1)] = 3

    def check(self) -> None:
        """See `Bench.check`."""
        if self.long_tail and self.model:
            raise UserError(f"--long-tail: measures a tiny model of its own (remove {self.model})")
        parse_lengths(self.lengths)
        if self.in_flight % self.group_size:
            raise UserError(f"--in-flight {self.in_flight}: not a multiple of --group-size {self.group_size}")


class JournalBench(Bench, frozen=True, kw_only=True):
    """Measure what the journal costs a run; with --rollouts, the time to open, resume, count and query a large one."""

    pairs: Annotated[int, Option(help="Blocks with the journal, and as many without.", min=2)] = 10
    versions: Annotated[int, Option(help="Versions of a block.", min=1)] = 10
    rollouts: Annotated[int, Option(help="Instead: the time to read a journal of so many.", min=0)] = 0


def parse_pair(option: str, form: str, text: str) -> tuple[int, int]:
    """Parse two positive numbers with a colon between them."""
    first, _, second = text.partition(":")
    if not (first.isdecimal() and second.isdecimal() and int(first) and int(second)):
        raise UserError(f"{option} {text}: must be {form}, two whole numbers above 0")
    return int(first), int(second)


def parse_lengths(text: str) -> tuple[str, int, int]:
    """Return the kind, the mean and the longest length of `equal:N` or `lognormal:MEAN:CUT`."""
    kind, _, rest = text.partition(":")
    if kind == "equal" and rest.isdecimal() and int(rest):
        return kind, int(rest), int(rest)
    if kind == "lognormal":
        return kind, *parse_pair("--lengths lognormal", "lognormal:MEAN:CUT", rest)
    raise UserError(f"--lengths {text}: must be equal:N or lognormal:MEAN:CUT")


def lines(found: Mapping[str, Any]) -> list[str]:
    """Return one aligned line for each figure that was measured. Parts with the same figures are columns of one table.

    The arguments are left out: the reader has just typed them.
    """
    parts = list(_parts("", {name: value for name, value in found.items() if name != "arguments"}))
    shown: list[str] = []
    while parts:
        title, names = parts[0]
        # Columns of one table: the first part, and all parts with the same figures and perhaps more.
        columns = [part for part in parts if names.keys() <= part[1].keys()] if title else parts[:1]
        parts = [part for part in parts if part not in columns]
        rows = [["", *(title for title, _ in columns)]] if title else []
        for name in dict.fromkeys(name for _, part in columns for name in part):
            rows.append([name, *(part.get(name, "") for _, part in columns)])
        shown += [""] if shown else []
        shown += aligned(rows)
    return shown


def _parts(title: str, found: Mapping[str, Any]) -> Iterator[Part]:
    """Yield the plain figures under this title, then the parts inside it."""
    inside: dict[str, Mapping[str, Any]] = {}
    plain: dict[str, str] = {}
    for name, value in found.items():
        if isinstance(value, Mapping):
            inside[name] = value
        elif isinstance(value, list) and value and isinstance(value[0], Mapping):
            inside |= {f"{name} {number}": item for number, item in enumerate(value, start=1)}
        elif value is not None:
            plain[name] = _text(value)
    if plain:
        yield title, plain
    for name, value in inside.items():
        yield from _parts(f"{title} {name}".strip(), value)


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_text, value)) if len(value) <= MANY else f"{len(value):,} of them"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


class Timed:
    """Measures the time of the body of a `with`. `seconds` and `cpu_seconds` are set when the body ends."""

    def __init__(self, device: str = "cpu") -> None:
        self._device = device
        self.seconds = 0.0
        self.cpu_seconds = 0.0
        """The time of a core, which hardly depends on other work on the machine."""

    def __enter__(self) -> Timed:
        _settle(self._device)
        self._cpu, self._started = time.process_time(), time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        _settle(self._device)
        self.seconds = time.perf_counter() - self._started
        self.cpu_seconds = time.process_time() - self._cpu


def _settle(device: str) -> None:
    if device == "cuda":
        # Imported late, because most of what is timed needs no torch.
        import torch

        torch.cuda.synchronize()


def median_seconds(
    work: Callable[[], object],
    device: str = "cpu",
    repeats: int = REPEATS,
    of: Callable[[Sequence[float]], float] = statistics.median,
) -> float:
    """Return the median seconds of the work until the device is done. A first call is not counted.

    `of` replaces the median, for example by the least.
    """
    times = []
    for _ in range(repeats + 1):
        with Timed(device) as timed:
            work()
        times.append(timed.seconds)
    return of(times[1:])
