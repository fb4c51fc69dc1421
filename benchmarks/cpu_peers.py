"""Compares the embedded engine on a CPU with its peers: vLLM's CPU build, and Hugging Face `generate`.

    python benchmarks/cpu_peers.py examples/smollm2/model --vllm-python .venv-vllm/bin/python

In each round, every peer serves the same requests, one peer after the other, each in a process of its own. End tokens
are ignored, so all peers generate the same number of tokens. Tokens that only pad a batch do not count. A peer warms up
on other requests first. vLLM needs an environment of its own; `--peers ours hf` leaves vLLM out. The machine must have
nothing else to do.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

DEADLINE = 1800
"""The time limit of a peer for one round in seconds, including its start."""
REQUESTS, SLOTS = 64, 32
MEAN, LONGEST = 64, 256
SHORTEST_PROMPT, LONGEST_PROMPT = 48, 80
Work = list[tuple[list[int], int]]
"""Pairs of a prompt and the length of its answer in tokens."""


def make_work(requests: int, mean: float, longest: int, vocabulary: int, seed: int) -> Work:
    """Return prompts of random tokens, and lognormal answer lengths with this mean. None is above `longest`."""
    rng = np.random.default_rng(seed)
    sigma = 0.8
    lengths = rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, requests).clip(1, longest).astype(int)
    sizes = (SHORTEST_PROMPT, LONGEST_PROMPT + 1)
    return [(rng.integers(100, vocabulary, rng.integers(*sizes)).tolist(), int(length)) for length in lengths]


def requests_of(work: Work) -> list[Any]:
    """Return the work as requests to an engine."""
    from headrace.engines.base import Request, Sampling

    return [
        Request(id=str(i), token_ids=np.array(prompt, np.int32), sampling=Sampling(max_tokens=length, seed=i))
        for i, (prompt, length) in enumerate(work)
    ]


def serve_ours(model_dir: str, threads: int) -> Callable[[Work], float]:
    """Load the embedded engine, and return a function that serves work and returns the seconds."""
    import torch

    from headrace.bench.engine_rounds import Driver
    from headrace.config.schema import EngineConfig
    from headrace.engines.embedded.core import EngineCore
    from headrace.models.attention import check_model
    from headrace.models.loading import load_model

    torch.set_num_threads(threads)
    model = load_model(model_dir)
    check_model(model)
    config = EngineConfig(slots=SLOTS, threads=threads)
    driver = Driver(EngineCore(model, config, name="engine", max_length=LONGEST_PROMPT + LONGEST, version=0))
    return lambda work: driver.run(requests_of(work)).seconds


def serve_hf(model_dir: str, threads: int) -> Callable[[Work], float]:
    """Load Hugging Face's model, and return a function that serves work with `generate` on padded batches."""
    import torch
    from transformers import AutoModelForCausalLM

    from headrace.bench.engine import padded_generate

    torch.set_num_threads(threads)
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    return lambda work: padded_generate(model, requests_of(work), SLOTS, "cpu")


def serve_vllm(model_dir: str, threads: int) -> Callable[[Work], float]:
    """Load vLLM's offline engine, and return a function that serves work with it.

    vLLM records log-probabilities, as the embedded engine does. Its threads are set by the environment of the process.
    """
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    room = LONGEST_PROMPT + LONGEST + 16
    llm = LLM(model=model_dir, dtype="float32", max_num_seqs=SLOTS, max_model_len=room, enable_prefix_caching=False)

    def serve(work: Work) -> float:
        sampling = [
            SamplingParams(temperature=1.0, max_tokens=length, ignore_eos=True, logprobs=0, detokenize=False, seed=None)
            for _, length in work
        ]
        started = time.perf_counter()
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt, _ in work], sampling, use_tqdm=False)
        seconds = time.perf_counter() - started
        assert [len(output.outputs[0].token_ids) for output in outputs] == [length for _, length in work]
        return seconds

    return serve


PEERS = {"ours": serve_ours, "vllm": serve_vllm, "hf": serve_hf}


def measure(peer: str, model_dir: str, threads: int) -> None:
    """Warm up, serve the work once, and print the tokens per second. This runs in the process of a peer."""
    vocabulary = json.loads((Path(model_dir) / "config.json").read_text())["vocab_size"]
    serve = PEERS[peer](model_dir, threads)
    serve(make_work(SLOTS, 4, 8, vocabulary, seed=1))
    work = make_work(REQUESTS, MEAN, LONGEST, vocabulary, seed=0)
    seconds = serve(work)
    print(sum(length for _, length in work) / seconds, flush=True)


def run_peer(peer: str, given: argparse.Namespace) -> float:
    """Run one round of one peer in a process of its own, and return its tokens per second."""
    environment = dict(os.environ, OMP_NUM_THREADS=str(given.threads), TOKENIZERS_PARALLELISM="false")
    if peer == "vllm":
        environment |= {"VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_CPU_OMP_THREADS_BIND": f"0-{given.threads - 1}"}
        environment |= {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        environment.pop("PYTHONPATH", None)
    python = given.vllm_python if peer == "vllm" else sys.executable
    command = [python, __file__, given.model, f"--serve={peer}", f"--threads={given.threads}"]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=DEADLINE, check=True)
    return float(done.stdout.split()[-1])


def main() -> None:
    """Print the tokens per second of every peer, and the ratio of the embedded engine to each other peer."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--vllm-python", default=".venv-vllm/bin/python")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--serve", choices=PEERS, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    given = parser.parse_args()
    if given.serve:
        measure(given.serve, given.model, given.threads)
        return
    rates: dict[str, list[float]] = {peer: [] for peer in given.peers}
    for _ in range(given.rounds):
        for peer, found in rates.items():
            found.append(run_peer(peer, given))
            print(f"{peer}: {found[-1]:.1f} tokens/s", flush=True)
    best = {peer: median(found) for peer, found in rates.items()}
    for peer in best:
        if peer != "ours" and "ours" in best:
            print(f"ours / {peer}: {best['ours'] / best[peer]:.2f}")
    if given.json:
        given.json.write_text(json.dumps({"tokens_per_second": rates, "median": best}, indent=1) + "\n")


if __name__ == "__main__":
    main()
