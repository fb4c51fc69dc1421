"""Deltas of snapshots: lossless for every pattern of bits, small where little changed, never a crash on damage."""

import struct
import time
import zlib

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace.delivery import delta
from headrace.delivery.digest import digest
from headrace.delivery.plan import PackingPlan, pack, plan_weights, unpack
from headrace.errors import DeliveryError

PLENTY = 1 << 40


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(delta, "CHUNK_WORDS", 1000)


def flat(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values).view(np.uint8).copy())


def assert_lossless(base: torch.Tensor, new: torch.Tensor, word_bytes: int) -> torch.Tensor:
    kept = base.clone(), new.clone()
    payload = delta.encode(base, new, word_bytes, limit=PLENTY)
    assert payload is not None
    assert torch.equal(base, kept[0])
    assert torch.equal(new, kept[1])
    for threads in (1, 2):
        target = base.clone()
        delta.apply(payload, target, threads=threads)
        assert torch.equal(target, new)
    assert torch.equal(payload, delta.encode(base, new, word_bytes, limit=PLENTY, threads=1))
    return payload


sizes = st.one_of(st.integers(0, 40), st.sampled_from([999, 1000, 1001, 1999, 2000, 2001, 3456]))


@given(
    sizes,
    st.sampled_from([1, 2, 4]),
    st.integers(0, 3),
    st.sampled_from([0.0, 1e-4, 1e-3, 0.01, 0.1, 0.12, 0.13, 0.5, 1.0]),
    st.sampled_from(["ulp", "sign", "random"]),
    st.integers(0, 1 << 32),
)
@settings(max_examples=200, deadline=None)
def test_every_pattern_comes_back_bit_for_bit(words, word_bytes, tail, share, kind, seed):
    rng = np.random.default_rng(seed)
    base = rng.integers(0, 256, words * word_bytes + min(tail, word_bytes - 1), dtype=np.uint8)
    new = base.copy()
    whole = new[: words * word_bytes].view(f"<u{word_bytes}")
    chosen = rng.random(words) < share
    top = 1 << (8 * word_bytes - 1)
    by = {
        "ulp": rng.integers(0, 2, words) * 2 - 1,
        "sign": np.full(words, top),
        "random": rng.integers(0, 2 * top, words),
    }
    whole[chosen] += by[kind].astype(whole.dtype)[chosen]
    if share:
        new[words * word_bytes :] ^= 255
    assert_lossless(flat(base), flat(new), word_bytes)


@given(st.lists(st.integers(0, 2999), unique=True), st.sampled_from([1, 2, 4]))
@example([0], 2)
@example([254], 2)
@example([255], 2)
@example([256], 2)
@example([255, 510, 511, 766], 2)
@example([2999], 4)
def test_gaps_of_every_length_come_back(where, word_bytes):
    positions = np.array(sorted(where), np.int64)
    differences = (positions + 1).astype(f"<u{word_bytes}")
    encoded = delta.encode_chunk(positions, differences, 3000)
    if not where:
        assert encoded == b""
        return
    found, by = delta.decode_chunk(memoryview(encoded), 3000, word_bytes)
    assert found.tolist() == positions.tolist()
    assert by.tolist() == differences.tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bits_that_compare_alike_or_never_alike_are_told_apart(dtype: torch.dtype):
    integer = {torch.bfloat16: torch.int16, torch.float32: torch.int32}[dtype]
    nan = torch.tensor(float("nan"), dtype=dtype).view(integer)
    base = torch.tensor([0.0, -0.0, 1.0, float("inf"), 2.0, 3.0], dtype=dtype)
    new = torch.tensor([-0.0, 0.0, float("nan"), float("-inf"), 2.0, 3.0], dtype=dtype)
    base.view(integer)[4] = nan + 1
    new.view(integer)[4] = nan + 2
    base.view(integer)[5] = new.view(integer)[5] = nan + 3
    payload = assert_lossless(base.view(torch.uint8), new.view(torch.uint8), dtype.itemsize)
    nothing = delta.encode(new.view(torch.uint8), new.view(torch.uint8), dtype.itemsize, limit=PLENTY)
    assert nothing is not None
    assert len(nothing) == 24 + 4 < len(payload)


def mixed(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "a": torch.randn(777, generator=generator),
        "b": torch.randn(33, 7, generator=generator),
        "flags": torch.rand(3, generator=generator) < 0.5,
        "steps": torch.tensor(seed),
        "z.mask": torch.rand(5, generator=generator) < 0.5,
    }


def snapshot(plan: PackingPlan, weights: dict[str, torch.Tensor], gap: int) -> torch.Tensor:
    packed = torch.full((plan.nbytes,), gap, dtype=torch.uint8)
    pack(packed, plan.entries, weights)
    return packed


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
def test_a_mixed_plan_arrives_whatever_lies_between_its_tensors(dtype: str):
    plan = plan_weights(mixed(1), dtype)
    assert plan.nbytes % 2, "the plan ends with half a word"
    base, new = snapshot(plan, mixed(1), 0), snapshot(plan, mixed(2), 7)
    for word_bytes in (1, 2, 4):
        payload = assert_lossless(base, new, word_bytes)
        target = snapshot(plan, mixed(1), 99)
        delta.apply(payload, target)
        assert digest(unpack(target, plan.entries).items()) == digest(unpack(new, plan.entries).items())
    assert delta.word_bytes_of(plan.entries) == (4 if dtype == "float32" else 2)


def stepped(words: int, share: float, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    base = (torch.randn(words, generator=generator) * 0.04).to(torch.bfloat16)
    new = base.clone()
    chosen = torch.rand(words, generator=generator) < share
    new.view(torch.int16)[chosen] += (torch.rand(int(chosen.sum()), generator=generator) < 0.5).to(torch.int16) * 2 - 1
    return base.view(torch.uint8), new.view(torch.uint8)


@pytest.mark.parametrize("share", [0.001, 0.01, 0.03, 0.1, 0.3])
def test_the_size_is_close_to_the_entropy(share: float, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(delta, "CHUNK_WORDS", 1 << 19)
    words = 1 << 20
    base, new = stepped(words, share)
    payload = assert_lossless(base, new, 2)
    bits = -share * np.log2(share) - (1 - share) * np.log2(1 - share) + share
    assert len(payload) < 1.2 * words * bits / 8 + 500


def test_none_at_the_limit_and_not_below_it():
    base, new = stepped(5000, 0.05)
    size = len(assert_lossless(base, new, 2))
    assert delta.encode(base, new, 2, limit=size + 1) is not None
    assert delta.encode(base, new, 2, limit=size) is None
    assert delta.encode(base, new, 2, limit=0) is None
    noise = torch.from_numpy(np.random.default_rng(0).integers(0, 256, 10000, dtype=np.uint8))
    assert delta.encode(base, noise, 2) is None


def test_a_hopeless_diff_costs_little(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(delta, "CHUNK_WORDS", 1 << 20)
    words = 1 << 23
    base, new = stepped(words, 0.01)
    noise = torch.from_numpy(np.random.default_rng(0).integers(0, 256, 2 * words, dtype=np.uint8))

    def seconds(limit: int, target: torch.Tensor) -> float:
        started = time.thread_time()
        assert (delta.encode(base, target, 2, limit=limit, threads=1) is None) == (limit < PLENTY)
        return time.thread_time() - started

    whole = min(seconds(PLENTY, noise) for _ in range(2))
    assert min(seconds(2 * words, noise) for _ in range(3)) < whole / 5
    assert min(seconds(100, new) for _ in range(3)) < whole / 5


def test_every_truncation_and_every_flipped_byte_is_an_error_and_writes_nothing():
    base, new = stepped(1500, 0.05)
    base, new = (
        torch.cat([base, torch.tensor([1])]).to(torch.uint8),
        torch.cat([new, torch.tensor([2])]).to(torch.uint8),
    )
    payload = assert_lossless(base, new, 2)
    target = base.clone()
    for length in range(len(payload)):
        with pytest.raises(DeliveryError):
            delta.apply(payload[:length], target)
    for index in range(len(payload)):
        damaged = payload.clone()
        damaged[index] ^= 1 << index % 8
        with pytest.raises(DeliveryError):
            delta.apply(damaged, target)
    with pytest.raises(DeliveryError):
        delta.apply(torch.cat([payload, payload[:1]]), target)
    assert torch.equal(target, base)


def sealed(body: bytearray) -> torch.Tensor:
    """The payload with the checksum that it should have: what a careful liar would send."""
    body[20:24] = zlib.crc32(body[24:], zlib.crc32(body[:20])).to_bytes(4, "little")
    return torch.frombuffer(body, dtype=torch.uint8)


edits = st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=4)


@given(st.sampled_from([1, 2, 4]), st.sampled_from([0.002, 0.05, 0.6]), edits, st.integers(0, 60), st.booleans())
@settings(max_examples=400, deadline=None)
def test_damage_with_a_fitting_checksum_is_an_error_or_stays_inside(word_bytes, share, edits, cut, at_the_start):
    base, new = stepped(2500, share)
    payload = delta.encode(base, new, word_bytes, limit=PLENTY)
    assert payload is not None
    body = bytearray(payload.numpy().tobytes())
    reach = min(len(body), 120) if at_the_start else len(body)
    for where, value in edits:
        body[int(where * reach)] = value
    body = body[: len(body) - cut] if cut < 30 else body
    fenced = torch.full((64 + len(base) + 64,), 77, dtype=torch.uint8)
    fenced[64:-64] = base
    try:
        delta.apply(sealed(body), fenced[64:-64])
    except DeliveryError as error:
        assert "\n" not in str(error)
    assert (fenced[:64] == 77).all()
    assert (fenced[-64:] == 77).all()


def crafted(chunk: bytes, *, word_bytes: int = 2, chunk_words: int = 1000, total: int = 200) -> torch.Tensor:
    header = struct.pack("<4sBBxxIQ", b"HRDL", 1, word_bytes, chunk_words, total)
    return sealed(bytearray(header + bytes(4) + struct.pack("<I", len(chunk)) + chunk))


def raw_chunk(mode: int, count: int, place: bytes, *planes: bytes, codecs: bytes = bytes(3)) -> bytes:
    lengths = [len(stream) for stream in (place, *planes)]
    return struct.pack("<BII3B3I", mode, count, len(place), *codecs, *lengths) + b"".join((place, *planes))


def test_lies_are_named():
    target = torch.zeros(200, dtype=torch.uint8)
    good = raw_chunk(0, 1, b"\x63", b"\x02", b"\x00")
    delta.apply(crafted(good), target)
    assert target.nonzero().flatten().tolist() == [198]
    assert target[198] == 1
    target.zero_()

    def refused(payload: torch.Tensor) -> str:
        with pytest.raises(DeliveryError) as caught:
            delta.apply(payload, target)
        assert not target.any()
        return str(caught.value)

    assert "beyond a chunk's 100 words" in refused(crafted(raw_chunk(0, 1, b"\x64", b"\x02", b"\x00")))
    assert "beyond a chunk's" in refused(crafted(raw_chunk(0, 1, b"\xff\x00", b"\x02", b"\x00")))
    assert "0 positions for 1 changes" in refused(crafted(raw_chunk(0, 1, b"\xff", b"\x02", b"\x00")))
    assert "2 positions for 1 changes" in refused(crafted(raw_chunk(0, 1, b"\x00\x00", b"\x02", b"\x00")))
    assert "with 0 changes" in refused(crafted(raw_chunk(0, 0, b"", b"", b"")))
    assert "with 101 changes" in refused(crafted(raw_chunk(0, 101, b"\x00", b"", b"")))
    assert "instead of 1" in refused(crafted(raw_chunk(0, 1, b"\x00", b"\x02\x02", b"\x00")))
    assert "bitmap of 1 bytes for 100 words" in refused(crafted(raw_chunk(1, 1, b"\x80", b"\x02", b"\x00")))
    assert "unknown kind (9)" in refused(crafted(raw_chunk(9, 1, b"\x80", b"\x02", b"\x00")))
    assert "unknown kind (7)" in refused(crafted(raw_chunk(0, 1, b"\x00", b"\x02", b"\x00", codecs=b"\x00\x07\x00")))
    bomb = zlib.compressobj(9, zlib.DEFLATED, -15)
    packed = bomb.compress(bytes(1 << 20)) + bomb.flush()
    assert "does not end" in refused(crafted(raw_chunk(0, 1, b"\x00", packed, b"\x00", codecs=b"\x00\x01\x00")))
    assert "without a whole header" in refused(crafted(b"x"))
    assert "not as long as it says" in refused(crafted(good + b"x"))
    assert "words of 3 bytes" in refused(crafted(good, word_bytes=3))
    assert "in chunks of 0" in refused(crafted(good, chunk_words=0))
    assert "snapshots of 202 bytes, not 200" in refused(crafted(good, total=202))
    assert "table of chunks" in refused(crafted(good, chunk_words=1))
    assert "truncated" in refused(torch.zeros(0, dtype=torch.uint8))
    assert "not a delta" in refused(torch.zeros(99, dtype=torch.uint8))


def test_what_is_no_snapshot_is_refused():
    flat_bytes = torch.zeros(8, dtype=torch.uint8)
    with pytest.raises(DeliveryError, match="snapshots of 8 and 9 bytes"):
        delta.encode(flat_bytes, torch.zeros(9, dtype=torch.uint8), 2)
    with pytest.raises(DeliveryError, match="a delta is bytes"):
        delta.apply(torch.zeros(64), flat_bytes)
