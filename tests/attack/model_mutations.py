"""Damage that model directories really have: half a download, a pointer of git-lfs, a tensor too few or too many."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import numpy as np
from safetensors.numpy import load_file, save_file

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:{}\nsize 1234567\n"
INDEX = "model.safetensors.index.json"


def mutate_model(directory: Path, random: Random) -> tuple[str, Path]:
    """Damage the weights of a model directory. Return what was done, and which file."""
    path = directory / "model.safetensors"
    data = path.read_bytes()
    tensors = load_file(path)
    name = random.choice(sorted(tensors))
    match random.choice(("pointer", "length", "header", "half", "missing", "extra", "shape", "kind", "shard", "text")):
        case "pointer":
            path.write_text(POINTER.format(f"{random.getrandbits(256):064x}"))
            return "a git-lfs pointer in place of the weights", path
        case "length":
            length = random.choice((0, 1, 2**20, 2**31, 2**63, 2**64 - 1))
            path.write_bytes(length.to_bytes(8, "little") + data[8:])
            return f"a header of {length} bytes is announced", path
        case "header":
            size = int.from_bytes(data[:8], "little")
            header = bytearray(data[8 : 8 + size])
            header[random.randrange(size)] = random.randrange(256)
            path.write_bytes(data[:8] + b"{" + bytes(header[1:]) + data[8 + size :] + b"\0")
            return "another byte in the header, and one more at the end", path
        case "half":
            path.write_bytes(data[: len(data) // 2])
            return "half of the weights", path
        case "missing":
            del tensors[name]
            done = f"{name} is missing"
        case "extra":
            tensors["extra.weight"] = np.zeros(3, np.float32)
            done = "a tensor too many"
        case "shape":
            tensors[name] = np.zeros((3, *tensors[name].shape), tensors[name].dtype)
            done = f"{name} has another shape"
        case "kind":
            tensors[name] = np.zeros(tensors[name].shape, np.int64)
            done = f"{name} holds integers"
        case "shard":
            shard = directory / "model-00001-of-00002.safetensors"
            path.rename(shard)
            files = dict.fromkeys(tensors, shard.name) | {name: "model-00002-of-00002.safetensors"}
            (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))
            return "one of two files of weights is missing", directory / "model-00002-of-00002.safetensors"
        case _:
            path.write_text("<html><body>404 Not Found</body></html>")
            return "a page of HTML in place of the weights", path
    save_file(tensors, path, metadata={"format": "pt"})
    return done, path
