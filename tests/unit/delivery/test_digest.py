import hashlib
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.delivery import digest as module
from headrace.delivery.digest import BLOCK, OFFSET, digest, digest_shard

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.int8, torch.bool]
WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
FLOATS = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


def random_tensor(n: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(n, generator=generator).to(dtype)
    return torch.randint(-100, 100, (n,), generator=generator).to(dtype)


def reference(name: str, tensor: torch.Tensor) -> int:
    """The definition, element by element, in Python's own integers."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    key = int.from_bytes(hashlib.blake2b(f"{dtype} {name}".encode(), digest_size=8).digest(), "little")
    size = tensor.element_size()
    raw = bytes(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    width = min(size, 4)
    total = 0
    for index in range(len(raw) // width):
        bits = int.from_bytes(raw[index * width : (index + 1) * width], "little", signed=True)
        factor = module._table_values()[index % BLOCK] * module._block_key(key, index // BLOCK)
        total += factor * (bits + OFFSET)
    return total % 2**64


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [0, 1, 5, BLOCK, 2 * BLOCK + 7])
def test_equals_the_definition(dtype: torch.dtype, n: int):
    tensor = random_tensor(n, dtype)
    assert digest([("layer.weight", tensor)]) == reference("layer.weight", tensor)


def test_is_the_same_number_for_ever():
    weights = {"a": torch.arange(6, dtype=torch.float32), "b": torch.full((BLOCK + 1,), -1.5, dtype=torch.bfloat16)}
    assert f"{digest(weights.items()):016x}" == "78827838cf38998b"


def test_the_table_has_odd_entries_that_are_a_permutation_in_their_low_bits():
    values = module._table_values()
    assert sorted(value % (2 * BLOCK) for value in values) == list(range(1, 2 * BLOCK, 2))
    assert all(0 < value < 2**64 for value in values)
    assert len({value >> 32 for value in values}) > BLOCK * 0.99


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from(DTYPES),
    st.integers(0, 3 * BLOCK + 5),
    st.lists(st.floats(0, 1), max_size=4),
    st.integers(0, 99),
)
def test_shards_add_up(dtype: torch.dtype, n: int, cuts: list[float], seed: int):
    tensor = random_tensor(n, dtype, seed)
    edges = [0, *sorted(round(cut * n) for cut in cuts), n]
    shards = [digest_shard("w", tensor[a:b], a) for a, b in itertools.pairwise(edges)]
    assert sum(shards) % 2**64 == digest([("w", tensor)])


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
def test_two_exchanged_elements_show(dtype: torch.dtype, data: st.DataObject):
    n = 3 * BLOCK
    i, j = data.draw(st.lists(st.integers(0, n - 1), min_size=2, max_size=2, unique=True))
    tensor = torch.zeros(n, dtype=dtype)
    # The hardest pair: they differ in the sign bit alone, whose difference has the most trailing zeros.
    tensor[i], tensor[j] = 1.0, -1.0
    before = digest([("w", tensor)])
    tensor[i], tensor[j] = -1.0, 1.0
    assert digest([("w", tensor)]) != before


def test_exchanged_and_negated_tensors_show():
    a, b = random_tensor(BLOCK + 9, torch.float32, 1), random_tensor(BLOCK + 9, torch.float32, 2)
    right = digest([("a", a), ("b", b)])
    assert digest([("a", b), ("b", a)]) != right
    assert digest([("a", -a), ("b", b)]) != right
    assert digest([("a", -a), ("b", -b)]) != right
    assert digest([("a", a.roll(1)), ("b", b)]) != right
    assert digest([("a", a.roll(BLOCK)), ("b", b)]) != right


def test_zeros_signs_lengths_and_dtypes_count():
    zeros = torch.zeros(8)
    found = {
        digest([]),
        digest([("w", zeros)]),
        digest([("w", torch.zeros(9))]),
        digest([("w", -zeros)]),
        digest([("w", zeros.to(torch.bfloat16))]),
        digest([("w", zeros.to(torch.float16))]),
        digest([("v", zeros)]),
    }
    assert len(found) == 7


def test_layout_in_memory_does_not_matter():
    tensor = random_tensor(600, torch.float32).view(20, 30)
    strided = torch.empty(30, 20).t().copy_(tensor)
    assert not strided.is_contiguous()
    assert digest([("w", strided.requires_grad_())]) == digest([("w", tensor)])
