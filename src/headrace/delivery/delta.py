"""A delta is the lossless difference of two packed snapshots: applied to the base, it gives the new one bit for bit.

A delta must be applied to exactly the bytes that it was made from. The manifest says which version that is; the delta
itself does not. A delta may travel over any transport. A damaged or truncated delta raises `DeliveryError` before
anything is written.

    header | length of every chunk | chunks | the bytes after the last whole word

A chunk says which of its words changed, and by how much. Positions are stored as gaps between changed words, one byte
each (255 means: skip 255 words without a change), or as a bitmap if that is smaller. Changes are stored as differences.
The differences are folded to unsigned numbers, so that small changes of either sign have zeros in the high bytes, and
split into one stream for each byte of a word. Each stream is deflated if that makes it smaller. The decoder checks
every field of a chunk before it uses it.

A delta is made in host memory. It is unpacked there too, and a snapshot on a GPU is changed on the GPU.
"""

import contextlib
import struct
import zlib
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.delivery.base import Entry
from headrace.delivery.plan import dtype_of
from headrace.errors import DeliveryError

Words = NDArray[np.unsignedinteger[Any]]
Bytes = NDArray[np.uint8]
Positions = NDArray[np.int64]
DTYPES: dict[int, np.dtype[np.unsignedinteger[Any]]] = {1: np.dtype("<u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4")}

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
_GAPS, _BITMAP = 0, 1
_RAW, _DEFLATED = 0, 1
_GO_ON = 255
_SHORT = 64
"""Streams with fewer bytes are not deflated."""
_SAMPLE = 8192
_DENSE_BITS = 7.8
"""Streams whose sampled entropy is at least this many bits per byte are not deflated: it would save nothing."""
_TORCH = {1: torch.uint8, 2: torch.int16, 4: torch.int32}

Result = TypeVar("Result")


def word_bytes_of(entries: Iterable[Entry]) -> int:
    """Return the word size of 1, 2 or 4 bytes that makes a small delta. Every word size is lossless for every plan."""
    nbytes = {1: 0, 2: 0, 4: 0}
    for entry in entries:
        nbytes[min(4, dtype_of(entry.dtype).itemsize)] += entry.nbytes
    return max(nbytes, key=nbytes.__getitem__)


def encode(
    base: torch.Tensor, new: torch.Tensor, word_bytes: int, *, limit: int | None = None, threads: int = 2
) -> torch.Tensor | None:
    """Encode the changes from `base` to `new` (flat, uint8, in host memory); None if that takes `limit` bytes or more.

    The default `limit` is the size of a snapshot. For large snapshots, samples are encoded first; if they show that the
    delta would be too large, this returns None at once. Otherwise encoding stops when the delta reaches the limit.
    """
    if len(base) != len(new):
        raise DeliveryError(f"snapshots of {len(base)} and {len(new)} bytes have no delta")
    limit = len(new) if limit is None else limit
    words = len(new) // word_bytes
    old_words, new_words = (tensor.numpy()[: words * word_bytes].view(DTYPES[word_bytes]) for tensor in (base, new))
    if _projected(old_words, new_words, words) >= limit:
        return None
    tail = new[words * word_bytes :].numpy().tobytes()

    def chunk(index: int) -> bytes:
        return _encode_span(old_words, new_words, slice(index * CHUNK_WORDS, (index + 1) * CHUNK_WORDS))

    count = -(-words // CHUNK_WORDS)
    chunks: list[bytes] = []
    size = _START + 4 * count + len(tail)
    with contextlib.closing(_in_order(chunk, count, threads)) as encoding:
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
    if payload.dtype != torch.uint8:
        raise DeliveryError(f"a delta is bytes, not {payload.dtype}")
    data = payload.detach().cpu().contiguous().numpy().data
    word_bytes, chunk_words, starts = _parse(data, len(target))
    words = len(target) // word_bytes
    whole = target[: words * word_bytes]
    # In host memory numpy is faster than torch.
    target_words = whole.view(_TORCH[word_bytes]) if target.is_cuda else whole.numpy().view(DTYPES[word_bytes])

    def chunk(index: int) -> None:
        encoded = data[starts[index] : starts[index + 1]]
        if len(encoded):
            span = slice(index * chunk_words, min(words, (index + 1) * chunk_words))
            positions, differences = decode_chunk(encoded, span.stop - span.start, word_bytes)
            if isinstance(target_words, torch.Tensor):
                added = torch.from_numpy(differences.view(np.uint8)).to(target.device).view(target_words.dtype)
                target_words[span][torch.from_numpy(positions).to(target.device)] += added
            else:
                target_words[span][positions] += differences

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


def _encode_span(old: Words, new: Words, span: slice) -> bytes:
    before, after = old[span], new[span]
    positions = np.flatnonzero(before != after)
    return encode_chunk(positions, after[positions] - before[positions], len(after))


def _projected(old: Words, new: Words, words: int) -> float:
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


def encode_chunk(positions: Positions, differences: Words, words: int) -> bytes:
    """Encode the changed words of a chunk that has `words` words; b"" if none changed. Positions must be increasing."""
    count = len(positions)
    if not count:
        return b""
    gaps = _gaps(positions) if 8 * count < words else None
    mode = _GAPS if gaps is not None and 8 * len(gaps) <= words else _BITMAP
    place = gaps if gaps is not None and mode == _GAPS else _bitmap(positions, words)
    planes = _fold(differences).view(np.uint8).reshape(count, -1)
    streams = [_deflate(place), *(_deflate(np.ascontiguousarray(plane)) for plane in planes.T)]
    codecs, stored = zip(*streams, strict=True)
    layout = _layout(differences.dtype.itemsize)
    header = layout.pack(mode, count, len(place), *codecs, *map(len, stored))
    return b"".join((header, *stored))


def decode_chunk(data: memoryview, words: int, word_bytes: int) -> tuple[Positions, Words]:
    """Return the positions and differences of a chunk of `words` words; raises `DeliveryError` if it is damaged."""
    layout = _layout(word_bytes)
    if len(data) < layout.size:
        raise DeliveryError("the delta has a chunk without a whole header")
    mode, count, place_bytes, *streams = layout.unpack_from(data)
    codecs, lengths = streams[: 1 + word_bytes], streams[1 + word_bytes :]
    if layout.size + sum(lengths) != len(data):
        raise DeliveryError("the delta has a chunk whose streams are not as long as it says")
    if not 0 < count <= words or place_bytes > words:
        raise DeliveryError(f"the delta has a chunk of {words} words with {count} changes")
    sizes = (place_bytes, *[count] * word_bytes)
    start = layout.size
    found: list[Bytes] = []
    for codec, length, size in zip(codecs, lengths, sizes, strict=True):
        found.append(_inflate(codec, data[start : start + length], size))
        start += length
    positions = _positions(mode, found[0], words)
    if len(positions) != count:
        raise DeliveryError(f"the delta has {len(positions)} positions for {count} changes")
    folded = np.stack(found[1:], axis=1).view(DTYPES[word_bytes]).reshape(count)
    return positions, _unfold(folded)


def _layout(word_bytes: int) -> struct.Struct:
    """Return the header layout: mode, number of changes, bytes of positions; then all streams' codecs and lengths."""
    return struct.Struct(f"<BII{1 + word_bytes}B{1 + word_bytes}I")


def _gaps(positions: Positions) -> Bytes:
    gaps = np.diff(positions, prepend=-1) - 1
    beyond = gaps // _GO_ON
    ends = np.cumsum(beyond + 1)
    encoded = np.full(int(ends[-1]), _GO_ON, np.uint8)
    encoded[ends - 1] = gaps - beyond * _GO_ON
    return encoded


def _bitmap(positions: Positions, words: int) -> Bytes:
    changed = np.zeros(words, bool)
    changed[positions] = True
    return np.packbits(changed)


def _positions(mode: int, encoded: Bytes, words: int) -> Positions:
    if mode == _BITMAP:
        if len(encoded) != -(-words // 8):
            raise DeliveryError(f"the delta has a bitmap of {len(encoded)} bytes for {words} words")
        return np.flatnonzero(np.unpackbits(encoded, count=words).view(bool))
    if mode != _GAPS:
        raise DeliveryError(f"the delta has positions of an unknown kind ({mode})")
    ends = encoded != _GO_ON
    positions: Positions = (np.cumsum(encoded + ends.astype(np.int64)) - 1)[ends]
    # Each step is at least one word, so the last position is the largest and the first is not negative.
    if len(positions) and positions[-1] >= words:
        raise DeliveryError(f"the delta has a change beyond a chunk's {words} words")
    return positions


def _fold(differences: Words) -> Words:
    """Map 0, -1, 1, -2, ... to 0, 1, 2, 3, ..., so that a small change of either sign becomes a small number."""
    one = differences.dtype.type(1)
    sign = differences >> differences.dtype.type(8 * differences.dtype.itemsize - 1)
    folded: Words = (differences << one) ^ (~sign + one)
    return folded


def _unfold(folded: Words) -> Words:
    one = folded.dtype.type(1)
    differences: Words = (folded >> one) ^ (~(folded & one) + one)
    return differences


def _deflate(stream: Bytes) -> tuple[int, bytes]:
    """Return the codec and the stored bytes of a stream; it is deflated only if that makes it smaller."""
    if len(stream) >= _SHORT and _bits(stream) < _DENSE_BITS:
        # The streams only have runs and uneven byte counts: Z_RLE is as small as level 9, as fast as Huffman alone.
        deflater = zlib.compressobj(1, zlib.DEFLATED, -zlib.MAX_WBITS, 9, zlib.Z_RLE)
        deflated = deflater.compress(stream.data) + deflater.flush()
        if len(deflated) < len(stream):
            return _DEFLATED, deflated
    return _RAW, stream.tobytes()


def _bits(stream: Bytes) -> float:
    """Estimate the entropy of the stream from a sample, in bits per byte."""
    counts = np.bincount(stream[:: -(-len(stream) // _SAMPLE)])
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log2(shares)).sum())


def _inflate(codec: int, data: memoryview, size: int) -> Bytes:
    if codec == _RAW:
        stream = bytes(data)
    elif codec == _DEFLATED:
        inflater = zlib.decompressobj(-zlib.MAX_WBITS)
        try:
            # One byte more than expected, so that a stream that is too long is noticed without using more memory.
            stream = inflater.decompress(data, size + 1)
        except zlib.error as error:
            raise DeliveryError(f"the delta has a damaged stream: {error}") from error
        if not inflater.eof or inflater.unused_data:
            raise DeliveryError("the delta has a stream that does not end where it says")
    else:
        raise DeliveryError(f"the delta has a stream of an unknown kind ({codec})")
    if len(stream) != size:
        raise DeliveryError(f"the delta has a stream of {len(stream)} bytes instead of {size}")
    return np.frombuffer(stream, np.uint8)
