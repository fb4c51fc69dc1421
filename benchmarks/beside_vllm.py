"""Compares the embedded engine with vLLM on the same GPU, model by model, and prints one table.

    python benchmarks/beside_vllm.py qwen3-0.6b:256 qwen3-8b:256 qwen3-30b-a3b:128 --vllm-python .venv-vllm/bin/python

An argument is MODEL:BATCH; a model is a named shape or a model directory. Both engines serve as many requests as the
batch, with prompts of the same random tokens, answers of one length, temperature 1 and recorded log-probabilities, one
engine after the other, each in a process of its own, after a warm-up. Prompts are included in the time. A shape has
random weights: each engine draws its own, unless `--same-weights` writes them to a directory first. Where both have the
same weights, the log-probabilities of vLLM are scored again by the plain model in float32, as those of the embedded
engine always are. vLLM needs an environment of its own. The exit code is 1 if a part fails.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

WARM_TOKENS = 16
"""The length of the answers of the warm-up."""
SHARE = 0.01
"""The share of rows that are scored again."""


class Work(NamedTuple):
    """What both engines serve."""

    model: str
    batch: int
    prompt: int
    generate: int

    @classmethod
    def parse(cls, text: str, prompt: int, generate: int) -> "Work":
        """Return the work of an argument MODEL:BATCH. Raises `SystemExit` with one line if it has another form."""
        model, _, batch = text.rpartition(":")
        if not model or not batch.isdecimal() or int(batch) < 1:
            raise SystemExit(f"beside_vllm.py: {text}: must be MODEL:BATCH, such as qwen3-0.6b:256")
        return cls(model, int(batch), prompt, generate)

    def prompts(self, vocabulary: int) -> np.ndarray:
        """Return the prompts, [batch, prompt]."""
        return np.random.default_rng(0).integers(0, vocabulary, (self.batch, self.prompt)).astype(np.int32)


def write_shape(name: str, directory: Path, *, weights: bool) -> None:
    """Write the configuration of a shape, so that vLLM knows its architecture, and its random weights if asked for."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from headrace.bench.shapes import SHAPES

    if weights:
        import torch

        from headrace.bench.base import build_shape

        device = "cuda" if torch.cuda.is_available() else "cpu"
        build_shape(name, "bfloat16", device, seed=0).save_pretrained(directory)
    config = SHAPES[name]()
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    config.dtype = "bfloat16"
    config.save_pretrained(directory)


def serve_vllm(work: Work, answers: Path, *, random_weights: bool) -> None:
    """Serve the work with vLLM's offline engine, print the figures, and write the answers. This runs in its process."""
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    config = json.loads((Path(work.model) / "config.json").read_text())
    room = work.prompt + work.generate + 16
    llm = LLM(
        model=work.model,
        dtype="bfloat16",
        load_format="dummy" if random_weights else "auto",
        skip_tokenizer_init=True,
        max_num_seqs=work.batch,
        max_model_len=room,
        enable_prefix_caching=False,
    )
    prompts = work.prompts(config["vocab_size"])

    def serve(rows: np.ndarray, length: int) -> tuple[float, Any]:
        sampling = SamplingParams(temperature=1.0, max_tokens=length, ignore_eos=True, logprobs=0, detokenize=False)
        given = [{"prompt_token_ids": row.tolist()} for row in rows]
        started = time.perf_counter()
        found = [output.outputs[0] for output in llm.generate(given, sampling, use_tqdm=False)]
        return time.perf_counter() - started, found

    serve(np.roll(prompts, 1, axis=1), WARM_TOKENS)
    seconds, outputs = serve(prompts, work.generate)
    tokens = np.array([output.token_ids for output in outputs], np.int32)
    if tokens.shape != (work.batch, work.generate):
        raise SystemExit(f"vLLM gave answers of the form {tokens.shape}, not {(work.batch, work.generate)}")
    logprobs = [[step[token].logprob for step, token in zip(o.logprobs, o.token_ids, strict=True)] for o in outputs]
    np.savez(answers, tokens=tokens, logprobs=np.array(logprobs, np.float32))
    print(json.dumps({"tokens_per_second": tokens.size / seconds}), flush=True)


def rescore_answers(work: Work, answers: Path) -> None:
    """Print the error of the log-probabilities in this file, by the model of the work. This runs in its own process."""
    import torch

    from headrace.bench.base import load, vocabulary_of
    from headrace.bench.engine_checks import chosen_rows, plain_twin, rescore
    from headrace.engines.base import Delta, Request, Sampling

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load(work.model, "bfloat16", device, seed=0)
    prompts, found = work.prompts(vocabulary_of(model)), np.load(answers)
    requests = [
        Request(id=str(i), token_ids=row, sampling=Sampling(max_tokens=work.generate)) for i, row in enumerate(prompts)
    ]
    deltas = [
        Delta(id=str(i), token_ids=tokens, logprobs=logprobs, versions=np.zeros_like(tokens))
        for i, (tokens, logprobs) in enumerate(zip(found["tokens"], found["logprobs"], strict=True))
    ]
    print(json.dumps(rescore(plain_twin(model), chosen_rows(requests, deltas, SHARE))), flush=True)


def run(command: list[str], log: Path, seconds: float, **environment: str) -> dict[str, Any] | None:
    """Run a command and return the JSON object in its last line; None, with a line on the terminal, if it failed."""
    with log.open("w") as errors:
        try:
            done = subprocess.run(
                command,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                timeout=seconds,
                env=dict(os.environ, **environment),
            )
            failure = f"exit code {done.returncode}" if done.returncode else ""
        except subprocess.TimeoutExpired:
            failure = f"not done within {seconds:g} s"
    if failure:
        print(f"failed: {' '.join(command[:6])} ...: {failure} (see {log})", file=sys.stderr, flush=True)
        return None
    text = done.stdout
    found: dict[str, Any] = json.loads(text if text.lstrip().startswith("{") else text.splitlines()[-1])
    return found


def compare(work: Work, given: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Measure both engines on one model. A figure that could not be measured is None."""
    name, directory = work.model.replace("/", "_"), Path(work.model)
    random_weights = False
    if not directory.is_dir():
        directory, random_weights = scratch / name, not given.same_weights
        write_shape(work.model, directory, weights=given.same_weights)
    served = work.model if random_weights else str(directory)
    sizes = [f"--prompt={work.prompt}", f"--generate={work.generate}"]
    logs: Path = given.logs or scratch
    bench = [sys.executable, "-m", "headrace", "bench", "engine", served, "--json", "--dtype=bfloat16"]
    log = logs / f"{name}-{work.batch}-headrace.log"
    ours = run([*bench, f"--batch={work.batch}", *sizes, f"--rescore={SHARE}"], log, given.seconds)
    answers = scratch / f"{name}-{work.batch}.npz"
    itself = [__file__, f"{directory}:{work.batch}", *sizes, f"--answers={answers}"]
    serving = [given.vllm_python, *itself, "--serve", *(["--random-weights"] if random_weights else [])]
    quiet = {"VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    theirs = run(serving, logs / f"{name}-{work.batch}-vllm.log", given.seconds, **quiet)
    scored = None
    if theirs and not random_weights:
        log = logs / f"{name}-{work.batch}-rescore.log"
        scored = run([sys.executable, *itself, "--rescore"], log, given.seconds)
    return {
        "model": work.model,
        "batch": work.batch,
        "headrace": ours and ours["tokens_per_second"],
        "vllm": theirs and theirs["tokens_per_second"],
        "headrace_error": ours and ours["rescore"]["mean_error"],
        "vllm_error": scored and scored["mean_error"],
        "plain_error": ours and ours["rescore"]["plain_mean_error"],
        "failed": ours is None or theirs is None or (scored is None and not random_weights),
    }


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Return the lines of a Markdown table. What was not measured is empty."""

    def number(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    lines = [
        "| model, batch | Headrace, tokens/s | vLLM, tokens/s | ratio | error: Headrace | vLLM | plain model |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        both = row["headrace"] is not None and row["vllm"] is not None
        cells = [
            f"`{row['model']}`, {row['batch']}",
            *(number(row[name], ",.0f") for name in ("headrace", "vllm")),
            number(row["headrace"] / row["vllm"] if both else None, ".2f"),
            *(number(row[name], ".4f") for name in ("headrace_error", "vllm_error", "plain_error")),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main(arguments: list[str] | None = None) -> int:
    """Compare all models, print the table, and return the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("work", nargs="+", metavar="MODEL:BATCH")
    parser.add_argument("--vllm-python", default=".venv-vllm/bin/python")
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--generate", type=int, default=512)
    parser.add_argument("--same-weights", action="store_true", help="write the weights of shapes to disk, for both")
    parser.add_argument("--seconds", type=float, default=600.0, help="the time limit of one engine on one model")
    parser.add_argument("--logs", type=Path, help="keep the logs of the engines in this directory")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--answers", type=Path, help=argparse.SUPPRESS)
    for hidden in ("--serve", "--rescore", "--random-weights"):
        parser.add_argument(hidden, action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    works = [Work.parse(text, given.prompt, given.generate) for text in given.work]
    if given.serve:
        serve_vllm(works[0], given.answers, random_weights=given.random_weights)
        return 0
    if given.rescore:
        rescore_answers(works[0], given.answers)
        return 0
    from headrace.bench.shapes import SHAPES

    for work in works:
        if work.model not in SHAPES and not Path(work.model).is_dir():
            raise SystemExit(f"beside_vllm.py: {work.model}: neither a directory nor one of {', '.join(SHAPES)}")
    if given.logs:
        given.logs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        rows = [compare(work, given, Path(scratch)) for work in works]
    print("\n".join(table(rows)))
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")
    return int(any(row["failed"] for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
