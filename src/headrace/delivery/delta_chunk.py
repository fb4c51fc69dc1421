"""The encoding of one chunk of a delta: which words changed, and by how much. A damaged chunk raises `DeliveryError`.

Positions are stored as gaps between changed words, one byte each (255 means: skip 255 words without a change), or as a
bitmap if that is smaller. Changes are stored as differences. The differences are folded to unsigned numbers, so that
small changes of either sign have zeros in the high bytes, and split into one stream for each byte of a word. Each
stream is deflated if that makes it smaller. The decoder checks every field of a chunk before it uses it.
"""

from __future__ import annotations

import struct
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import DeliveryError

Words = NDArray[np.unsignedinteger[Any]]
Bytes = NDArray[np.uint8]
Positions = NDArray[np.int64]
DTYPES: dict[int, np.dtype[np.unsignedinteger[Any]]] = {1: np.dtype("<u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4")}
"""The numpy dtype of a word, by its size in bytes."""
_GAPS, _BITMAP = 0, 1
_RAW, _DEFLATED = 0, 1
_GO_ON = 255
_SHORT = 64
"""Streams with fewer bytes are not deflated."""
_SAMPLE = 8192
_DENSE_BITS = 7.8
"""Streams whose sampled entropy is at least this many bits per byte are not deflated: it would save nothing."""


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
