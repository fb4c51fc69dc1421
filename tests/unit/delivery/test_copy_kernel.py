import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.delivery.kernels import COPY_TILE, DeviceCopy, tensor_runs
from headrace.errors import DeliveryError

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int8]
SIZES = [0, 1, 2, 7, COPY_TILE - 1, COPY_TILE, COPY_TILE + 1, 2 * COPY_TILE, 2 * COPY_TILE + 5]


def random_bits(n: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Infinities and NaNs too."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (n * dtype.itemsize,), dtype=torch.uint8, generator=generator).to(DEVICE).view(dtype)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def framed(like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for such a tensor, and all of the memory around it."""
    memory = torch.full((like.nbytes + 128,), 255, dtype=torch.uint8, device=DEVICE)
    return memory[64 : 64 + like.nbytes].view(like.dtype).view(like.shape), memory


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_bit_arrives_and_none_beside_it_changes(dtype: torch.dtype):
    sources = {f"w{n}": random_bits(n, dtype, n) for n in SIZES}
    frames = {name: framed(source) for name, source in sources.items()}
    copy = DeviceCopy({name: target for name, (target, _) in frames.items()}, sources)
    assert all(bool((memory == 255).all()) for _, memory in frames.values())
    for _ in range(2):
        copy.launch()
        for name, (target, memory) in frames.items():
            assert torch.equal(bits(target), bits(sources[name]))
            assert bool((memory[:64] == 255).all()) and bool((memory[-64:] == 255).all())
        for source in sources.values():
            bits(source).bitwise_xor_(90)


def test_strided_unaligned_and_cast_tensors_are_copied_too():
    flat = torch.randn(6001, device=DEVICE)
    sources = {"strided": flat[:6000].view(60, 100).t(), "unaligned": flat[1:], "cast": flat, "plain": flat[:5996]}
    targets = {name: torch.zeros_like(source) for name, source in sources.items()}
    targets["cast"] = targets["cast"].bfloat16()
    copy = DeviceCopy(targets, sources)
    for _ in range(2):
        copy.launch()
        for name, target in targets.items():
            assert torch.equal(target, sources[name].to(target.dtype))
        flat.add_(1)


def test_a_source_of_another_shape_is_refused():
    with pytest.raises(DeliveryError, match=r"w has shape \(4,\), not \(2, 2\)"):
        DeviceCopy({"w": torch.zeros(2, 2, device=DEVICE)}, {"w": torch.zeros(4, device=DEVICE)})


def test_nothing_can_be_copied():
    DeviceCopy({}, {}).launch()


@settings(deadline=None, max_examples=200)
@given(st.integers(0, 5 * COPY_TILE))
def test_runs_cover_every_word_once(words: int):
    at = 0
    for target, source, count in tensor_runs(1 << 20, 1 << 30, words).tolist():
        assert (target - (1 << 20), source - (1 << 30)) == (4 * at, 4 * at)
        assert 0 < count <= COPY_TILE
        at += count
    assert at == words
