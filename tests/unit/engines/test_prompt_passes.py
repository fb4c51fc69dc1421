"""What the device is told of a pass over prompts, where its tokens lie, and which sizes of passes are captured."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.engines.base import Request, Sampling
from headrace.engines.embedded.device.graphs import Record
from headrace.engines.embedded.device.prompts import HOST_BOUND, PassShape, PromptPasses, describe, split_table
from headrace.engines.embedded.kernels.attention import choose_queries, tiles_of
from headrace.engines.embedded.kernels.cache import find_places
from headrace.engines.embedded.kernels.rows import IDLE
from headrace.engines.embedded.scheduler import Chunk
from headrace.engines.embedded.sequence import Sequence

SPARE = 9


def chunk(tokens: list[int], start: int, count: int, row: int) -> Chunk:
    request = Request(id=str(row), token_ids=np.array(tokens, np.int32), sampling=Sampling(max_tokens=4))
    sequence = Sequence(request, row)
    sequence.row = row
    return Chunk(sequence, start, count)


def told(shape: PassShape, chunks: list[Chunk]) -> dict[str, list[int]]:
    counts = np.array([c.count for c in chunks], np.int32)
    table = describe(shape, chunks, counts, SPARE)
    assert table.dtype == np.int32
    assert all(part.ctypes.data % 16 == table.ctypes.data % 16 for part in split_table(shape, table).values())
    return {name: part.tolist() for name, part in split_table(shape, table).items()}


def test_a_pass_is_told_in_one_piece_and_filled_up() -> None:
    # The end of a prompt after a cached beginning, a prompt that is not whole yet, a whole one.
    chunks = [
        chunk([5, 6, 7, 8, 9], 2, 3, row=4),
        chunk([1, 2, 3, 4], 0, 2, row=1),
        chunk([11, 12, 13, 14, 15], 0, 5, row=0),
    ]
    found = told(PassShape(tokens=12, chunks=4, queries=2), chunks)
    assert found["ids"] == [7, 8, 9, 1, 2, 11, 12, 13, 14, 15, 0, 0]
    assert found["owners"] == [0, 0, 0, 1, 1, 2, 2, 2, 2, 2, -1, -1]
    assert found["rows"][:3] == [4, 1, 0]
    assert found["starts"][:3] == [2, 0, 0]
    assert found["offsets"] == [0, 3, 5, 10, 10]
    assert found["tiles"] == [*(0, 0, 1, 2, 2, 2, -1, -1, -1, -1), *(0, 2, 0, 0, 2, 4, -1, -1, -1, -1)]
    # The two that end their sequences are drawn for, in their order; the others draw for nobody.
    assert found["kept"][:2] == [2, 9]
    assert found["entries"] == [4, 0, SPARE, SPARE]
    assert found["positions"] == [4, 4, IDLE, IDLE]


def test_a_pass_in_which_nobody_samples_draws_for_nobody() -> None:
    found = told(PassShape(tokens=2, chunks=1, queries=16), [chunk([1, 2, 3], 0, 2, row=0)])
    assert found["entries"] == [SPARE]
    assert found["positions"] == [IDLE]


@given(st.lists(st.integers(0, 300), min_size=1, max_size=20), st.sampled_from([16, 64, 128]))
def test_tiles_cover_every_token_once_and_fit(counts: list[int], queries: int) -> None:
    tiles = tiles_of(np.array(counts), queries)
    assert tiles.shape[1] <= sum(counts) // queries + len(counts)
    covered = [(c, first + i) for c, first in tiles.T.tolist() for i in range(min(queries, counts[c] - first))]
    assert covered == [(c, i) for c, count in enumerate(counts) for i in range(count)]


def test_queries_of_known_shapes() -> None:
    assert [choose_queries(longest, 64, 2) for longest in (1, 64, 65, 16384)] == [64, 64, 128, 128]
    assert choose_queries(500, 256, 2) == 64
    assert choose_queries(500, 64, 4) == 16


@pytest.mark.parametrize("tokens", [7, 300])
def test_places_are_found_through_the_tables(tokens: int) -> None:
    block_size = 4
    tables = torch.tensor([[3, 5, 0], [9, 7, 2]], dtype=torch.int32)
    owners = torch.full((tokens,), -1, dtype=torch.int32)
    owners[:6] = torch.tensor([0, 0, 0, 1, 1, 1])
    numbers = [torch.tensor(values, dtype=torch.int32) for values in ([1, 0], [6, 3], [0, 3, 6])]
    positions, slots = torch.full((tokens,), 77), torch.full((tokens,), 77, dtype=torch.int32)
    find_places(owners, *numbers, tables, block_size, positions, slots)
    assert positions[:6].tolist() == [6, 7, 8, 3, 4, 5]
    assert slots[:6].tolist() == [7 * 4 + 2, 7 * 4 + 3, 2 * 4 + 0, 3 * 4 + 3, 5 * 4 + 0, 5 * 4 + 1]
    assert (positions[6:] == 0).all() and (slots[6:] == -1).all()


class FakePart:
    """Stands for the model, the cache, the state and the step of passes that are not computed here."""

    device = torch.device("cpu")
    spare = SPARE

    def __init__(self, parameters: int, rows: int) -> None:
        self.model = self.cache = self.state = self
        self.routing = None
        self.rows = rows
        self.layers = [(torch.zeros(1, 1, 1, 64, dtype=torch.bfloat16),) * 2]
        self._parameters = parameters

    def parameters(self) -> Iterator[Any]:
        yield torch.empty(self._parameters, device="meta", dtype=torch.bfloat16)

    def upload(self, values: Any, into: torch.Tensor | None = None) -> torch.Tensor:
        sent = torch.from_numpy(values)
        return sent if into is None else into.copy_(sent)


class Watched(PromptPasses):
    def __init__(self, parameters: int, rows: int, record: Record | None) -> None:
        part: Any = FakePart(parameters, rows)
        super().__init__(part, record)
        self.computed: list[tuple[PassShape, int]] = []

    def _compute(self, shape: PassShape, told: torch.Tensor, recorder: Any, variant: Any) -> None:
        self.computed.append((shape, int(told[0])))


def passes(parameters: int = 10**8, rows: int = 64) -> tuple[Watched, list[Any]]:
    recorded: list[Any] = []

    def record(body: Any) -> Any:
        recorded.append(body)
        return body

    return Watched(parameters, rows, record), recorded


def prompts(count: int, length: int, first: int = 1) -> list[Chunk]:
    return [chunk([first] * length, 0, length, row) for row in range(count)]


def test_a_size_that_comes_again_is_captured_once_and_told_anew() -> None:
    found, recorded = passes()
    for first in (1, 2, 3, 4):
        found.run(prompts(10, 30, first), "plain")
    assert [shape for shape, _ in found.computed] == [PassShape(512, 64, 64)] * 4
    assert [ids for _, ids in found.computed] == [1, 2, 3, 4]
    assert len(recorded) == 1
    found.run(prompts(10, 30), "filtered")
    assert len(recorded) == 1


def test_a_pass_has_room_for_its_chunks_and_its_longest_one() -> None:
    found, _ = passes(rows=40)
    for chunks in (prompts(3, 4), prompts(40, 2), prompts(1, 500), prompts(1, 16384)):
        found.run(chunks, "plain")
    shapes = [shape for shape, _ in found.computed]
    assert shapes == [
        PassShape(256, 32, 64),
        PassShape(512, 40, 64),
        PassShape(512, 40, 128),
        PassShape(16384, 40, 128),
    ]


def test_what_is_not_worth_a_capture_is_not_filled_up() -> None:
    large, recorded = passes(parameters=HOST_BOUND // 512 + 1)
    for _ in range(3):
        large.run(prompts(2, 200), "plain")
        large.run(prompts(1, 20_000), "plain")
    assert {shape for shape, _ in large.computed} == {PassShape(400, 2, 128), PassShape(20_000, 1, 128)}
    assert not recorded
    never = Watched(10**8, 64, None)
    never.run(prompts(1, 1), "plain")
    assert never.computed[0][0] == PassShape(2, 1, 64)


def test_a_capture_that_fails_is_said_and_passes_go_on(caplog: pytest.LogCaptureFixture) -> None:
    def record(body: Any) -> Any:
        raise RuntimeError("no graphs here\nat all")

    found = Watched(10**8, 64, record)
    for _ in range(3):
        found.run(prompts(2, 8), "plain")
    assert len(found.computed) == 3
    assert [r.getMessage() for r in caplog.records] == ["passes over prompts run uncaptured: no graphs here"]
