"""Compares the embedded engine on a CPU with its peers: vLLM's CPU build, and Hugging Face `generate`.

    python benchmarks/cpu_peers.py examples/smollm2/model --vllm-python .venv-vllm/bin/python

`headrace bench engine --peer generate` measures the first and the last. vLLM then serves the same prompts and answer
lengths in an environment of its own. End tokens are ignored, so all generate the same number of tokens, and each warms
up on other requests first. Tokens that only pad a batch do not count. The machine must have nothing else to do.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

DEADLINE = 1800
"""The time limit of each of the two processes in seconds, including its start."""
PROMPT, MEAN, LONGEST = 64, 64, 256
REQUESTS, SLOTS = 64, 32
Work = list[tuple[list[int], int]]
"""Pairs of a prompt and the length of its answer in tokens."""


def serve_vllm(model: str) -> None:
    """Serve the work that is on the standard input, and print its seconds. This runs in vLLM's environment.

    vLLM records the log-probability of every sampled token, as the embedded engine does.
    """
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    work: Work = json.load(sys.stdin)
    llm = LLM(
        model=model,
        dtype="float32",
        max_num_seqs=SLOTS,
        max_model_len=PROMPT + LONGEST + 16,
        enable_prefix_caching=False,
    )

    def serve(work: Work) -> None:
        sampling = [
            SamplingParams(temperature=1.0, max_tokens=length, ignore_eos=True, logprobs=0, detokenize=False, seed=None)
            for _, length in work
        ]
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt, _ in work], sampling, use_tqdm=False)
        assert [len(output.outputs[0].token_ids) for output in outputs] == [length for _, length in work]

    serve([(prompt[::-1], 4) for prompt, _ in work[:SLOTS]])
    started = time.perf_counter()
    serve(work)
    print(time.perf_counter() - started, flush=True)


def run(command: list[str], environment: dict[str, str], given: str = "") -> str:
    """Run a process, and return what it printed."""
    return subprocess.run(
        command, env=environment, input=given, stdout=subprocess.PIPE, text=True, timeout=DEADLINE, check=True
    ).stdout


def main() -> None:
    """Print the tokens per second of the engine and of its peers, and the ratio of the engine to each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--vllm-python", default=".venv-vllm/bin/python", help='"" leaves vLLM out')
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve_vllm(given.model)
        return
    environment = dict(os.environ, OMP_NUM_THREADS=str(given.threads), TOKENIZERS_PARALLELISM="false")
    options = {"batch": SLOTS, "requests": REQUESTS, "prompt": PROMPT, "lengths": f"lognormal:{MEAN}:{LONGEST}"}
    options |= {"device": "cpu", "threads": given.threads, "peer": "generate", "rescore": 0}
    arguments = [f"--{name}={value}" for name, value in options.items()]
    command = [sys.executable, "-m", "headrace", "bench", "engine", given.model, "--json", *arguments]
    found = json.loads(run(command, environment))
    rates = {"Headrace": found["tokens_per_second"], "generate": found["peers"]["generate"]["tokens_per_second"]}
    if given.vllm_python:
        environment |= {"VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_CPU_OMP_THREADS_BIND": f"0-{given.threads - 1}"}
        environment |= {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        environment.pop("PYTHONPATH", None)
        command = [given.vllm_python, str(Path(__file__)), given.model, "--serve"]
        seconds = float(run(command, environment, json.dumps(made_work(given.model))).split()[-1])
        rates["vLLM"] = found["generated_tokens"] / seconds
    for name, rate in rates.items():
        print(f"{name}: {rate:.1f} tokens/s, ours over it {rates['Headrace'] / rate:.2f}")


def made_work(model: str) -> Work:
    """Return the prompts and lengths of `headrace bench engine` with these options."""
    from headrace.bench.engine_rounds import make_requests
    from headrace.bench.options import EngineBench

    vocabulary = json.loads((Path(model) / "config.json").read_text())["vocab_size"]
    lengths = f"lognormal:{MEAN}:{LONGEST}"
    options = EngineBench(model=model, batch=SLOTS, requests=REQUESTS, prompt=PROMPT, lengths=lengths)
    requests = make_requests(options, vocabulary)
    return [(request.token_ids.tolist(), request.sampling.max_tokens) for request in requests]


if __name__ == "__main__":
    main()
