import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.delivery.digest import digest
from headrace.delivery.digest_sums import BLOCK, HEAD
from headrace.delivery.kernels import ROWS, TILE, DeviceDigest, tensor_items

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.int8, torch.bool]
EDGES = [0, 1, 5, TILE - 1, TILE, TILE + 1]
BLOCK_EDGES = [BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + TILE + 7]
"""In words."""
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def random_tensor(n: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Any bits, infinities and NaNs too."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.rand(n, generator=generator) < 0.5
    raw = torch.randint(0, 256, (n * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype)


def on_device(weights: dict[str, torch.Tensor]) -> int:
    made = DeviceDigest({name: tensor.to(DEVICE) for name, tensor in weights.items()})
    return made.value(made.launch())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_the_digest_at_every_edge(dtype: torch.dtype):
    weights = {f"w{n}": random_tensor(n, dtype, n) for n in EDGES}
    assert on_device(weights) == digest(weights.items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64], ids=str)
def test_equals_the_digest_at_the_edges_of_a_block(dtype: torch.dtype):
    weights = {f"w{n}": random_tensor(4 * n // dtype.itemsize, dtype, n) for n in BLOCK_EDGES}
    assert on_device(weights) == digest(weights.items())


def test_equals_the_digest_where_programs_share_a_tensor():
    weights = {"w": random_tensor((ROWS + 2) * BLOCK + 3 * TILE + 5, torch.float32)}
    assert on_device(weights) == digest(weights.items())


@settings(deadline=None, max_examples=10)
@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.integers(0, 3 * TILE)), max_size=6), st.integers(0, 99))
def test_equals_the_digest_of_any_mixture(tensors: list[tuple[torch.dtype, int]], seed: int):
    weights = {f"w{i}": random_tensor(n, dtype, seed + i) for i, (dtype, n) in enumerate(tensors)}
    assert on_device(weights) == digest(weights.items())


@settings(deadline=None, max_examples=200)
@given(st.integers(0, 3 * ROWS * BLOCK), st.integers(0, 5))
def test_programs_cover_every_word_once(words: int, slot: int):
    covered = {0: 0, 16: 0}
    starts: dict[int, list[int]] = {0: [], 16: []}
    for address, whole, rest, into, place, shift in tensor_items(0, words, slot).tolist():
        start = address // 4
        assert place == start % BLOCK + (BLOCK if shift else 0)
        assert into == slot + (0 if shift else 1 + start // BLOCK)
        assert 0 <= whole <= (1 if shift else ROWS)
        assert 0 <= rest < TILE
        assert whole or rest
        covered[shift] += whole * TILE + rest
        end = start + (whole * BLOCK + rest if rest else (whole - 1) * BLOCK + TILE)
        assert end <= words
        starts[shift] += [start + row * BLOCK for row in range(whole + (rest > 0))]
    assert covered == {0: words, 16: min(words, HEAD)}
    assert sorted(starts[0]) == list(range(0, words, TILE))
    assert sorted(starts[16]) == list(range(0, min(words, HEAD), TILE))


def test_values_may_change_between_launches():
    weight = torch.randn(BLOCK + 3).to(DEVICE)
    made = DeviceDigest({"w": weight})
    first = made.value(made.launch())
    weight.mul_(2)
    second = made.value(made.launch())
    weight.div_(2)
    assert second == digest([("w", 2 * weight.cpu())])
    assert made.value(made.launch()) == first == digest([("w", weight.cpu())])


@settings(deadline=None, max_examples=15)
@given(st.sampled_from([torch.float32, torch.bfloat16, torch.int8, torch.float64]), st.data())
def test_one_flipped_bit_shows(dtype: torch.dtype, data: st.DataObject):
    n = data.draw(st.integers(1, 2 * TILE))
    weights = {"w": random_tensor(n, dtype)}
    before = on_device(weights)
    bit = data.draw(st.integers(0, n * dtype.itemsize * 8 - 1))
    weights["w"].view(torch.uint8)[bit // 8] ^= 1 << bit % 8
    assert on_device(weights) != before


@pytest.mark.parametrize(("i", "j"), [(0, 1), (3, TILE), (5, BLOCK + 5)])
def test_two_exchanged_elements_show(i: int, j: int):
    tensor = torch.zeros(BLOCK + 6, dtype=torch.bfloat16)
    tensor[i], tensor[j] = 1.0, -1.0
    before = on_device({"w": tensor})
    tensor[i], tensor[j] = -1.0, 1.0
    assert on_device({"w": tensor}) != before


def test_layout_in_memory_does_not_matter():
    flat = random_tensor(601, torch.float32).to(DEVICE)
    strided = torch.empty(30, 20, device=DEVICE).t().copy_(flat[1:].view(20, 30))
    unaligned = flat[1:]
    assert unaligned.data_ptr() % 16
    for tensor in (strided.requires_grad_(), unaligned):
        made = DeviceDigest({"w": tensor})
        assert made.value(made.launch()) == digest([("w", tensor.cpu())])


def test_other_dtypes_are_cast_anew_at_each_launch():
    weight = torch.randn(700, device=DEVICE)
    made = DeviceDigest({"w": weight, "v": weight}, {"w": torch.bfloat16})
    for _ in range(2):
        assert made.value(made.launch()) == digest([("w", weight.cpu().bfloat16()), ("v", weight.cpu())])
        weight.add_(1)


def test_no_weights_have_the_digest_zero():
    made = DeviceDigest({})
    assert made.value(made.launch()) == digest([]) == 0


def test_a_digest_is_of_one_device():
    with pytest.raises(ValueError, match="one digest over several devices: cpu, meta"):
        DeviceDigest({"a": torch.zeros(2), "b": torch.zeros(2, device="meta")})
