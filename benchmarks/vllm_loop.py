"""Compares the embedded engine with a vLLM server: consumed tokens per second of whole runs of one workload.

    python benchmarks/vllm_loop.py --vllm-python path/to/vllm/bin/python [--model qwen3-0.6b] [--in-flight 256]

Every run is real: engine and trainer are processes of their own on one GPU, and every version is delivered and proved.
The workload is that of `headrace bench loop`: prompts of one length, answers whose lengths are fixed in advance, and
random rewards. A token is counted when it is trained. The first versions and the last ones, which are trained while
nothing is generated any more, are not counted. `--device cpu` runs the same with a tiny model.
"""

import argparse
import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from headrace.bench import workload
from headrace.bench.base import build_shape, free_memory
from headrace.errors import HeadraceError


def engines(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return the [engine] sections that are compared, by name."""
    vllm = {"kind": "vllm", "python": options.vllm_python, "kv": "recompute"}
    return {
        "embedded": {},
        "vLLM": {**vllm, "arguments": options.argument},
    }


def measure(name: str, engine: dict[str, Any], model: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Make one run and return its figures."""
    depth = options.depth
    warm = workload.WARM_VERSIONS + depth
    config = workload.run_config(
        options.keep,
        "".join(letter if letter.isalnum() else "-" for letter in name),
        versions=warm + options.versions + depth,
        depth=depth,
        prompt=options.prompt,
        lengths=options.lengths,
        groups=options.in_flight // options.group_size,
        group_size=options.group_size,
        model={"path": str(model), "weights": "load", "dtype": options.dtype},
        engine={"slots": options.in_flight, "device": options.device, **engine},
        training={"device": options.device},
        pipeline={"stall_seconds": 300.0, "start_seconds": 400.0},
    )
    began = time.monotonic()
    found, _ = workload.measure_run(config, depth, warm)
    return {**found, "wall_seconds": time.monotonic() - began}


def main() -> None:
    """Make the runs, and print the table."""
    parser = argparse.ArgumentParser(description="Compare the embedded engine and a vLLM server in whole runs.")
    parser.add_argument("--vllm-python", required=True, help="the interpreter of vLLM's environment")
    parser.add_argument("--model", default="qwen3-0.6b", help="a shape of `headrace bench`")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--in-flight", type=int, default=256)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--lengths", default="equal:512")
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--versions", type=int, default=4)
    parser.add_argument("--argument", action="append", default=[], help="one more argument of the server")
    parser.add_argument("--only", default="", help="only the engines whose names contain this text")
    parser.add_argument("--keep", type=Path, default=None, help="where the run directories are left")
    options = parser.parse_args()
    options.dtype = "bfloat16" if options.device == "cuda" else "float32"
    scratch = Path(tempfile.mkdtemp(prefix="headrace-bench-"))
    options.keep = options.keep or scratch
    rows: dict[str, dict[str, Any]] = {}
    try:
        model = scratch / "model"
        build_shape(options.model, options.dtype, options.device, 0).save_pretrained(model)
        free_memory(options.device)
        workload.write_tokenizer(model)
        for name, engine in engines(options).items():
            if options.only not in name:
                continue
            try:
                rows[name] = measure(name, engine, model, options)
                print(json.dumps({"engine": name, **rows[name]}), flush=True)
            except HeadraceError as error:
                print(json.dumps({"engine": name, "error": str(error)}), flush=True)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    print("\n| engine | consumed tokens/s | engine idle | trainer idle | lag, mean | whole run, s |")
    print("|---|---|---|---|---|---|")
    for name, row in rows.items():
        print(
            f"| {name} | {row['tokens_per_second']:,.0f} | {row['engine_idle_fraction']:.2f} "
            f"| {row['trainer_idle_fraction']:.2f} | {row['lag_mean']:.2f} | {row['wall_seconds']:.0f} |"
        )


if __name__ == "__main__":
    main()
