import itertools
import threading
from collections import defaultdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.delivery import copying
from headrace.delivery.copying import copy_all, share
from headrace.errors import DeliveryError

FLOATS = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64])


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "SPAN", 64)
    monkeypatch.setattr(copying, "WORTH_THREADS", 0)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(FLOATS, FLOATS, st.integers(0, 200)), min_size=1, max_size=8), st.integers(2, 4))
def test_threads_copy_and_cast_as_torch_does(tensors: list[tuple[torch.dtype, torch.dtype, int]], threads: int):
    generator = torch.Generator().manual_seed(0)
    sources = {str(i): torch.randn(n, generator=generator).to(was) for i, (was, _, n) in enumerate(tensors)}
    # Inside a larger one: nothing is written past an end.
    around = {str(i): torch.full((n + 2,), 7, dtype=dtype) for i, (_, dtype, n) in enumerate(tensors)}
    copy_all({name: each[1:-1] for name, each in around.items()}, sources, threads=threads)
    for name, each in around.items():
        assert torch.equal(each[1:-1], sources[name].to(each.dtype))
        assert each[0] == each[-1] == 7


def test_tensors_with_gaps_parameters_and_bools():
    base = torch.arange(600.0).reshape(20, 30)
    sources = {"turned": base.t(), "parameter": base.double(), "bool": base > 5, "scalar": torch.tensor(3.0)}
    live = torch.nn.Parameter(torch.zeros(20, 30))
    targets = {
        "turned": torch.zeros(30, 20),
        "parameter": live,
        "bool": torch.zeros(20, 30, dtype=torch.bool),
        "scalar": torch.zeros(()),
    }
    with torch.no_grad():
        copy_all(targets, sources, threads=3)
    for name, target in targets.items():
        assert torch.equal(target, sources[name].to(target.dtype)), name
    assert live.grad_fn is None and live.requires_grad


def test_nothing_is_copied_if_a_shape_differs():
    targets = {"a": torch.zeros(100), "b": torch.zeros(3)}
    with pytest.raises(DeliveryError, match="b has shape"):
        copy_all(targets, {"a": torch.ones(100), "b": torch.ones(4)}, threads=2)
    assert not targets["a"].any()


def test_one_thread_leaves_it_to_torch(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("headrace.delivery.copying.divisible", lambda *_: pytest.fail("asked"))
    target = torch.zeros(100)
    copy_all({"a": target}, {"a": torch.ones(100)}, threads=1)
    assert target.all()


def test_each_piece_is_taken_once_by_several_threads():
    together, taken = threading.Barrier(3, timeout=30), defaultdict(list)

    def work(piece):
        mine = taken[threading.get_ident()]
        mine.append(piece)
        if len(mine) == 1:
            together.wait()

    share(work, list(range(50)), 3, "test")
    assert len(taken) == 3 and sorted(itertools.chain(*taken.values())) == list(range(50))


@pytest.mark.parametrize("where", ["caller", "other"])
def test_what_a_thread_raises_is_raised(where: str):
    caller = threading.current_thread()
    first = threading.Barrier(2, timeout=30)

    def work(piece):
        first.wait()
        if (threading.current_thread() is caller) == (where == "caller"):
            raise DeliveryError("no more")

    with pytest.raises(DeliveryError, match="no more"):
        share(work, [1, 2], 2, "test")
