"""One chunk of a delta as bytes: where words changed, and by how much. Decoding gives what was encoded, or an error.

Positions are gaps between changed words, a byte each (255 goes on without a change), or a bitmap where that is smaller.
Words are differences, signed values folded so that small ones have zeros in the high bytes, a plane for each byte. Each
of these streams is deflated where it pays. Nothing that a damaged chunk says is believed before it is checked.
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
"""Of a word, by its bytes."""
_GAPS, _BITMAP = 0, 1
_RAW, _DEFLATED = 0, 1
_GO_ON = 255
_SHORT = 64
"""Bytes below which a stream is not worth deflating."""
_SAMPLE = 8192
_DENSE_BITS = 7.8
"""Bits in a byte of a sample above which deflating a stream takes time and saves nothing."""


def encode_chunk(positions: Positions, differences: Words, words: int) -> bytes:
    """The changed words of a chunk of so many words; b"" when none did. Positions are increasing."""
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
    """Positions and differences of a chunk of so many words; raises `DeliveryError` for what is none."""
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
    """How, how many, bytes of the positions; then of every stream its codec, and its stored bytes."""
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
    """0, -1, 1, -2, ... as 0, 1, 2, 3, ...: a small change of either sign is a small number."""
    one = differences.dtype.type(1)
    sign = differences >> differences.dtype.type(8 * differences.dtype.itemsize - 1)
    folded: Words = (differences << one) ^ (~sign + one)
    return folded


def _unfold(folded: Words) -> Words:
    one = folded.dtype.type(1)
    differences: Words = (folded >> one) ^ (~(folded & one) + one)
    return differences


def _deflate(stream: Bytes) -> tuple[int, bytes]:
    """The stream as it is stored: as it is, unless it gets smaller."""
    if len(stream) >= _SHORT and _bits(stream) < _DENSE_BITS:
        # Runs and Huffman codes are all that there is to find: as small as level 9, and as fast as Huffman codes alone.
        deflater = zlib.compressobj(1, zlib.DEFLATED, -zlib.MAX_WBITS, 9, zlib.Z_RLE)
        deflated = deflater.compress(stream.data) + deflater.flush()
        if len(deflated) < len(stream):
            return _DEFLATED, deflated
    return _RAW, stream.tobytes()


def _bits(stream: Bytes) -> float:
    """The entropy of a byte of the stream, from a sample."""
    counts = np.bincount(stream[:: -(-len(stream) // _SAMPLE)])
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log2(shares)).sum())


def _inflate(codec: int, data: memoryview, size: int) -> Bytes:
    if codec == _RAW:
        stream = bytes(data)
    elif codec == _DEFLATED:
        inflater = zlib.decompressobj(-zlib.MAX_WBITS)
        try:
            # A byte more than there should be: a stream that would be longer shows, and costs no memory.
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
