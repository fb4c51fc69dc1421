"""`headrace bench engine`: measures how fast the embedded engine generates, and compares that with a ceiling.

The ceiling is the rate at which the engine would generate if every step took only the time to read the bytes that it
must read, at the bandwidth of a plain copy (see `engine_bytes`). One call measures all that is compared: the bandwidth,
the rates of the engine and of its peers, and the reference scores, in the same process, with the same weights and the
same prompts.

The tail is the last part of a round in which only the longest requests still run (`--tail`). A stretch is a part of a
round that is measured by itself: the steps before the tail, or the tail.
"""

from __future__ import annotations

import gc
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
import transformers

from headrace.bench.engine_bytes import copy_bandwidth, decode_contexts, footprint, settle
from headrace.bench.engine_drive import Driver, Round
from headrace.bench.engine_fork import bench_fork
from headrace.bench.engine_peers import bench_peer
from headrace.bench.engine_rescore import chosen_rows, plain_twin, rescore
from headrace.bench.engine_swaps import SwapStream, install, swap_figures, two_sets
from headrace.bench.engine_tags import check_tags
from headrace.bench.engine_work import EngineBench, Work, check_options, make_work
from headrace.config.schema import EngineConfig
from headrace.engines.embedded.core import EngineCore
from headrace.engines.embedded.setup import give_way_to_decoding
from headrace.errors import UserError
from headrace.models.loading import load_model
from headrace.models.selfcheck import check_model
from headrace.models.shapes import SHAPES, build_shape

Say = Callable[[str], None]


def bench_engine(options: EngineBench, say: Say) -> dict[str, Any]:
    """Measure and return all figures. `say` gets a line before each part."""
    check_options(options)
    _check_model_name(options)
    device = _device(options.device)
    dtype = options.dtype or ("bfloat16" if device == "cuda" else "float32")
    if options.threads:
        torch.set_num_threads(options.threads)
    return _Bench(options, device, dtype, say).run()


class _Bench:
    """One benchmark: its model, its engine and its work."""

    def __init__(self, options: EngineBench, device: str, dtype: str, say: Say) -> None:
        self._options = options
        self._device = device
        self._dtype = dtype
        self._say = say
        say(f"loading {options.model} in {dtype} on {device}")
        started = time.perf_counter()
        self._model = _load(options, dtype, device)
        self._work = make_work(options, int(self._model.get_input_embeddings().weight.shape[0]))
        self._longest = _longest(options, self._work)
        _check_length(self._model, self._longest)
        check_model(self._model, self._longest)
        settle(device)
        self._load_seconds = time.perf_counter() - started
        self._footprint = footprint(self._model)
        # These come before the engine, which may compile the model's layers, and which takes most of the memory.
        self._twin = plain_twin(self._model)
        self._bandwidth = copy_bandwidth(device)

    def run(self) -> dict[str, Any]:
        """Measure all parts in order and return the figures.

        The swaps come last for the engine, because it has other weights afterwards.
        """
        options, work = self._options, self._work
        self._say("starting the engine")
        started = time.perf_counter()
        core = EngineCore(self._model, self._engine_config(), name="bench", max_length=self._longest, version=0)
        driver = Driver(core)
        driver.run([work.request("first", work.prompts[0], 1, seed=0)])
        start_seconds = time.perf_counter() - started
        # The process of a real engine does the same, once everything is loaded.
        give_way_to_decoding()
        self._say("warming up")
        warm = driver.run(work.warm_up().requests("warm"))
        self._say(f"generating {work.tokens} tokens for {len(work.prompts)} requests")
        measured = driver.run(work.requests("run"), tail_rows=work.tail_rows)
        found = (
            self._head() | {"start_seconds": start_seconds, "warm_up_seconds": warm.seconds} | self._figures(measured)
        )
        found["rescore"] = self._rescored(measured)
        found["before_tail"] = self._before_tail(measured) if measured.tail_from else None
        found["tail"] = self._tail(measured) if measured.tail_from else None
        found["fork"] = self._forked(driver)
        found["swaps"] = self._swapped(driver, measured) if options.swap_every else None
        core.close()
        del core, driver
        _free_memory(self._device)
        found["peers"] = {name: self._peer(name, found["tokens_per_second"]) for name in options.peers}
        return found

    def _head(self) -> dict[str, Any]:
        return {
            "bench": "engine",
            "model": self._options.model,
            "device": self._device,
            "device_name": torch.cuda.get_device_name() if self._device == "cuda" else platform.processor() or "cpu",
            "dtype": self._dtype,
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "arguments": msgspec.to_builtins(self._options),
            "load_seconds": self._load_seconds,
        }

    def _figures(self, run: Round) -> dict[str, Any]:
        work, foot = self._work, self._footprint
        contexts = decode_contexts(self._options.prompt, work.lengths)
        found = {
            "requests": len(work.prompts),
            "prompt_tokens": sum(len(prompt) for prompt in work.prompts),
            "generated_tokens": run.tokens,
            "answer_lengths": work.lengths if self._options.lengths else None,
            "seconds": run.seconds,
            "tokens_per_second": run.tokens / run.seconds,
            "tokens_per_second_while_full": self._while_full(run),
            "steps": run.steps,
            "prefilled_tokens": run.prefilled,
            "preemptions": run.preemptions,
            "step_ms": _step_ms(run),
            "parameter_bytes": foot.weights,
            "kv_bytes_a_token": foot.kv_token,
        }
        return found | self._ceiling(foot.kv_read(contexts), run.tokens, run.steps, run.seconds)

    def _ceiling(self, kv_bytes: int, tokens: int, steps: int, seconds: float) -> dict[str, Any]:
        """Return the ceiling of these steps, and how close they come to it.

        The fraction of the ceiling is the time that the necessary reads would take at the bandwidth of a copy, divided
        by the measured time.
        """
        weights = self._footprint.weights_read(tokens / steps)
        a_step = weights + kv_bytes / steps
        ideal = a_step / self._bandwidth
        return {
            "bytes_a_step": {"weights": weights, "kv": kv_bytes / steps, "all": a_step},
            "bandwidth_bytes_a_second": self._bandwidth,
            "ceiling_step_ms": 1e3 * ideal,
            "ceiling_tokens_per_second": tokens / (ideal * steps),
            "fraction_of_ceiling": ideal / (seconds / steps),
        }

    def _while_full(self, run: Round) -> float | None:
        """Return the tokens per second until the last request got a slot; None if all had one from the beginning."""
        mark = run.full_until
        return mark.tokens / mark.seconds if mark and len(run.answers) > self._options.batch else None

    def _before_tail(self, run: Round) -> dict[str, Any]:
        """Return the figures of the steps until only the requests of the tail were left, including the prompts."""
        assert run.tail_from is not None
        work, mark = self._work, run.tail_from
        drawn = drawn_before_tail(work.lengths, work.tail_rows, mark.tokens)
        kv = self._footprint.kv_read(decode_contexts(self._options.prompt, drawn))
        return self._stretch(len(drawn), kv, mark.tokens, mark.steps, mark.seconds)

    def _tail(self, run: Round) -> dict[str, Any]:
        """Return the figures of the steps after all requests but those of the tail had ended."""
        assert run.tail_from is not None
        rows, mark = self._work.tail_rows, run.tail_from
        tokens, steps, seconds = run.tokens - mark.tokens, run.steps - mark.steps, run.seconds - mark.seconds
        last = self._options.prompt + self._work.lengths[-1] - 1
        kv = self._footprint.kv_read([(last - tokens // rows + 1, last)] * rows)
        return self._stretch(rows, kv, tokens, steps, seconds)

    def _stretch(self, rows: int, kv_bytes: int, tokens: int, steps: int, seconds: float) -> dict[str, Any]:
        """Return the figures of a part of a round, in which `rows` requests ran."""
        found = {"rows": rows, "tokens": tokens, "steps": steps, "seconds": seconds}
        found |= {"tokens_per_second": tokens / seconds, "step_ms": 1e3 * seconds / steps}
        return found | self._ceiling(kv_bytes, tokens, steps, seconds)

    def _rescored(self, run: Round) -> dict[str, Any] | None:
        if not self._options.rescore:
            return None
        rows = chosen_rows(len(run.answers), self._options.rescore)
        self._say(f"scoring {len(rows)} rows again by the plain model")
        return rescore(self._twin, self._work.prompts, run.answers, rows, self._work.sampling)

    def _forked(self, driver: Driver) -> dict[str, Any] | None:
        if self._work.fork is None:
            return None
        count, at = self._work.fork
        self._say(f"forking a sequence {count} times at token {at}")
        return bench_fork(driver, self._work, count, at, self._options.generate)

    def _swapped(self, driver: Driver, plain: Round) -> dict[str, Any]:
        work, options = self._work.rolled(2), self._options
        sets = two_sets(self._model, options.seed)
        stream = SwapStream(driver.core, self._twin, sets, every=options.swap_every, dtype=self._dtype)
        self._say(f"the same requests, with new weights every {options.swap_every:g} s")
        with stream:
            run = driver.run(work.requests("swaps"), between=stream.tick)
        found = swap_figures(
            stream.swaps,
            seconds=run.seconds,
            tokens=run.tokens,
            plain_rate=plain.tokens / plain.seconds,
            copy_seconds=2 * self._footprint.weights / self._bandwidth,
            step_seconds=plain.seconds / plain.steps,
        )
        rows = chosen_rows(len(run.answers), options.rescore)
        self._say(f"replaying {len(rows)} rows under the versions of their tags")
        found |= check_tags(self._twin, sets, work.prompts, run.answers, rows, work.sampling, self._dtype)
        install(self._twin, sets[0])
        return found

    def _peer(self, name: str, rate: float) -> dict[str, Any]:
        self._say(f"the same requests by {PEER_NAMES[name]}")
        found = bench_peer(name, self._twin, self._work, self._options.batch, self._device)
        if found["ran"]:
            found["ratio"] = rate / found["tokens_per_second"]
        return found

    def _engine_config(self) -> EngineConfig:
        options = self._options
        given: dict[str, Any] = {"device": self._device, "graphs": options.graphs, "compile": options.compile}
        # An engine without these settings runs on the device of its model, and has no graphs.
        known = {name: value for name, value in given.items() if name in EngineConfig.__struct_fields__}
        for name in ("graphs", "compile"):
            if given[name] and name not in known:
                raise UserError(f"--{name}: this engine has no such setting")
        config = EngineConfig(slots=options.batch, kv="keep", max_length=self._longest)
        changes = {name: value for name, value in known.items() if value is not None}
        changes |= {n: v for n in ("block_size", "prefill_chunk") if (v := getattr(options, n))}
        config = msgspec.structs.replace(config, **changes)
        return msgspec.structs.replace(config, cache_tokens=_cache_tokens(options, self._work, config.block_size))


PEER_NAMES = {"transformers": "transformers' continuous batching", "generate": "generate on padded batches"}


def _free_memory(device: str) -> None:
    """Release the memory of the engine, so that a peer can take it."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def drawn_before_tail(lengths: list[int], tail_rows: int, tokens: int) -> list[int]:
    """Return how many tokens each row had when only the rows of the tail were left.

    `tokens` is their sum. All rows but those of the tail were complete then.
    """
    ended = lengths[:-tail_rows]
    return ended + [(tokens - sum(ended)) // tail_rows] * tail_rows


def _step_ms(run: Round) -> dict[str, float | None]:
    def split(seconds: float | None) -> float | None:
        return None if seconds is None else 1e3 * seconds / run.steps

    return {
        "all": 1e3 * run.seconds / run.steps,
        "decode": 1e3 * run.decode_seconds / run.decode_steps if run.decode_steps else None,
        "host": split(run.host_seconds),
        "device": split(run.device_seconds),
    }


def _check_model_name(options: EngineBench) -> None:
    if options.model not in SHAPES and not Path(options.model).is_dir():
        raise UserError(f"{options.model} is neither a model directory nor a shape (one of {', '.join(SHAPES)})")


def _device(asked: str) -> str:
    if asked == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch finds no GPU here")
    return asked if asked != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def _load(options: EngineBench, dtype: str, device: str) -> Any:
    if options.model in SHAPES:
        return build_shape(options.model, dtype, device, options.seed)
    weights = "random" if options.random_weights else "load"
    return load_model(options.model, weights=weights, dtype=dtype, seed=options.seed, device=device)


def _longest(options: EngineBench, work: Work) -> int:
    longest = options.prompt + max(work.lengths)
    return max(longest, work.fork[1] + options.generate) if work.fork else longest


def _check_length(model: Any, longest: int) -> None:
    limit = int(getattr(model.config.get_text_config(), "max_position_embeddings", longest))
    if longest > limit:
        raise UserError(f"sequences of {longest} tokens are longer than this model's {limit} positions")


def _cache_tokens(options: EngineBench, work: Work, block_size: int) -> int:
    """Return how many tokens the cache must hold: a full batch of the longest answers, or all forks and their pivot."""
    held = sorted((options.prompt + length for length in work.lengths), reverse=True)[: options.batch]
    forks = [work.fork[1] + options.generate] * (work.fork[0] + 1) if work.fork else []
    # Each sequence needs up to one block more for rounding up, and admission needs one free block.
    return max(sum(part) + block_size * (len(part) + 1) for part in (held, forks))
