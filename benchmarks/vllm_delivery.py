"""Measures how long new weights take from the trainer to the first token of a vLLM server on the same GPU.

    python benchmarks/vllm_delivery.py --vllm-python path/to/vllm/bin/python [--model qwen3-0.6b] [--transport cuda_ipc]

The server decodes `--streams` requests all the time. A version is published from GPU memory, staged, loaded and proved,
and the requests continue under it. The times begin when the trainer calls `publish`, with its canary already scored, as
in `headrace bench delivery`; what that took is `canary`. `announced` is when the manifest is there, `proved` when the
swap is proved, and `first` when the first token of the new version arrives here. `stage` and `swap` are how long the
server fetched and digested the version, and how long loading and proving took. The names with a slash are calls of the
server. The first version is not counted: it maps buffers and loads kernels.
`--most` is the largest median of `first` in seconds; above it the exit code is 1. With `--device cpu` the same code
runs without a GPU, by `shm`.
"""

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from headrace.bench.base import build_shape
from headrace.bench.engine_checks import plain_twin, score_canary
from headrace.bench.shapes import SHAPES
from headrace.config.model_dir import model_facts
from headrace.config.schema import EngineConfig
from headrace.delivery.base import Score, canary_sequence
from headrace.delivery.publisher import Publisher
from headrace.delivery.transports import sender
from headrace.delivery.transports.base import SenderSettings
from headrace.engines.base import Request, Sampling
from headrace.engines.vllm.building import examine
from headrace.engines.vllm.client import VllmClient
from headrace.engines.vllm.engine import VllmEngine
from headrace.engines.vllm.memory import Budget
from headrace.engines.vllm.server import VllmServer
from headrace.models.loading import named_weights
from headrace.types import Float32Array

KEY = "key of a benchmark"
GIB = 1 << 30
PROMPT, LENGTH = 32, 4096
CANARY_TOKENS = 16
START_SECONDS, SECONDS = 500.0, 120.0
CHANGE = 1e-3
"""The standard deviation of the change from one version to the next, relative to each weight."""


class TimedClient(VllmClient):
    """Records how long each call took that is not a stream, by the last part of its path."""

    def __init__(self, url: str, *, slots: int) -> None:
        super().__init__(url, KEY, deadline=SECONDS, slots=slots)
        self.taken: dict[str, float] = {}

    async def call(self, method: str, path: str, body: Any = None, *, timeout: float) -> Any:
        """See `VllmClient.call`."""
        began = time.monotonic()
        try:
            return await super().call(method, path, body, timeout=timeout)
        finally:
            name = body["method"] if path == "/collective_rpc" else path.partition("?")[0].rpartition("/")[2]
            self.taken[name] = self.taken.get(name, 0.0) + time.monotonic() - began


class Streams:
    """Requests that decode all the time, and when the first token of each version arrived."""

    def __init__(self, engine: VllmEngine, count: int, vocabulary: int, max_length: int) -> None:
        self.first: dict[int, float] = {}
        self._engine = engine
        self._arrived = asyncio.Event()
        self._vocabulary = vocabulary
        self._tokens = max_length - PROMPT - 1
        self._tasks = [asyncio.create_task(self._run(number)) for number in range(count)]

    async def _run(self, number: int) -> None:
        rng = np.random.default_rng(number)
        for turn in range(1 << 30):
            prompt = rng.integers(0, self._vocabulary, PROMPT).astype(np.int32)
            sampling = Sampling(max_tokens=self._tokens, seed=number)
            request = Request(id=f"{number}/{turn}", token_ids=prompt, sampling=sampling)
            async for delta in self._engine.generate(request):
                if delta.error:
                    raise SystemExit(f"vllm_delivery.py: {delta.error}")
                for version in set(delta.versions.tolist()):
                    self.first.setdefault(version, time.monotonic())
                self._arrived.set()

    async def of(self, version: int) -> float:
        """Return when the first token of this version arrived."""
        async with asyncio.timeout(SECONDS):
            while version not in self.first:
                self._arrived.clear()
                await self._arrived.wait()
        return self.first[version]

    async def end(self) -> None:
        """End all requests."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def measure(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Start the server, publish the versions, and return the figures."""
    dtype = "bfloat16" if options.device == "cuda" else "float32"
    model = build_shape(options.model, dtype, options.device, 0)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(directory / "model")
    twin = plain_twin(model)
    config = EngineConfig(
        kind="vllm",
        python=options.vllm_python,
        device=options.device,
        slots=options.streams,
        arguments=options.argument,
    )
    server = VllmServer(
        model=directory / "model",
        config=config,
        log=options.log,
        key=KEY,
        max_length=options.max_length,
        weights="random",
        dtype=dtype,
        budget=Budget(0.4, 24 * GIB) if options.device == "cuda" else None,
    )
    started = time.monotonic()
    server.start()
    settings = SenderSettings(run_id="vllm-delivery", directory=directory, device=options.device)
    facts = model_facts(directory / "model", "random")
    canary = canary_sequence(facts.vocabulary, CANARY_TOKENS)
    publisher = Publisher(sender(options.transport, settings), dtype, None, canary)
    rows: list[dict[str, float]] = []
    try:
        await server.ready(START_SECONDS)
        ready = time.monotonic() - started
        client = TimedClient(server.url, slots=options.streams)
        known = await examine(client, vocabulary=facts.vocabulary, dtype=dtype, max_length=options.max_length)
        engine = VllmEngine(
            client, known, name="vllm", slots=options.streams, max_length=options.max_length, deadline=SECONDS
        )
        streams = Streams(engine, options.streams, facts.vocabulary, options.max_length)
        weights = named_weights(model)
        for version in range(1, options.versions + 2):
            with torch.no_grad():
                for weight in weights.values():
                    weight.mul_(1 + CHANGE * version)
            if options.device == "cuda":
                torch.cuda.synchronize()
            scoring = time.monotonic()
            scored = await asyncio.to_thread(score_canary, twin, canary)
            began = time.monotonic()
            published = await asyncio.to_thread(
                publisher.publish, version, version - 1, version, weights, known_score(scored)
            )
            manifest = await asyncio.wrap_future(published)
            announced = time.monotonic() - began
            client.taken.clear()
            proof = await engine.load(manifest)
            proved = time.monotonic() - began
            if not proof.accepted:
                raise SystemExit(f"vllm_delivery.py: version {version} was not proved: {proof.reason}")
            publisher.acknowledged(version)
            first = await streams.of(version) - began
            row = {"canary": began - scoring, "announced": announced}
            row |= {"stage": proof.stage_seconds, "swap": proof.swap_seconds}
            rows.append({**row, "proved": proved, "first": first, "canary_error": proof.canary_error})
            shown = rows[-1] | {f"/{name}": value for name, value in client.taken.items()}
            print("  ".join(f"{name} {value:.4f}" for name, value in shown.items()), flush=True)
            await asyncio.sleep(options.pause)
        await streams.end()
        await engine.close()
    finally:
        await server.stop()
        publisher.close()
    counted = rows[1:]
    medians = {name: median(row[name] for row in counted) for name in counted[0]}
    about = {"model": options.model, "transport": options.transport, "ready_seconds": ready}
    return {**about, "median": medians, "rows": rows}


def known_score(scored: Float32Array) -> Score:
    """Return a score of the canary that was computed before."""
    return lambda _: scored


def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(description="Measure weights from a trainer to a vLLM server's first token.")
    parser.add_argument("--vllm-python", required=True, help="the interpreter of vLLM's environment")
    parser.add_argument("--model", default="qwen3-0.6b", choices=sorted(SHAPES))
    parser.add_argument("--transport", default="", help="cuda_ipc on a GPU, shm on a CPU by default")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--streams", type=int, default=64, help="requests that decode all the time")
    parser.add_argument("--versions", type=int, default=10)
    parser.add_argument("--max-length", type=int, default=LENGTH)
    parser.add_argument("--pause", type=float, default=1.0, help="seconds between two versions")
    parser.add_argument("--argument", action="append", default=[], help="one more argument of the server")
    parser.add_argument("--log", type=Path, default=Path("vllm_delivery.log"), help="the server's log")
    parser.add_argument("--most", type=float, default=0.0, help="the largest median of `first` in seconds; 0: any")
    options = parser.parse_args()
    options.transport = options.transport or ("cuda_ipc" if options.device == "cuda" else "shm")
    directory = Path(tempfile.mkdtemp(prefix="headrace-bench-"))
    try:
        found = asyncio.run(measure(options, directory))
    finally:
        shutil.rmtree(directory)
    print(json.dumps(found))
    late = options.most and found["median"]["first"] > options.most
    print(f"publish to first token: {found['median']['first'] * 1000:.1f} ms (median){' MISSED' if late else ''}")
    sys.exit(1 if late else 0)


if __name__ == "__main__":
    main()
