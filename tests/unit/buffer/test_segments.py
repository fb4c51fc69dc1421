from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.buffer.segments import Segments, read
from headrace.errors import HeadraceError
from headrace.types import Rollout, Trace


def rollout(index: int, lengths: tuple[int, ...] = (5,)) -> Rollout:
    rng = np.random.default_rng(index)
    traces = [
        Trace(
            token_ids=rng.integers(0, 32_000, n, np.int32),
            trained=rng.random(n) < 0.5,
            logprobs=rng.normal(size=n).astype(np.float32),
            versions=rng.integers(0, 9, n, np.int32),
        )
        for n in lengths
    ]
    return Rollout(id=f"7/{index}", index=index, traces=traces, ending="finished", reward=0.5, metrics={"turns": 2.0})


def same(a: Rollout, b: Rollout) -> bool:
    def plain(x: Rollout) -> object:
        arrays = [[(t.token_ids, t.trained, t.logprobs, t.versions) for t in x.traces]]
        tokens = [[(column.dtype.str, column.tolist()) for column in trace] for trace in arrays[0]]
        return tokens, msgspec.structs.replace(x, traces=[])

    return plain(a) == plain(b)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=1, max_size=6))
def test_what_is_read_is_what_was_written(tmp_path_factory: pytest.TempPathFactory, shapes: list[list[int]]) -> None:
    segments = Segments(tmp_path_factory.mktemp("run") / "segments")
    written = [rollout(i, tuple(lengths)) for i, lengths in enumerate(shapes)]
    places = [segments.append(item) for item in written]
    segments.flush()
    for place, item in reversed(list(zip(places, written, strict=True))):
        assert same(read(segments.directory, *place), item)
    segments.close()


def test_files_are_rolled_and_reopened(tmp_path: Path) -> None:
    segments = Segments(tmp_path, roll_bytes=1000)
    places = [segments.append(rollout(i)) for i in range(20)]
    segments.close()
    again = Segments(tmp_path, roll_bytes=1000)
    places += [again.append(rollout(i)) for i in range(20, 40)]
    again.close()
    names = [path.name for path in sorted(tmp_path.iterdir())]
    assert names[:2] == ["000001.seg", "000002.seg"] and len(names) > 5
    assert all(path.stat().st_size <= 1000 for path in tmp_path.iterdir())
    assert all(same(read(tmp_path, *place), rollout(i)) for i, place in enumerate(places))


@pytest.mark.parametrize("cut", [1, 4, 7, 8, 9, 60])
def test_a_torn_tail_stays_and_a_new_file_begins(tmp_path: Path, cut: int) -> None:
    segments = Segments(tmp_path)
    kept, torn = segments.append(rollout(0)), segments.append(rollout(1))
    segments.close()
    path = tmp_path / torn.segment
    path.write_bytes(path.read_bytes()[: torn.offset + cut])
    again = Segments(tmp_path)
    place = again.append(rollout(2))
    again.close()
    assert path.stat().st_size == torn.offset + cut and place.segment == "000002.seg"
    assert same(read(tmp_path, *kept), rollout(0)) and same(read(tmp_path, *place), rollout(2))


def test_a_file_that_was_set_aside_is_still_read_and_its_number_is_not_used_again(tmp_path: Path) -> None:
    segments = Segments(tmp_path)
    kept = segments.append(rollout(0))
    segments.close()
    (tmp_path / kept.segment).rename(tmp_path / f"damaged-{kept.segment}")
    again = Segments(tmp_path)
    assert again.append(rollout(1)).segment == "000002.seg"
    again.close()
    assert same(read(tmp_path, *kept), rollout(0))


def test_damage_inside_a_file_destroys_nothing_else(tmp_path: Path) -> None:
    segments = Segments(tmp_path)
    places = [segments.append(rollout(i)) for i in range(3)]
    segments.close()
    path = tmp_path / "000001.seg"
    data = bytearray(path.read_bytes())
    data[places[1].offset + 30] ^= 1
    path.write_bytes(data)
    again = Segments(tmp_path)
    new = again.append(rollout(3))
    again.close()
    assert new.segment == "000002.seg"
    assert same(read(tmp_path, *places[2]), rollout(2))
    with pytest.raises(HeadraceError, match=r"000001\.seg is damaged"):
        read(tmp_path, *places[1])


def test_a_missing_file_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(HeadraceError, match=r"000009\.seg cannot be read: No such file"):
        read(tmp_path, "000009.seg", 0, 10)
