import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.delivery.buckets import cut
from headrace.delivery.plan import make_plan, pack, unpack

SHAPES = st.lists(
    st.tuples(
        st.sampled_from(["float32", "bfloat16", "int64", "uint8"]),
        st.lists(st.integers(0, 9), max_size=3).map(tuple),
    ),
    min_size=1,
    max_size=8,
)


@given(shapes=SHAPES, nbytes=st.integers(1, 700))
def test_the_rows_of_all_buckets_are_the_tensors(shapes: list[tuple[str, tuple[int, ...]]], nbytes: int) -> None:
    plan = make_plan([("first", "uint8", (3,)), *((f"t{i}", *one) for i, one in enumerate(shapes))])
    drawn = torch.Generator().manual_seed(nbytes)
    weights = {
        entry.name: torch.randint(0, 100, entry.shape, generator=drawn).to(getattr(torch, entry.dtype))
        for entry in plan.entries
    }
    packed = torch.zeros(plan.nbytes, dtype=torch.uint8)
    pack(packed, plan.entries, weights)
    live = {name: torch.full_like(tensor, 101) for name, tensor in weights.items()}
    buckets = cut(plan.entries, nbytes)
    longest_row = max(entry.nbytes // (entry.shape[0] if entry.shape else 1) for entry in plan.entries if entry.nbytes)
    for bucket in buckets:
        assert bucket.stop - bucket.start <= max(nbytes, longest_row) + 64
        targets = bucket.targets(live)
        # The memory of a bucket is its own: the bytes are at another address than in the packed version.
        arrived = bucket.unpack(packed[bucket.start : bucket.stop].clone())
        assert targets.keys() == arrived.keys() and len(targets) == len(bucket.rows)
        for name, rows in arrived.items():
            assert torch.equal(targets[name], torch.full_like(targets[name], 101)), "rows are written once"
            targets[name].copy_(rows)
    for name, tensor in unpack(packed, plan.entries).items():
        assert torch.equal(live[name], tensor)


def test_few_large_buckets_hold_many_small_tensors() -> None:
    plan = make_plan((f"t{i:03}", "float32", (16, 8)) for i in range(100))
    assert [len(bucket.rows) for bucket in cut(plan.entries, 4096)] == [8] * 12 + [4]
    assert len(cut(plan.entries)) == 1
