"""Compares the embedded engine on a CPU with its peers: vLLM's CPU build, and Hugging Face `generate`.

    python benchmarks/cpu_peers.py examples/smollm2/model --vllm-python .venv-vllm/bin/python

In each round, every peer serves the same requests, one peer after the other, each in a process of its own. Prompts have
48 to 80 tokens, and answers have lognormal lengths. End tokens are ignored, so all peers generate the same number of
tokens. A peer warms up on other requests first. Tokens that only pad a batch do not count. vLLM needs an environment of
its own; `--peers ours hf` leaves vLLM out. The last column is the share of the machine that other processes took
meanwhile (on Linux only). A comparison is meaningful only if this share is close to 0.
"""

from __future__ import annotations

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
Work = list[tuple[list[int], int]]
"""Pairs of a prompt and the length of its answer in tokens."""


def make_work(requests: int, mean: float, longest: int, vocabulary: int, seed: int) -> Work:
    """Return prompts of random tokens, and answer lengths from a lognormal distribution with this mean.

    Lengths above `longest` are cut to `longest`.
    """
    rng = np.random.default_rng(seed)
    sigma = 0.8
    lengths = rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, requests).clip(1, longest).astype(int)
    return [(rng.integers(100, vocabulary, rng.integers(48, 81)).tolist(), int(length)) for length in lengths]


def serve_ours(arguments: argparse.Namespace) -> Callable[[Work], int]:
    """Load the embedded engine, and return a function that serves work and returns the number of tokens."""
    import torch

    from headrace.config.schema import EngineConfig
    from headrace.engines.base import Request, Sampling
    from headrace.engines.embedded.core import EngineCore
    from headrace.models.loading import load_model
    from headrace.models.selfcheck import check_model

    torch.set_num_threads(arguments.threads)
    model = load_model(arguments.model)
    check_model(model)
    config = EngineConfig(slots=arguments.slots, threads=arguments.threads)
    core = EngineCore(model, config, name="engine", max_length=80 + arguments.longest, version=0)

    def serve(work: Work) -> int:
        requests = [
            Request(id=str(i), token_ids=np.array(prompt, np.int32), sampling=Sampling(max_tokens=length, seed=i))
            for i, (prompt, length) in enumerate(work)
        ]
        core.submit(requests)
        tokens = 0
        while core.has_work:
            for delta in core.step():
                tokens += len(delta.token_ids)
                assert np.isfinite(delta.logprobs).all() and not delta.error, delta
        return tokens

    return serve


def serve_hf(arguments: argparse.Namespace) -> Callable[[Work], int]:
    """Load Hugging Face's model, and return a function that serves work with `generate`.

    Each batch is padded to its longest prompt, and runs until its longest answer is complete.
    """
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(arguments.threads)
    model: Any = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).eval()

    def serve(work: Work) -> int:
        tokens = 0
        for first in range(0, len(work), arguments.slots):
            batch = work[first : first + arguments.slots]
            width = max(len(prompt) for prompt, _ in batch)
            ids = torch.zeros(len(batch), width, dtype=torch.long)
            mask = torch.zeros_like(ids)
            for row, (prompt, _) in enumerate(batch):
                ids[row, width - len(prompt) :] = torch.tensor(prompt)
                mask[row, width - len(prompt) :] = 1
            longest = max(length for _, length in batch)
            options = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "eos_token_id": None}
            with torch.inference_mode():
                out = model.generate(ids, attention_mask=mask, max_new_tokens=longest, pad_token_id=0, **options)
            assert out.shape[1] == width + longest, out.shape
            tokens += sum(length for _, length in batch)
        return tokens

    return serve


def serve_vllm(arguments: argparse.Namespace) -> Callable[[Work], int]:
    """Load vLLM's offline engine, and return a function that serves work with it.

    vLLM records the log-probability of every sampled token, as the embedded engine does.
    """
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    llm = LLM(
        model=arguments.model,
        dtype="float32",
        max_num_seqs=arguments.slots,
        max_model_len=96 + arguments.longest,
        enable_prefix_caching=False,
    )

    def serve(work: Work) -> int:
        sampling = [
            SamplingParams(temperature=1.0, max_tokens=length, ignore_eos=True, logprobs=0, detokenize=False, seed=None)
            for _, length in work
        ]
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt, _ in work], sampling, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return serve


def cpu_seconds() -> tuple[float, float]:
    """Return the CPU time so far of all processes, and of the processes of this process session.

    The whole session counts, because vLLM computes in a child process.
    """
    tick = os.sysconf("SC_CLK_TCK")
    user, nice, system, _, _, irq, softirq = map(int, Path("/proc/stat").read_text().split()[1:8])
    ours = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue  # The process has ended.
        if int(fields[3]) == os.getsid(0):
            ours += int(fields[11]) + int(fields[12])
    return (user + nice + system + irq + softirq) / tick, ours / tick


PEERS = {"ours": serve_ours, "vllm": serve_vllm, "hf": serve_hf}


def measure(arguments: argparse.Namespace) -> None:
    """Warm up, serve the work once, and print one line of JSON. This runs in the process of a peer."""
    vocabulary = json.loads((Path(arguments.model) / "config.json").read_text())["vocab_size"]
    serve = PEERS[arguments.peer](arguments)
    serve(make_work(arguments.slots, 4, 8, vocabulary, arguments.seed + 1))
    work = make_work(arguments.requests, arguments.mean, arguments.longest, vocabulary, arguments.seed)
    (all_before, own_before), started = cpu_seconds(), time.perf_counter()
    tokens = serve(work)
    seconds, (all_after, own_after) = time.perf_counter() - started, cpu_seconds()
    taken = ((all_after - all_before) - (own_after - own_before)) / (seconds * (os.cpu_count() or 1))
    assert tokens == sum(length for _, length in work), "a peer ended an answer early"
    print(json.dumps({"peer": arguments.peer, "tokens": tokens, "seconds": seconds, "others": taken}), flush=True)


def run_peer(peer: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run one round of one peer in a process of its own, and return its figures."""
    environment = dict(os.environ, OMP_NUM_THREADS=str(arguments.threads), TOKENIZERS_PARALLELISM="false")
    if peer == "vllm":
        environment |= {"VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_CPU_OMP_THREADS_BIND": f"0-{arguments.threads - 1}"}
        environment |= {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        environment.pop("PYTHONPATH", None)
    python = arguments.vllm_python if peer == "vllm" else sys.executable
    options = [f"--{n}={getattr(arguments, n)}" for n in ("requests", "mean", "longest", "slots", "threads", "seed")]
    command = [python, __file__, arguments.model, f"--peer={peer}", *options]
    done = subprocess.run(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        timeout=DEADLINE,
        check=True,
        start_new_session=True,
    )
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def main() -> None:
    """Print the tokens per second of every peer, and the ratio of the embedded engine to each other peer."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--mean", type=float, default=64)
    parser.add_argument("--longest", type=int, default=256)
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--vllm-python", default=".venv-vllm/bin/python")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--peer", choices=PEERS, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    if arguments.peer:
        measure(arguments)
        return
    rates: dict[str, list[float]] = {peer: [] for peer in arguments.peers}
    taken: dict[str, list[float]] = {peer: [] for peer in arguments.peers}
    for _ in range(arguments.rounds):
        for peer in arguments.peers:
            found = run_peer(peer, arguments)
            rate = found["tokens"] / found["seconds"]
            rates[peer].append(rate)
            taken[peer].append(found["others"])
            print(
                f"{peer}: {found['tokens']} tokens in {found['seconds']:.1f} s, {rate:.1f} tok/s,"
                f" others took {found['others']:.0%}",
                flush=True,
            )
    best = {peer: median(found) for peer, found in rates.items()}
    for peer in best:
        if peer != "ours" and "ours" in best:
            print(f"ours / {peer}: {best['ours'] / best[peer]:.2f}")
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"tokens_per_second": rates, "median": best, "others_took": taken}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
