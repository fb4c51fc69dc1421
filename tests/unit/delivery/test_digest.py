import hashlib
import itertools
import math
import threading
from collections import defaultdict
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.delivery import digest as digest_module
from headrace.delivery.copying import MOST_THREADS, share
from headrace.delivery.digest import digest, digest_of_sums
from headrace.delivery.digest_sums import BLOCK, HEAD, DigestPiece, Sums, region_block_sums, table

Numbered = tuple[int, DigestPiece]
Work = Callable[[Numbered], None]

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
]
DTYPES += [torch.bool]
FLOATS = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


def random_tensor(n: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(n, generator=generator).to(dtype)
    return torch.randint(-100, 100, (n,), generator=generator).to(dtype)


def mix(value: int) -> int:
    for _ in range(2):
        value = (value ^ value >> 32) * 0xD6E8FEB86659FD93 % 2**64
    return value ^ value >> 32


def reference(name: str, tensor: torch.Tensor) -> int:
    """The definition, word by word, in Python's own integers."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    key = int.from_bytes(hashlib.blake2b(f"{dtype} {name}".encode(), digest_size=8).digest(), "little")
    raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    factors = table().tolist()
    sums: dict[int, int] = {}
    head = 0
    for index in range(-(-len(raw) // 4)):
        word = int.from_bytes(raw[4 * index : 4 * index + 4].ljust(4, b"\0"), "little", signed=True)
        sums[index // BLOCK] = sums.get(index // BLOCK, 0) + factors[index % BLOCK] * word
        if index < HEAD:
            head += factors[BLOCK + index] * (word >> 16)
    keys = [mix((key + block * 0x9E3779B97F4A7C15) % 2**64) | 1 for block in range(len(sums) or 1)]
    return (2**32 * keys[0] * head + sum(keys[block] * (total % 2**32) for block, total in sums.items())) % 2**64


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [0, 1, 5, BLOCK, 2 * BLOCK + 7])
def test_equals_the_definition(dtype: torch.dtype, n: int):
    tensor = random_tensor(n, dtype, n)
    assert digest([("layer.weight", tensor)]) == reference("layer.weight", tensor)


def test_is_the_same_number_for_ever():
    weights = {"a": torch.arange(6, dtype=torch.float32), "b": torch.full((5 * BLOCK + 1,), -1.5, dtype=torch.bfloat16)}
    assert f"{digest(weights.items()):016x}" == "27cbb95df436f940"


def test_the_tables_have_odd_entries_that_are_permutations_in_their_low_bits():
    values = table().view(np.uint32)
    for part in (values[:BLOCK], values[BLOCK:]):
        assert sorted((part % (2 * len(part))).tolist()) == list(range(1, 2 * len(part), 2))
        # As many different upper halves as BLOCK random ones have, give or take.
        assert abs(len(set((part >> 16).tolist())) - 65536 * (1 - math.exp(-len(part) / 65536))) < 150
    assert len(values[BLOCK:]) == HEAD


def block_sums(part: torch.Tensor, numel: int | None = None, start: int = 0) -> Sums:
    """The sums of a run of a flat tensor; without `numel`, the run ends where the tensor ends."""
    return region_block_sums(part, (start + len(part) if numel is None else numel,), (start,))


def added(sums: list[Sums]) -> Sums:
    return np.add.reduce(sums, dtype=np.int32)


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(DTYPES),
    st.integers(0, 3 * BLOCK + 5),
    st.lists(st.floats(0, 1), max_size=4),
    st.integers(0, 99),
)
def test_runs_add_up(dtype: torch.dtype, n: int, cuts: list[float], seed: int):
    tensor = random_tensor(n, dtype, seed)
    edges = [0, *sorted(round(cut * n) for cut in cuts), n]
    sums = added([block_sums(tensor[a:b], n, a) for a, b in itertools.pairwise(edges)])
    assert np.array_equal(sums, block_sums(tensor))
    assert digest_of_sums({("w", str(dtype).removeprefix("torch.")): sums}) == digest([("w", tensor)])


@settings(deadline=None, max_examples=80)
@given(st.sampled_from(DTYPES), st.lists(st.integers(0, 13), min_size=1, max_size=4), st.data())
def test_regions_add_up(dtype: torch.dtype, shape: list[int], data: st.DataObject):
    tensor = random_tensor(math.prod(shape), dtype, 3).view(shape)
    halves = []
    for size in shape:
        cut = data.draw(st.integers(0, size))
        halves.append([(0, cut), (cut, size)])
    parts = []
    for corner in itertools.product(*halves):
        part = tensor[tuple(slice(a, b) for a, b in corner)]
        parts.append(region_block_sums(part, shape, [a for a, _ in corner]))
    assert digest_of_sums({("w", str(dtype).removeprefix("torch.")): added(parts)}) == digest([("w", tensor)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("shape", "dim", "ways"), [((700, 301), 1, 4), ((5, 3 * BLOCK + 1), 1, 2), ((999, 77), 0, 3)])
def test_shards_of_matrices_over_many_blocks_add_up(dtype: torch.dtype, shape: tuple[int, int], dim: int, ways: int):
    tensor = random_tensor(math.prod(shape), dtype).view(shape)
    parts, at = [], 0
    for part in tensor.chunk(ways, dim):
        parts.append(region_block_sums(part, shape, (0, at) if dim else (at, 0)))
        at += part.shape[dim]
    sums = {("w", str(dtype).removeprefix("torch.")): added(parts)}
    assert digest_of_sums(sums) == digest([("w", tensor)]) == reference("w", tensor)


def test_a_region_must_lie_inside():
    with pytest.raises(ValueError, match=r"a part of shape \(2, 3\) at \(0, 2\) is not inside \(2, 4\)"):
        region_block_sums(torch.zeros(2, 3), (2, 4), (0, 2))
    with pytest.raises(ValueError, match="is not inside"):
        block_sums(torch.zeros(3), 2)


def test_sums_of_several_tensors_make_one_digest():
    weights = {"a": random_tensor(2 * BLOCK + 1, torch.float32), "b": random_tensor(0, torch.float32)}
    weights["c"] = random_tensor(77, torch.float32, 1)
    assert digest_of_sums({(name, "float32"): block_sums(tensor) for name, tensor in weights.items()}) == digest(
        weights.items()
    )
    assert digest_of_sums({}) == 0


def test_threads_share_the_words_and_change_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("headrace.delivery.digest.WORTH_THREADS", 0)
    monkeypatch.setattr("headrace.delivery.digest_sums.SPAN", 2 * BLOCK)
    weights = {"large": random_tensor(31 * BLOCK + 5, torch.float32), "small": random_tensor(9, torch.bfloat16, 1)}
    alone = digest(weights.items(), threads=1)
    assert alone == sum(reference(name, tensor) for name, tensor in weights.items()) % 2**64
    together = threading.Barrier(3, timeout=30)
    taken: defaultdict[int, list[int]] = defaultdict(list)

    def watched(work: Work, pieces: list[Numbered], threads: int, name: str) -> None:
        def noting(numbered: Numbered) -> None:
            mine = taken[threading.get_ident()]
            if not mine:
                together.wait()  # every thread has some
            mine.extend(numbered[1].places)
            work(numbered)

        share(noting, pieces, threads, name)

    monkeypatch.setattr(digest_module, "share", watched)
    assert digest(weights.items(), threads=3) == alone
    assert len(taken) == 3 and all(taken.values())
    assert sorted(itertools.chain(*taken.values())) == list(range(33 + 2)), "each sum once"


def test_a_digest_takes_the_cores_that_the_process_may_use(monkeypatch: pytest.MonkeyPatch):
    asked: list[int] = []
    monkeypatch.setattr("headrace.delivery.digest.WORTH_THREADS", 0)
    monkeypatch.setattr(digest_module, "share", lambda work, pieces, threads, name: asked.append(threads))
    for allowed in ({3}, {0, 5}, set(range(64))):
        monkeypatch.setattr("os.sched_getaffinity", lambda pid, allowed=allowed: allowed)
        assert digest([]) == 0
    assert asked == [1, 2, MOST_THREADS]


def test_what_lies_where_other_tensors_lay_is_read_anew():
    """A layout is kept by address: the same memory with other values, names or dtypes is another digest."""
    memory = random_tensor(3 * BLOCK, torch.float32)
    seen = {digest([("w", memory)]), digest([("v", memory)]), digest([("w", memory.view(torch.int32))])}
    memory[BLOCK] += 1
    seen |= {digest([("w", memory)]), digest([("w", memory[:-1])])}
    assert len(seen) == 5
    assert digest([("w", memory)]) == reference("w", memory)


@settings(deadline=None)
@given(st.permutations(["a", "b", "c", "d", "e"]))
def test_order_does_not_matter(order: list[str]):
    weights = {name: random_tensor(17, torch.float32, seed) for seed, name in enumerate("abcde")}
    assert digest((name, weights[name]) for name in order) == digest(weights.items())


@settings(deadline=None)
@given(FLOATS, st.integers(1, 2000), st.data())
def test_one_flipped_bit_shows(dtype: torch.dtype, n: int, data: st.DataObject):
    tensor = random_tensor(n, dtype)
    before = digest([("w", tensor)])
    index = data.draw(st.integers(0, n - 1))
    bit = data.draw(st.integers(0, tensor.element_size() * 8 - 1))
    bits = tensor.view(torch.uint8)
    bits[index * tensor.element_size() + bit // 8] ^= 1 << bit % 8
    assert digest([("w", tensor)]) != before


@settings(deadline=None)
@given(st.sampled_from([torch.float32, torch.bfloat16, torch.float64]), st.data())
def test_two_exchanged_elements_of_a_small_tensor_show(dtype: torch.dtype, data: st.DataObject):
    n = 4 * HEAD // dtype.itemsize
    i, j = data.draw(st.lists(st.integers(0, n - 1), min_size=2, max_size=2, unique=True))
    tensor = torch.zeros(n, dtype=dtype)
    # The hardest pair: they differ in the sign bit alone, whose difference has the most trailing zeros.
    tensor[i], tensor[j] = 1.0, -1.0
    before = digest([("w", tensor)])
    tensor[i], tensor[j] = -1.0, 1.0
    assert digest([("w", tensor)]) != before


@settings(deadline=None)
@given(st.lists(st.integers(0, 3 * BLOCK - 1), min_size=2, max_size=2, unique=True), st.integers(0, 18))
def test_two_exchanged_words_that_differ_in_low_bits_show(places: list[int], bit: int):
    i, j = places
    tensor = torch.full((3 * BLOCK,), 12345, dtype=torch.int32)
    tensor[i] ^= 1 << bit
    before = digest([("w", tensor)])
    tensor[i], tensor[j] = tensor[j].clone(), tensor[i].clone()
    assert digest([("w", tensor)]) != before


def test_two_signs_hide_in_one_block_behind_the_head_and_nowhere_else():
    tensor = random_tensor(2 * BLOCK + 9, torch.float32)
    before = digest([("w", tensor)])
    for places, hides in [
        ((BLOCK + 3, BLOCK + 8), True),
        ((3, 8), False),
        ((HEAD + 3, BLOCK + 8), False),
        ((3,), False),
    ]:
        changed = tensor.clone()
        changed[list(places)] *= -1
        assert (digest([("w", changed)]) == before) == hides


def test_exchanged_and_negated_tensors_show():
    a, b = random_tensor(BLOCK + 9, torch.float32, 1), random_tensor(BLOCK + 9, torch.float32, 2)
    right = digest([("a", a), ("b", b)])
    assert digest([("a", b), ("b", a)]) != right
    assert digest([("a", -a), ("b", b)]) != right
    assert digest([("a", -a), ("b", -b)]) != right
    assert digest([("a", a.roll(1)), ("b", b)]) != right
    assert digest([("a", a.roll(BLOCK)), ("b", b)]) != right


def test_signs_names_and_dtypes_count_and_zeros_do_not():
    ones = torch.ones(8)
    found = {
        digest([]),
        digest([("w", ones)]),
        digest([("w", torch.ones(9))]),
        digest([("w", -torch.zeros(8))]),
        digest([("w", ones.to(torch.bfloat16))]),
        digest([("w", ones.to(torch.float16))]),
        digest([("v", ones)]),
    }
    assert len(found) == 7
    assert digest([("w", torch.zeros(8))]) == 0


def test_layout_in_memory_does_not_matter():
    tensor = random_tensor(600, torch.float32).view(20, 30)
    strided = torch.empty(30, 20).t().copy_(tensor)
    assert not strided.is_contiguous()
    assert digest([("w", strided.requires_grad_())]) == digest([("w", tensor)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8], ids=str)
def test_addresses_do_not_matter(dtype: torch.dtype):
    tensor = random_tensor(2 * BLOCK + 8, dtype)
    unaligned = torch.zeros(tensor.numel() + 1, dtype=dtype)[1:].copy_(tensor)
    assert unaligned.data_ptr() % 4
    assert digest([("w", unaligned)]) == digest([("w", tensor)])
