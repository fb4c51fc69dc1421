"""A delta is the lossless difference of two packed snapshots: applied to the base, it gives the new one bit for bit.

A delta must be applied to exactly the bytes that it was made from. The manifest says which version that is; the delta
itself does not. A delta may travel over any transport. A damaged or truncated delta raises `DeliveryError` before
anything is written.

    header | length of every chunk | chunks | the bytes after the last whole word

Snapshots on a GPU are compared and changed on the GPU. Only the changed words are copied to the host, where they are
packed and unpacked. The payload is always in host memory.
"""

from __future__ import annotations

import contextlib
import struct
import zlib
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import torch

from headrace.delivery.base import Entry
from headrace.delivery.delta_chunk import DTYPES, Positions, Words, decode_chunk, encode_chunk
from headrace.delivery.plan import dtype_of
from headrace.errors import DeliveryError

MAGIC = b"HRDL"
FORMAT = 1
CHUNK_WORDS = 1 << 20
_LARGEST_CHUNK = 1 << 24
_HEADER = struct.Struct("<4sBBxxIQ")
"""The fields are: magic, format, bytes per word, words per chunk, bytes per snapshot. The header is followed by a
checksum of everything else."""
_START = _HEADER.size + 4
_PROBES = 64
_PROBE_WORDS = 4096
_TORCH = {1: torch.uint8, 2: torch.int16, 4: torch.int32}

Result = TypeVar("Result")


def word_bytes_of(entries: Iterable[Entry]) -> int:
    """Return the word size that fits most bytes of a plan: 4 for elements of at least four bytes, else 2 or 1.

    Every word size is lossless for every plan; this one makes a small delta.
    """
    nbytes = {1: 0, 2: 0, 4: 0}
    for entry in entries:
        nbytes[min(4, dtype_of(entry.dtype).itemsize)] += entry.nbytes
    return max(nbytes, key=nbytes.__getitem__)


def encode(
    base: torch.Tensor, new: torch.Tensor, word_bytes: int, *, limit: int | None = None, threads: int = 2
) -> torch.Tensor | None:
    """Encode the changes from `base` to `new` (flat, uint8, on one device); None if that takes `limit` bytes or more.

    The default `limit` is the size of a snapshot. For large snapshots, samples are encoded first; if they show that the
    delta would be too large, this returns None at once. Otherwise encoding stops when the delta reaches the limit.
    """
    _check(base, new, word_bytes)
    limit = len(new) if limit is None else limit
    words = len(new) // word_bytes
    old_words, new_words = _words(base, word_bytes), _words(new, word_bytes)
    if _projected(old_words, new_words, words) >= limit:
        return None
    tail = new[words * word_bytes :].cpu().numpy().tobytes()

    def chunk(index: int) -> bytes:
        span = slice(index * CHUNK_WORDS, (index + 1) * CHUNK_WORDS)
        return _encode_span(old_words, new_words, span)

    count = -(-words // CHUNK_WORDS)
    chunks: list[bytes] = []
    size = _START + 4 * count + len(tail)
    with contextlib.closing(_in_order(chunk, count, 1 if new.is_cuda else threads)) as encoding:
        while size < limit and (encoded := next(encoding, None)) is not None:
            chunks.append(encoded)
            size += len(encoded)
    if size >= limit:
        return None
    header = _HEADER.pack(MAGIC, FORMAT, word_bytes, CHUNK_WORDS, len(new))
    lengths = np.array([len(encoded) for encoded in chunks], "<u4").tobytes()
    body = b"".join((lengths, *chunks, tail))
    checksum = zlib.crc32(body, zlib.crc32(header)).to_bytes(4, "little")
    return torch.frombuffer(bytearray(b"".join((header, checksum, body))), dtype=torch.uint8)


def apply(payload: torch.Tensor, target: torch.Tensor, *, threads: int = 2) -> None:
    """Change `target`, a copy of the base (flat, uint8), into the new snapshot, in place.

    Raises `DeliveryError` if the payload is damaged or was made for snapshots of another size. The target is then
    unchanged, unless the checksum happens to fit the damaged payload. Nothing outside the target is ever written.
    """
    _check(target, target, 1)
    if payload.dtype != torch.uint8:
        raise DeliveryError(f"a delta is bytes, not {payload.dtype}")
    data = payload.detach().cpu().contiguous().numpy().data
    word_bytes, chunk_words, starts = _parse(data, len(target))
    words = len(target) // word_bytes
    target_words = _words(target, word_bytes)

    def chunk(index: int) -> None:
        encoded = data[starts[index] : starts[index + 1]]
        if len(encoded):
            span = slice(index * chunk_words, min(words, (index + 1) * chunk_words))
            positions, differences = decode_chunk(encoded, span.stop - span.start, word_bytes)
            _add(target_words[span], positions, differences)

    for _ in _in_order(chunk, len(starts) - 1, 1 if target.is_cuda else threads):
        pass
    tail = data[int(starts[-1]) :]
    if len(tail):
        target[words * word_bytes :] = torch.frombuffer(bytearray(tail), dtype=torch.uint8).to(target.device)


def _parse(data: memoryview, nbytes: int) -> tuple[int, int, list[int]]:
    """Return the bytes per word, the words per chunk, and the offsets where the chunks start and the last one ends."""
    if len(data) < _START:
        raise DeliveryError(f"a delta of {len(data)} bytes is truncated")
    magic, version, word_bytes, chunk_words, total = _HEADER.unpack_from(data)
    if magic != MAGIC or version != FORMAT:
        raise DeliveryError(f"this is not a delta of format {FORMAT}")
    if int.from_bytes(data[_HEADER.size : _START], "little") != zlib.crc32(
        data[_START:], zlib.crc32(data[: _HEADER.size])
    ):
        raise DeliveryError("the delta is damaged or truncated: its checksum is wrong")
    if word_bytes not in DTYPES or not 0 < chunk_words <= _LARGEST_CHUNK:
        raise DeliveryError(f"the delta has words of {word_bytes} bytes in chunks of {chunk_words}")
    if total != nbytes:
        raise DeliveryError(f"the delta is of snapshots of {total} bytes, not {nbytes}")
    count = -(-(total // word_bytes) // chunk_words)
    first = _START + 4 * count
    if len(data) < first:
        raise DeliveryError("the delta is truncated in its table of chunks")
    lengths = np.frombuffer(data[_START:first], "<u4").astype(np.int64)
    starts = [int(start) for start in first + np.concatenate(([0], np.cumsum(lengths)))]
    if starts[-1] + total % word_bytes != len(data):
        raise DeliveryError(f"the delta has {len(data)} bytes, not as many as its table of chunks says")
    return word_bytes, chunk_words, starts


def _check(base: torch.Tensor, new: torch.Tensor, word_bytes: int) -> None:
    for tensor in (base, new):
        if tensor.dtype != torch.uint8 or tensor.dim() != 1 or not tensor.is_contiguous():
            raise DeliveryError(f"a snapshot is flat bytes, not {tensor.dtype} of shape {tuple(tensor.shape)}")
    if len(base) != len(new) or base.device != new.device:
        raise DeliveryError(f"snapshots of {len(base)} and {len(new)} bytes, or of two devices, have no delta")
    if word_bytes not in DTYPES:
        raise DeliveryError(f"a word has 1, 2 or 4 bytes, not {word_bytes}")


def _words(packed: torch.Tensor, word_bytes: int) -> Words | torch.Tensor:
    """Return the whole words of a snapshot: a numpy array on the host, where numpy is faster, and a tensor on a GPU."""
    whole = packed[: len(packed) // word_bytes * word_bytes]
    return whole.view(_TORCH[word_bytes]) if packed.is_cuda else whole.numpy().view(DTYPES[word_bytes])


def _encode_span(old: Words | torch.Tensor, new: Words | torch.Tensor, span: slice) -> bytes:
    before, after = old[span], new[span]
    if isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor):
        changed = (before != after).nonzero().flatten()
        difference = (after[changed] - before[changed]).cpu().numpy()
        return encode_chunk(changed.cpu().numpy(), difference.view(DTYPES[after.itemsize]), len(after))
    assert isinstance(before, np.ndarray)
    assert isinstance(after, np.ndarray)
    positions = np.flatnonzero(before != after)
    return encode_chunk(positions, after[positions] - before[positions], len(after))


def _add(target: Words | torch.Tensor, positions: Positions, differences: Words) -> None:
    if isinstance(target, torch.Tensor):
        added = torch.from_numpy(differences.view(np.uint8)).to(target.device).view(target.dtype)
        target[torch.from_numpy(positions).to(target.device)] += added
    else:
        target[positions] += differences


def _projected(old: Words | torch.Tensor, new: Words | torch.Tensor, words: int) -> float:
    """Estimate the bytes of a delta from samples across the snapshots; 0 if encoding is as quick as sampling."""
    if words < 16 * _PROBES * _PROBE_WORDS:
        return 0.0
    stride = words // _PROBES
    sampled = sum(
        len(_encode_span(old, new, slice(start, start + _PROBE_WORDS))) for start in range(0, stride * _PROBES, stride)
    )
    return sampled * words / (_PROBES * _PROBE_WORDS)


def _in_order(do: Callable[[int], Result], count: int, threads: int) -> Generator[Result, None, None]:
    """Yield the results of `do` for 0, 1, ... in this order; a caller that stops early cancels the rest."""
    if threads == 1 or count == 1:
        yield from map(do, range(count))
        return
    pool = ThreadPoolExecutor(threads, thread_name_prefix="delta")
    try:
        yield from pool.map(do, range(count))
    finally:
        pool.shutdown(cancel_futures=True)
