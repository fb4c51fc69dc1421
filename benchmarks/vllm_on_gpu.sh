#!/usr/bin/env bash
# Shows vLLM on a GPU: the tests on a server, publish to first token, a table of whole runs, and SmolLM2-135M that learns.
#
#     OUT=logs HEADRACE_VLLM_PYTHON=path/to/vllm/bin/python benchmarks/vllm_on_gpu.sh [start contract logprobs delivery loop smollm2 fp8]
#
# The parts run one after the other, each with a time limit; without arguments all but fp8 run. "start contract",
# "logprobs delivery" and "loop smollm2" end within ten minutes each, whatever happens. A part that fails does not end
# the others. Each part leaves OUT/PART.log; the end of the servers' own logs is at its end if the part failed.
# Where vLLM is not installed but unpacked into a folder, VLLM_SITE=FOLDER (or several, with colons) takes the place of
# HEADRACE_VLLM_PYTHON: a small script is written that runs PYTHON (by default python3) with these folders and with the
# plugin of this checkout.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${OUT:?a folder for the logs}
mkdir -p "$out"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
python=${PYTHON:-python3}
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=4 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1

if [ -n "${VLLM_SITE:-}" ]; then
    # vLLM finds plugins by the entry points of installed packages.
    mkdir -p "$scratch/plugin/headrace-0.dist-info"
    printf 'Metadata-Version: 2.1\nName: headrace\nVersion: 0\n' > "$scratch/plugin/headrace-0.dist-info/METADATA"
    printf '[vllm.general_plugins]\nheadrace = headrace_vllm_plugin:register\n' > "$scratch/plugin/headrace-0.dist-info/entry_points.txt"
    printf '#!/bin/sh\nPYTHONPATH=%s exec %s "$@"\n' "$scratch/plugin:$PWD/src:$VLLM_SITE" "$(command -v "$python")" > "$scratch/python"
    chmod +x "$scratch/python"
    export HEADRACE_VLLM_PYTHON=$scratch/python
fi
vllm=${HEADRACE_VLLM_PYTHON:?the interpreter of an environment with vLLM, or VLLM_SITE}

part() {  # NAME SECONDS COMMAND...
    local name=$1 seconds=$2 began=$SECONDS
    shift 2
    timeout --kill-after=20 "$seconds" "$@" > "$out/$name.log" 2>&1
    local code=$?
    if [ $code -ne 0 ]; then
        find "$scratch" -name 'vllm*.log' -exec sh -c 'echo "== $1"; tail -n 60 "$1"' _ {} \; >> "$out/$name.log" 2>&1
    fi
    echo "== $name: exit code $code, $((SECONDS - began)) s"
    tail -n 12 "$out/$name.log"
}

start() {  # What is there, and whether a server starts at all: the cheapest thing that can fail.
    part start 80 sh -c "nvidia-smi; $python -c 'import torch, transformers; print(torch.__version__, transformers.__version__, torch.cuda.get_device_name())'
        $vllm -c 'import vllm, torch, vllm.entrypoints.openai.api_server, uvloop, headrace_vllm_plugin as p; from importlib.metadata import entry_points; print(vllm.__version__, torch.__version__, p.__file__, list(entry_points(group=\"vllm.general_plugins\")))'"
}

contract() {
    part contract 450 "$python" -m pytest -m '' --maxfail 8 -s -p no:cacheprovider --basetemp "$scratch/pytest" tests/gpu/test_vllm_gpu.py -k "not 16_bits"
}

logprobs() {
    part logprobs 180 "$python" -m pytest -m '' -s -p no:cacheprovider --basetemp "$scratch/pytest" tests/gpu/test_vllm_gpu.py -k 16_bits
}

delivery() {
    part delivery 225 "$python" benchmarks/vllm_delivery.py --vllm-python "$vllm" --log "$scratch/vllm-delivery.log" --max-length 1024 --versions 8 --most 0.15
}

loop() {
    part loop 340 "$python" benchmarks/vllm_loop.py --vllm-python "$vllm" --keep "$scratch/loop" --versions 4
}

smollm2() {  # examples/smollm2/fetch.py first.
    part smollm2 220 "$python" -m headrace train examples/smollm2/smollm2.toml --set run.directory="$scratch/smollm2" \
        --set engine.kind=vllm --set engine.python="$vllm" --set engine.count=2 --set engine.slots=128 \
        --set 'engine.arguments=["--enforce-eager"]' \
        --set model.dtype=bfloat16 --set buffer.groups=32 --set buffer.depth=2 --set run.versions=40 \
        --set evaluate.prompts=500 --set pipeline.start_seconds=200 --set observe.display=plain
}

fp8() {  # The same delivery to a server that quantises what it loads: only the canary can check that.
    part fp8 180 "$python" benchmarks/vllm_delivery.py --vllm-python "$vllm" --log "$scratch/vllm-fp8.log" --versions 3 \
        --argument=--quantization --argument=fp8
}

for name in "${@:-start contract logprobs delivery loop smollm2}"; do
    for each in $name; do
        "$each"
    done
done
