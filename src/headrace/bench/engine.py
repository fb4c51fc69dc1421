"""`headrace bench engine`: measures how fast the embedded engine generates, and compares that with a ceiling.

The ceiling is the rate at which the engine would generate if every step took only the time to read the bytes that it
must read, at the bandwidth of a plain copy: every weight once, and for each row the keys and values of all tokens
before it. Nothing else is counted, so an engine can come close to the ceiling but never exceed it. All that is compared
is measured in one process, with the same weights and the same prompts.

The tail is the last part of a round, in which only the longest requests still run (`--tail`).
"""

from collections import Counter
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch
import transformers
from transformers import GenerationConfig

from headrace.bench.base import begin, choose_dtype, copy_bandwidth, free_memory, load, vocabulary_of
from headrace.bench.delivery_sides import Begin, PublisherProcess, two_sets
from headrace.bench.engine_checks import check_tags, chosen_rows, divergence, install, plain_twin, rescore
from headrace.bench.engine_rounds import (
    WARM_TOKENS,
    Driver,
    Progress,
    Round,
    bench_fork,
    lengths_of,
    make_requests,
    other_round,
    run_with_swaps,
    swap_figures,
)
from headrace.bench.options import DeliveryBench, EngineBench, Say, Timed
from headrace.config.schema import EngineConfig
from headrace.engines.base import Delta, Request
from headrace.engines.embedded.core import EngineCore
from headrace.engines.embedded.setup import give_way_to_decoding
from headrace.errors import HeadraceError, UserError
from headrace.models.attention import check_model
from headrace.models.fp8 import quantize_linears
from headrace.models.loading import named_weights
from headrace.types import Int16Array

STEPS_LOOKED_AT = 64
"""The number of positions in the answers at which chosen experts are counted, spread evenly."""


def bench_engine(options: EngineBench, say: Say) -> dict[str, Any]:
    """Measure and return all figures. `say` gets a line before each part."""
    device, found = begin("engine", options)
    if options.threads:
        torch.set_num_threads(options.threads)
    return found | _Bench(options, device, choose_dtype(options.dtype, device), say).run()


class _Bench:
    def __init__(self, options: EngineBench, device: str, dtype: str, say: Say) -> None:
        self._options = options
        self._device = device
        self._dtype = dtype
        self._say = say
        say(f"loading {options.model} in {dtype} on {device}")
        with Timed(device) as loading:
            self._model = load(options.model, dtype, device, options.seed, random_weights=options.random_weights)
            self._requests = make_requests(options, vocabulary_of(self._model))
            self._lengths = lengths_of(self._requests)
            self._longest = max(options.prompt + max(self._lengths), options.pair("fork")[1] + options.generate)
            limit = getattr(self._model.config.get_text_config(), "max_position_embeddings", self._longest)
            if self._longest > limit:
                raise UserError(f"sequences of {self._longest} tokens are longer than this model's {limit} positions")
            check_model(self._model, self._longest)
        self._load_seconds = loading.seconds
        # These come before the engine, which may compile the model's layers, and which takes most of the memory.
        self._twin = self._full = plain_twin(self._model)
        if options.quantize == "fp8":
            quantize_linears(self._model)
        if options.rounded:
            self._twin = plain_twin(self._model, rounds_kv=options.kv_dtype == "fp8")
        self._footprint = footprint(self._model, rounds_kv=options.kv_dtype == "fp8")
        self._bandwidth = copy_bandwidth(device)

    def run(self) -> dict[str, Any]:
        """Measure all parts in order and return the figures."""
        options, requests = self._options, self._requests
        tail_rows, _ = options.pair("tail")
        self._say("starting the engine")
        with Timed() as start:
            core = EngineCore(self._model, self._engine_config(), name="bench", max_length=self._longest, version=0)
            driver = Driver(core)
            driver.run(other_round(requests[:1], 1, longest=1))
        # The process of a real engine does the same, once everything is loaded.
        give_way_to_decoding()
        self._say("warming up")
        warm = driver.run(other_round(requests, 2, longest=WARM_TOKENS))
        self._say(f"generating {sum(self._lengths)} tokens for {len(requests)} requests")
        measured = driver.run(requests, tail_rows=tail_rows)
        found: dict[str, Any] = {
            "dtype": self._dtype,
            "quantize": options.quantize,
            "kv_dtype": self._dtype if options.kv_dtype == "auto" else options.kv_dtype,
            "threads": torch.get_num_threads(),
            "transformers": transformers.__version__,
            "load_seconds": self._load_seconds,
            "start_seconds": start.seconds,
            "warm_up_seconds": warm.seconds,
        }
        found |= self._figures(measured)
        if self._device == "cuda":
            # Before rows are scored again, which takes memory that the engine does not.
            found["peak_memory_bytes"] = torch.cuda.max_memory_reserved()
        if options.rescore:
            rows = chosen_rows(requests, measured.answers, options.rescore)
            self._say(f"scoring {len(rows)} rows again by the plain model")
            found["rescore"] = rescore(self._twin, rows)
            if self._full is not self._twin:
                found["rescore"]["kl_to_full"] = divergence(self._twin, self._full, rows)
        if measured.tail_from:
            found["before_tail"], found["tail"] = self._parts(measured, measured.tail_from, tail_rows)
        if options.fork:
            count, at = options.pair("fork")
            self._say(f"forking a sequence {count} times at token {at}")
            found["fork"] = bench_fork(driver, requests[0], count, at, options.generate)
        # The swaps come last for the engine, because it has other weights afterwards.
        if options.swap_every:
            found["swaps"] = self._swapped(driver, measured)
        core.close()
        del core, driver
        free_memory(self._device)
        if options.peer:
            self._say("the same requests by generate on padded batches")
            seconds = padded_generate(self._twin, requests, options.batch, self._device)
            rate = measured.tokens / seconds
            ratio = found["tokens_per_second"] / rate
            found["peers"] = {"generate": {"seconds": seconds, "tokens_per_second": rate, "ratio": ratio}}
        return found

    def _figures(self, run: Round) -> dict[str, Any]:
        foot, options = self._footprint, self._options
        full = run.full_until if len(run.answers) > options.batch else None
        return {
            "requests": len(self._requests),
            "prompt_tokens": options.prompt * len(self._requests),
            "generated_tokens": run.tokens,
            "answer_lengths": self._lengths if options.lengths else None,
            "seconds": run.seconds,
            "tokens_per_second": run.tokens / run.seconds,
            # Until the last request got a slot; None if all had one from the beginning.
            "tokens_per_second_while_full": full.tokens / full.seconds if full else None,
            "steps": run.steps,
            "prefilled_tokens": run.prefilled,
            "preemptions": run.preemptions,
            "step_ms": {
                "all": 1e3 * run.seconds / run.steps,
                "decode": 1e3 * run.decode_seconds / run.decode_steps if run.decode_steps else None,
                "host": 1e3 * run.host_seconds / run.steps,
                "device": 1e3 * run.device_seconds / run.steps,
            },
            "parameter_bytes": foot.weights,
            "kv_bytes_a_token": foot.kv_token,
            **self._ceiling(
                decode_contexts(options.prompt, self._lengths),
                Progress(run.seconds, run.steps, run.tokens),
                routing_of(run.answers, first=1),
            ),
        }

    def _ceiling(self, contexts: list[tuple[int, int]], done: Progress, routing: list[Int16Array]) -> dict[str, Any]:
        """Return the ceiling of these steps, and how close they come to it. `routing` has the experts of each answer.

        The fraction of the ceiling is the time that the necessary reads would take, divided by the measured time.
        """
        seconds, steps, tokens = done
        touched = touched_experts(routing, round(tokens / steps))
        weights = self._footprint.weights_read(tokens / steps, touched)
        kv = self._footprint.kv_read(contexts) / steps
        ideal = (weights + kv) / self._bandwidth
        return {
            "bytes_a_step": {"weights": weights, "kv": kv, "all": weights + kv},
            # The experts of a layer that a step reads, on average over layers and steps; None for a dense model.
            "experts_a_step": touched,
            "bandwidth_bytes_a_second": self._bandwidth,
            "ceiling_step_ms": 1e3 * ideal,
            "ceiling_tokens_per_second": tokens / (ideal * steps),
            "fraction_of_ceiling": ideal / (seconds / steps),
        }

    def _parts(self, run: Round, mark: Progress, tail_rows: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the figures of the steps until only the tail was left, prompts included, and of the steps after."""
        prompt = self._options.prompt
        drawn = drawn_before_tail(self._lengths, tail_rows, mark.tokens)
        tail = Progress(run.seconds - mark.seconds, run.steps - mark.steps, run.tokens - mark.tokens)
        last = prompt + self._lengths[-1] - 1
        # Every row of the tail reads this range of context lengths, from its first token of the tail to its last.
        contexts = [(last - tail.tokens // tail_rows + 1, last)] * tail_rows
        recorded = routing_of(run.answers, first=1)
        routing = [record[: length - 1] for record, length in zip(recorded, drawn, strict=bool(recorded))]
        before = self._stretch(len(drawn), decode_contexts(prompt, drawn), mark, routing)
        return before, self._stretch(tail_rows, contexts, tail, routing_of(run.answers[-tail_rows:], first=drawn[-1]))

    def _stretch(
        self, rows: int, contexts: list[tuple[int, int]], done: Progress, routing: list[Int16Array]
    ) -> dict[str, Any]:
        rates = {"tokens_per_second": done.tokens / done.seconds, "step_ms": 1e3 * done.seconds / done.steps}
        return {"rows": rows, **done._asdict(), **rates, **self._ceiling(contexts, done, routing)}

    def _swapped(self, driver: Driver, plain: Round) -> dict[str, Any]:
        options, requests = self._options, other_round(self._requests, 3)
        first, second = two_sets(named_weights(self._model), options.seed)
        # In host memory, because the engine may have taken most of the device's.
        sets = tuple({name: tensor.cpu() for name, tensor in weights.items()} for weights in (first, second))
        # The transport that `auto` chooses if trainer and engine are on one host.
        transport = "cuda_ipc" if self._device == "cuda" else "shm"
        sent = msgspec.structs.replace(
            DeliveryBench(model=options.model, seed=options.seed), dtype=self._dtype, device=self._device
        )
        begun = Begin(options=sent, random_weights=options.random_weights, distinct=True)
        with closing(PublisherProcess(begun)) as publisher:
            self._say(f"the same requests, with new weights every {options.swap_every:g} s")
            run, swaps = run_with_swaps(driver, requests, publisher, transport, options.swap_every)
        found = swap_figures(swaps, run, plain, copy_seconds=2 * self._footprint.weights / self._bandwidth)
        rows = chosen_rows(requests, run.answers, options.rescore)
        self._say(f"replaying {len(rows)} rows under the versions of their tags")
        found |= check_tags(self._twin, sets, run.answers, rows, self._dtype)
        install(self._twin, sets[0])
        return found

    def _engine_config(self) -> EngineConfig:
        options = self._options
        given = {
            name: getattr(options, name)
            for name in ("graphs", "compile", "expert_kernels", "fuse_projections", "router_kernel")
        }
        changes = {name: value for name, value in given.items() if value is not None}
        changes |= {name: value for name in ("block_size", "prefill_chunk") if (value := getattr(options, name))}
        config = EngineConfig(slots=options.batch, kv="keep", max_length=self._longest)
        config = msgspec.structs.replace(config, quantize=options.quantize, kv_dtype=options.kv_dtype)
        config = msgspec.structs.replace(config, device=self._device, **changes)
        return msgspec.structs.replace(config, cache_tokens=self._cache_tokens(config.block_size))

    def _cache_tokens(self, block_size: int) -> int:
        """Return how many tokens the cache must hold: a full batch of the longest answers, or all forks and a pivot."""
        options, (forks, at) = self._options, self._options.pair("fork")
        held = sorted((options.prompt + length for length in self._lengths), reverse=True)[: options.batch]
        forked = [at + options.generate] * (forks + 1) if forks else []
        # Each sequence needs up to one block more for rounding up, and admission needs one free block.
        return max(sum(part) + block_size * (len(part) + 1) for part in (held, forked))


@torch.inference_mode()
def padded_generate(twin: Any, requests: list[Request], batch: int, device: str) -> float:
    """Return the seconds of Hugging Face's `generate` for the same prompts, after a short warm-up.

    Each batch, in the order of the requests, is padded to its longest prompt and runs until its longest answer is
    complete.
    """

    def generate(first: int, tokens: int) -> None:
        prompts = [request.token_ids for request in requests[first : first + batch]]
        width = max(map(len, prompts))
        ids = torch.from_numpy(np.stack([np.pad(prompt, (width - len(prompt), 0)) for prompt in prompts]))
        starts = torch.tensor([width - len(prompt) for prompt in prompts])
        mask = torch.arange(width) >= starts[:, None]
        # The model's own generation settings (end tokens, penalties) would change the work.
        twin.generation_config = GenerationConfig(
            do_sample=True,
            temperature=requests[0].sampling.temperature,
            top_p=requests[0].sampling.top_p,
            top_k=requests[0].sampling.top_k,
            max_new_tokens=tokens,
            eos_token_id=None,
            pad_token_id=0,
        )
        out = twin.generate(ids.long().to(twin.device), attention_mask=mask.long().to(twin.device))
        if out.shape[1] != ids.shape[1] + tokens:
            raise HeadraceError(f"generate gave {out.shape[1] - ids.shape[1]} of {tokens} tokens")

    generate(0, 4)
    with Timed(device) as timed:
        for first in range(0, len(requests), batch):
            generate(first, max(lengths_of(requests[first : first + batch])))
    return timed.seconds


def drawn_before_tail(lengths: list[int], tail_rows: int, tokens: int) -> list[int]:
    """Return how many tokens each row had when all rows but those of the tail were complete. `tokens` is their sum."""
    ended = lengths[:-tail_rows]
    return ended + [(tokens - sum(ended)) // tail_rows] * tail_rows


@dataclass(frozen=True)
class Footprint:
    """The sizes of one model's parts in bytes."""

    weights: int
    shared: int
    """The bytes that every step reads: all parameters except the experts, and except an input embedding that is not
    tied to the output."""
    experts: int
    expert_count: int
    """The number of experts in one layer."""
    experts_per_token: int
    kv_of_window: dict[int | None, int]
    """Attention window (None: all tokens) -> the bytes of a token's keys and values in all layers with this window."""

    @property
    def kv_token(self) -> int:
        """The bytes of one token's keys and values in all layers."""
        return sum(self.kv_of_window.values())

    def weights_read(self, rows: float, touched: float | None = None) -> float:
        """Return the bytes of weights that a step of this many rows reads.

        Of the experts, only those that some row chooses are read: `touched` of each layer. Without this number, rows
        are taken to choose at random.
        """
        if not self.expert_count:
            return float(self.shared)
        if touched is not None:
            return self.shared + self.experts * touched / self.expert_count
        missed: float = (1 - self.experts_per_token / self.expert_count) ** rows
        return self.shared + self.experts * (1 - missed)

    def kv_read(self, contexts: Iterable[tuple[int, int]]) -> int:
        """Return the bytes of keys and values that decode steps read.

        `contexts` holds for each sequence the number of tokens it sees in its first and in its last step.
        """
        return sum(
            times * size * int(np.minimum(np.arange(first, last + 1), window or last).sum())
            for (first, last), times in Counter(contexts).items()
            for window, size in self.kv_of_window.items()
        )


def routing_of(answers: Iterable[Delta], first: int) -> list[Int16Array]:
    """Return the recorded experts of each answer from its token `first` on. Empty if nothing was recorded."""
    return [answer.routing[first:] for answer in answers if answer.routing is not None]


def touched_experts(routing: list[Int16Array], rows: int) -> float | None:
    """Return how many experts of a layer are chosen by some row of a step, on average over layers and steps.

    `routing` has the experts of each answer, [tokens, layers, k]. The count assumes that `rows` neighbouring answers
    decode in step: their tokens at the same position make one step. At most `STEPS_LOOKED_AT` positions are counted.
    Returns None if no experts are recorded.
    """
    longest = max(map(len, routing), default=0)
    counts = []
    for index in np.unique(np.linspace(0, longest - 1, STEPS_LOOKED_AT).astype(int)) if longest else []:
        chosen = [record[index] for record in routing if len(record) > index]
        for first in range(0, len(chosen), max(rows, 1)):
            step = np.stack(chosen[first : first + max(rows, 1)], axis=1)
            # The last answers may be fewer than `rows`. They count only if there are no other answers at this position.
            if first == 0 or step.shape[1] == rows:
                counts += [len(np.unique(layer)) for layer in step]
    return float(np.mean(counts)) if counts else None


def decode_contexts(prompt: int, lengths: Iterable[int]) -> list[tuple[int, int]]:
    """Return, for each answer, how many tokens its first and its last decode step see.

    The first token of an answer comes from the pass over the prompt, so an answer of one token has no decode step.
    """
    return [(prompt + 1, prompt + length - 1) for length in lengths if length > 1]


def footprint(model: Any, *, rounds_kv: bool = False) -> Footprint:
    """Compute the sizes of this model's parts from its parameters and its configuration.

    With `rounds_kv`, keys and values take one byte each.
    """
    config = model.config.get_text_config()
    sizes = {name: p.numel() * p.element_size() for name, p in model.named_parameters()}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    weights = sum(sizes.values())
    embedding, output = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    unread = 0 if embedding is output else embedding.numel() * embedding.element_size()
    heads = int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    head = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    layer = 2 * heads * head * (1 if rounds_kv else model.dtype.itemsize)
    return Footprint(
        weights=weights,
        shared=weights - experts - unread,
        experts=experts,
        expert_count=int(_first(config, "num_experts", "num_local_experts", "n_routed_experts")) if experts else 0,
        experts_per_token=int(_first(config, "num_experts_per_tok", "top_k")) if experts else 0,
        kv_of_window={window: layer * count for window, count in Counter(_windows(config)).items()},
    )


def _windows(config: Any) -> list[int | None]:
    layers = int(config.num_hidden_layers)
    window = getattr(config, "sliding_window", None) or None
    types = getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"] * layers
    return [window if kind == "sliding_attention" else None for kind in types]


def _first(config: Any, *names: str) -> int:
    return next(int(getattr(config, name)) for name in names if getattr(config, name, None))
