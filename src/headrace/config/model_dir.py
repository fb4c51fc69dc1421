"""What is known about a model directory without loading the model: its completeness, size and context length.

The files come from somewhere else, and may be cut, empty or something else than their names say. Every number in them
is checked before it is used, so a broken file is one `ModelError`, which names the file.
"""

import json
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import DecodeError, Struct, ValidationError, convert
from msgspec.json import decode

from headrace.errors import ModelError, one_line

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SHARDS = Path("trainer") / "shards"
"""The folder in which checkpoints of an older version keep the shards of several ranks, with a pickled index."""


TOKENIZER = "tokenizer.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
"""The weights in one file, or the list of the files that hold them. If both are there, transformers takes the first."""
LARGEST_HEADER = 100_000_000
"""The limit of safetensors itself, in bytes."""
_SIZES = {"num_hidden_layers": 1 << 14} | dict.fromkeys(
    (
        "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size", "num_local_experts",
        "num_experts", "moe_intermediate_size", "intermediate_size", "max_position_embeddings",
    ),
    1 << 40,
)  # fmt: skip
"""The sizes in a model's configuration that are used here, and a number that none of them reaches."""
_BITS = {"BOOL": 8, "U8": 8, "I8": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32}
_BITS |= {"F64": 64, "I64": 64, "U64": 64, "C64": 64}


class _Tensor(Struct, frozen=True):
    """The entry of one tensor in the header of a safetensors file."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class ModelFacts(Struct, frozen=True, kw_only=True):
    """The figures of a model, read from its files."""

    architecture: str
    parameters: int
    layers: int
    kv_bytes_per_token: int
    """The bytes of keys and values per token, in float32."""
    vocabulary: int
    max_positions: int
    hidden: int = 0
    experts: int = 0
    """The number of experts in a layer; 0 for a model without experts."""


def check_model_dir(path: Path, weights: str, *, tokenizer: bool = False, key: str = "[model] path") -> dict[str, Any]:
    """Return the directory's config. Raises `ModelError`, which names `key` and says what is missing."""
    if not path.is_dir():
        raise ModelError(f"{key}: {path} is not a directory")
    file = path / "config.json"
    if not file.is_file():
        raise ModelError(f"{key}: {path} has no config.json")
    try:
        config = read_object(file)
        if not isinstance(config.get("model_type"), str):
            raise ModelError(f"{file} has no model_type")
        _check_sizes(path, config, weight_tensors(path) if weights == "load" else {})
    except ModelError as error:
        raise ModelError(f"{key}: {error}") from error
    if weights == "load" and not any(path.glob("*.safetensors")):
        if (path / SHARDS).is_dir():
            raise ModelError(f"{key}: {path} has shards with a pickled index (headrace convert RUN_DIR writes it anew)")
        raise ModelError(f'{key}: {path} has no *.safetensors weights (or set [model] weights = "random")')
    if tokenizer and not (path / TOKENIZER).is_file():
        raise ModelError(f"{key}: {path} has no {TOKENIZER}")
    return config


def weights_stamp(path: Path) -> str:
    """Return a text that differs when the files of a model's weights were replaced by others."""
    files = sorted(path.glob("*.safetensors"))
    return " ".join(f"{file.name}:{file.stat().st_size}:{file.stat().st_mtime_ns}" for file in files)


def check_teacher(path: Path, model: Path, weights: str = "load", *, key: str = "[algorithm] teacher") -> None:
    """Raise `ModelError` unless the teacher's directory is complete and the teacher knows the model's tokens.

    Every token of the model's tokenizer must be the same token of the teacher's. Embeddings may have more rows than the
    tokenizer has tokens, but the teacher must have a row for every row of the model. A teacher's directory without a
    tokenizer is taken as it is, if both have as many rows. Other models that read the model's tokens, such as reward
    models, are checked in the same way. `key` is the key of the configuration that names the teacher.
    """
    theirs, ours = (
        text_config(config).get("vocab_size") or 0
        for config in (check_model_dir(path, "load", key=key), check_model_dir(model, weights))
    )
    if not (path / TOKENIZER).is_file():
        if theirs != ours:
            raise ModelError(f"{key}: {path} has a vocabulary of {theirs} tokens, the model one of {ours}")
        return
    check_tokens(path, model, key)
    if theirs < ours:
        raise ModelError(
            f"{key}: {path} has an embedding of {theirs} rows, the model one of {ours}; the teacher could not score "
            "every token that the model can draw"
        )


def check_tokens(path: Path, model: Path, key: str) -> None:
    """Raise `ModelError` unless every token of the model's tokenizer is the same token of the other tokenizer."""
    known = {id: token for token, id in vocabulary(path, key).items()}
    for token, id in sorted(vocabulary(model, "[model] path").items(), key=lambda pair: pair[1]):
        if known.get(id) != token:
            there = f"is {known[id][:80]!r} there" if id in known else "does not exist there"
            raise ModelError(f"{key}: {path} has another tokenizer: token {id}, {token[:80]!r} in the model, {there}")


def vocabulary(path: Path, key: str) -> dict[str, int]:
    """Return the id of every token of the directory's tokenizer."""
    found: dict[str, int] = load_tokenizer(path, key).get_vocab(with_added_tokens=True)
    return found


def load_tokenizer(path: Path, key: str) -> "Tokenizer":
    """Return the directory's tokenizer. Raises `ModelError` that begins with `key` if it cannot be read."""
    from tokenizers import Tokenizer  # loaded late: most commands need no tokenizer

    try:
        tokenizer: Tokenizer = Tokenizer.from_file(str(path / TOKENIZER))
    except Exception as error:  # the library raises bare Exceptions
        raise ModelError(f"{key}: {path / TOKENIZER} cannot be read: {one_line(str(error), 200)}") from error
    return tokenizer


def model_facts(path: Path, weights: str) -> ModelFacts:
    """Return figures for estimates. Parameters are counted in the weights' headers, or else derived from the config."""
    config = text_config(check_model_dir(path, weights))
    hidden, layers, vocabulary = (config.get(name) or 0 for name in ("hidden_size", "num_hidden_layers", "vocab_size"))
    heads = config.get("num_attention_heads") or 1
    kv_heads = config.get("num_key_value_heads") or heads
    head = config.get("head_dim") or hidden // heads
    experts = config.get("num_local_experts") or config.get("num_experts") or 0
    parameters = sum(weight_tensors(path).values()) if weights == "load" else 0
    if not parameters:
        inner = config.get("moe_intermediate_size") or config.get("intermediate_size") or 4 * hidden
        attention = hidden * head * (2 * heads + 2 * kv_heads)
        mlp = 3 * hidden * inner * max(experts, 1) + hidden * experts
        embeddings = vocabulary * hidden * (1 if config.get("tie_word_embeddings") else 2)
        parameters = layers * (attention + mlp + 2 * hidden) + embeddings + hidden
    return ModelFacts(
        architecture=_architecture(config),
        parameters=parameters,
        layers=layers,
        kv_bytes_per_token=2 * layers * kv_heads * head * 4,
        vocabulary=vocabulary,
        max_positions=config.get("max_position_embeddings") or 0,
        hidden=hidden,
        experts=experts,
    )


def read_object(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file of a model. Raises `ModelError` if there is something else in the file."""
    try:
        found = json.loads(file.read_bytes())
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror}") from error
    except RecursionError as error:
        raise ModelError(f"{file} is nested too deeply") from error
    except ValueError as error:
        raise ModelError(f"{file} is not JSON: {one_line(str(error), 200)}") from error
    if not isinstance(found, dict):
        raise ModelError(f"{file} does not hold a JSON object")
    return found


def weight_tensors(path: Path) -> dict[str, int]:
    """Return the names of the tensors in the weight files of a directory, and their numbers of elements.

    The files are those that transformers reads. All of them must be whole, and hold the tensors that an index names.
    Without such files there are no tensors.
    """
    if (path / WEIGHTS).is_file() or not (path / INDEX).is_file():
        if not (path / WEIGHTS).is_file() and any(path.glob("*.safetensors")):
            raise ModelError(f"{path} has neither {WEIGHTS} nor {INDEX}")
        return read_header(path / WEIGHTS) if (path / WEIGHTS).is_file() else {}
    try:
        places = convert(read_object(path / INDEX).get("weight_map"), dict[str, str])
    except ValidationError as error:
        raise ModelError(f"{path / INDEX} has no weight_map") from error
    found: dict[str, int] = {}
    for name in sorted(set(places.values())):
        file = path / name
        if Path(name).name != name or "\0" in name or not file.is_file():
            raise ModelError(f"{path / INDEX} names {name!r}, and there is no such file")
        held = read_header(file)
        if missing := [tensor for tensor, place in places.items() if place == name and tensor not in held]:
            raise ModelError(f"{file} does not hold {missing[0]}, which {INDEX} says")
        found |= held
    return found


def read_header(file: Path) -> dict[str, int]:
    """Return the names of the tensors in a safetensors file, and their numbers of elements.

    Raises `ModelError` unless the header describes all bytes of the file. The tensors themselves are not read.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            start = opened.read(8)
            length = int.from_bytes(start, "little")
            if start == b"version ":
                raise ModelError(f"{file} is a pointer of git-lfs and not the weights (git lfs pull fetches them)")
            if size < 8 or length > min(size - 8, LARGEST_HEADER):
                raise ModelError(f"{file} is not a whole safetensors file: it has {size} bytes")
            header = decode(opened.read(length), type=dict[str, dict[str, Any]])
        tensors = {name: convert(entry, _Tensor) for name, entry in header.items() if name != "__metadata__"}
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror}") from error
    except (DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(f"{file} is not a safetensors file: its header is damaged") from error
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].data_offsets):
        begin, stop = tensor.data_offsets
        bits = _BITS.get(tensor.dtype)
        whole = bits is None or prod(tensor.shape) * bits == 8 * (stop - begin)
        if begin != end or stop < begin or min(tensor.shape, default=0) < 0 or not whole:
            raise ModelError(f"{file} is damaged: its header is wrong about {one_line(name, 80)}")
        end = stop
    if 8 + length + end != size:
        raise ModelError(f"{file} is not whole: it has {size} bytes, and its header describes {8 + length + end}")
    return {name: prod(tensor.shape) for name, tensor in tensors.items()}


def _check_sizes(path: Path, config: dict[str, Any], tensors: dict[str, int]) -> None:
    """Raise `ModelError` for a size in the configuration that is none, or that is more than the weights can have.

    A model of such a size would take all memory, or be built forever, before transformers compares it with the weights.
    """
    file, text = path / "config.json", text_config(config)
    found = {name: text[name] for name in _SIZES if text.get(name)}
    for name, size in found.items():
        if isinstance(size, bool) or not isinstance(size, int) or not 0 < size < _SIZES[name]:
            raise ModelError(f"{file}: {name} is not a size")
    held = sum(tensors.values())
    for name in ("vocab_size", "intermediate_size", "moe_intermediate_size"):
        if tensors and found.get(name, 0) * found.get("hidden_size", 0) > held:
            raise ModelError(f"{file}: {name} = {found[name]} is more than the weights have, {held:,} numbers in all")
    if tensors and found.get("num_hidden_layers", 0) > len(tensors):
        raise ModelError(f"{file}: num_hidden_layers is more than the weights have, {len(tensors)} tensors in all")


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a model's configuration that describes the language model."""
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else config


def _architecture(config: dict[str, Any]) -> str:
    named = config.get("architectures")
    return str(named[0] if isinstance(named, list) and named else config.get("model_type", "?"))
