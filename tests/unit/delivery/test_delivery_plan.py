import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.delivery.copying import all_on
from headrace.delivery.plan import ALIGNMENT, make_plan, plan_digest, plan_weights, unpack
from headrace.errors import DeliveryError

SIZES = {"float32": 4, "bfloat16": 2, "int64": 8, "bool": 1}
TENSORS = st.lists(
    st.tuples(
        st.text("abc.", min_size=1, max_size=6),
        st.sampled_from(sorted(SIZES)),
        st.lists(st.integers(0, 5), max_size=3),
    ),
    min_size=1,
    max_size=8,
    unique_by=lambda tensor: tensor[0],
).filter(lambda tensors: any(0 not in shape for _, _, shape in tensors))


@settings(deadline=None)
@given(TENSORS)
def test_entries_are_aligned_and_disjoint(tensors):
    plan = make_plan(tensors)
    end = 0
    for entry in plan.entries:
        assert entry.offset % ALIGNMENT == 0
        assert end <= entry.offset < end + ALIGNMENT
        assert entry.nbytes == math.prod(entry.shape) * SIZES[entry.dtype]
        end = entry.offset + entry.nbytes
    assert plan.nbytes == end
    assert {(e.name, e.dtype, e.shape) for e in plan.entries} == {(n, d, tuple(s)) for n, d, s in tensors}


@settings(deadline=None)
@given(TENSORS, st.randoms())
def test_the_order_given_does_not_matter(tensors, random):
    shuffled = list(tensors)
    random.shuffle(shuffled)
    assert make_plan(shuffled) == make_plan(tensors)


@settings(deadline=None)
@given(TENSORS, st.data())
def test_any_difference_changes_the_digest(tensors, data):
    index = data.draw(st.integers(0, len(tensors) - 1))
    name, dtype, shape = tensors[index]
    changed = data.draw(
        st.sampled_from(
            [
                (name + "x", dtype, shape),
                (name, "bfloat16" if dtype != "bfloat16" else "float32", shape),
                (name, dtype, [*shape, 1]),
            ]
        )
    )
    other = [*tensors[:index], changed, *tensors[index + 1 :]]
    assert make_plan(other).digest != make_plan(tensors).digest


def test_the_digest_is_the_same_number_for_ever_and_covers_offsets():
    plan = make_plan([("b", "bfloat16", [3, 5]), ("a", "float32", [7])])
    assert [entry.offset for entry in plan.entries] == [0, 64]
    assert f"{plan.digest:016x}" == "201c467e7e8a9021"
    moved = [plan.entries[0], type(plan.entries[1])(name="b", dtype="bfloat16", shape=(3, 5), offset=128, nbytes=30)]
    assert plan_digest(moved) != plan.digest


def test_floating_weights_are_published_in_the_serving_dtype():
    weights = {
        "w": torch.zeros(3, 2),
        "h": torch.zeros(1, dtype=torch.float16),
        "n": torch.zeros((), dtype=torch.int64),
    }
    plan = plan_weights(weights, "bfloat16")
    assert {entry.name: (entry.dtype, entry.nbytes) for entry in plan.entries} == {
        "w": ("bfloat16", 12),
        "h": ("bfloat16", 2),
        "n": ("int64", 8),
    }


def test_unpack_gives_views_of_the_bytes():
    plan = make_plan([("a", "float32", [2, 2]), ("b", "bool", [3]), ("c", "int64", []), ("d", "bfloat16", [0, 4])])
    packed = torch.zeros(plan.nbytes, dtype=torch.uint8)
    views = unpack(packed, plan.entries)
    views["a"][1, 1] = 1.0
    views["c"].fill_(-1)
    assert packed[12:16].tolist() == [0, 0, 0x80, 0x3F]
    assert packed[128:136].tolist() == [255] * 8
    assert {name: tuple(view.shape) for name, view in views.items()} == {"a": (2, 2), "b": (3,), "c": (), "d": (0, 4)}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([], "no weights"),
        ([("a", "float32", [0])], "no weights"),
        ([("a", "float32", [1]), ("a", "float32", [2])], "two tensors are named a"),
        ([("a", "floaty", [1])], "'floaty' is not a dtype"),
        ([("a", "nn", [1])], "'nn' is not a dtype"),
    ],
)
def test_wrong_tensors_are_refused(tensors, message):
    with pytest.raises(DeliveryError, match=message):
        make_plan(tensors)


def test_tensors_are_on_a_device_only_if_all_of_them_are():
    here = {"a": torch.zeros(2), "b": torch.zeros(3)}
    assert all_on(torch.device("cpu"), here)
    assert not all_on(torch.device("cuda", 0), here)
    assert all_on(torch.device("cuda", 0), {})
