import json
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import DataError
from headrace.observe.spans import RunClock, Timeline, TimeSpan, read_timeline, timeline_damage, timeline_started
from headrace.observe.summary import compact, duration

CLOCK = RunClock(wall=1000.0, monotonic=50.0)


def test_events_are_what_trace_viewers_read(tmp_path: Path):
    path = tmp_path / "timeline.json"
    with closing(Timeline(path, CLOCK)) as timeline:
        timeline.add("engine-0", [TimeSpan("decode", 50.5, 51.0), TimeSpan("wait for work", 51.0, 51.25, False)])
        timeline.add("trainer-0", [TimeSpan("step", 50.75, 52.0)])
        timeline.add("engine-0", [TimeSpan("decode", 51.25, 51.5)])
    events = json.loads(path.read_text())
    names = {e["pid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    threads = [e for e in events if e["ph"] == "M" and e["name"] == "thread_name"]
    assert names == {1: "engine-0", 2: "trainer-0"}
    assert {(e["pid"], e["tid"]) for e in threads} == {(1, 1), (2, 1)}
    complete = [(names[e["pid"]], e["name"], e["cat"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert complete == [
        ("engine-0", "decode", "work", 500_000, 500_000),
        ("engine-0", "wait for work", "wait", 1_000_000, 250_000),
        ("trainer-0", "step", "work", 750_000, 1_250_000),
        ("engine-0", "decode", "work", 1_250_000, 250_000),
    ]
    assert timeline_started(path) == 1000.0


def test_a_cut_file_loads_up_to_the_cut(tmp_path: Path):
    path = tmp_path / "timeline.json"
    timeline = Timeline(path, CLOCK)
    timeline.add("engine-0", [TimeSpan("decode", 50.0, 51.0)])
    timeline.add("engine-0", [TimeSpan("swap", 51.0, 52.0)])
    whole = path.read_bytes()
    assert [span.name for _, span in read_timeline(path)] == ["decode", "swap"]
    # The rule of the trace-event format: only the closing bracket may be missing.
    json.loads(whole + b"]")
    path.write_bytes(whole[:-10])
    assert [span.name for _, span in read_timeline(path)] == ["decode"]


@pytest.mark.parametrize("ending", ["closed", "open", "torn"])
def test_a_resumed_run_goes_on_in_the_same_file_and_time(tmp_path: Path, ending: str):
    path = tmp_path / "timeline.json"
    first = Timeline(path, CLOCK)
    first.add("engine-0", [TimeSpan("decode", 50.0, 51.0)])
    if ending == "closed":
        first.close()
    if ending == "torn":
        first.add("engine-0", [TimeSpan("lost", 51.0, 52.0)])
        path.write_bytes(path.read_bytes()[:-5])
    # The machine was restarted: the monotonic clock began anew, 100 s of wall time later.
    second = Timeline(path, RunClock(wall=1100.0, monotonic=3.0))
    second.add("trainer-0", [TimeSpan("step", 4.0, 5.0)])
    second.add("engine-0", [TimeSpan("decode", 4.0, 6.0)])
    second.close()
    events = json.loads(path.read_text())
    assert sum(event["ph"] == "i" for event in events) == 1
    assert len({(e["pid"], e["args"]["name"]) for e in events if e["name"] == "process_name"}) == 2
    spans = [(process, span.name, span.start, span.end) for process, span in read_timeline(path)]
    assert spans == [
        ("engine-0", "decode", 0.0, 1.0),
        ("trainer-0", "step", 101.0, 102.0),
        ("engine-0", "decode", 101.0, 103.0),
    ]


times = st.integers(0, 40).map(lambda tenth: 50.0 + tenth / 10)


@given(st.lists(st.tuples(times, times), max_size=30))
def test_no_two_spans_of_one_lane_overlap(tmp_path_factory: pytest.TempPathFactory, pairs: list[tuple[float, float]]):
    path = tmp_path_factory.mktemp("timeline") / "timeline.json"
    with closing(Timeline(path, CLOCK)) as timeline:
        timeline.add("engine-0", [TimeSpan("work", min(pair), max(pair)) for pair in sorted(pairs, key=max)])
    lanes: dict[int, list[tuple[int, int]]] = {}
    for event in json.loads(path.read_text()):
        if event["ph"] == "X":
            lanes.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    assert sum(map(len, lanes.values())) == len(pairs)
    for spans in lanes.values():
        for (_, end), (start, _) in zip(sorted(spans), sorted(spans)[1:], strict=False):
            assert end <= start


def test_the_clock_joins_both_times():
    assert CLOCK.to_wall(53.5) == 1003.5
    now = RunClock.now()
    assert now.to_wall(now.monotonic) == now.wall


def test_numbers_for_people():
    assert [duration(s) for s in (0.04, 59.94, 60.0, 247.4, 7845.0)] == ["0.0 s", "59.9 s", "1:00", "4:07", "2:10:45"]
    assert [compact(n) for n in (0, 12.4, 999, 999.7, 1234, 31_400, 999_999, 4.6e6, 2e9)] == [
        "0",
        "12",
        "999",
        "1.0k",
        "1.2k",
        "31k",
        "1.0M",
        "4.6M",
        "2.0G",
    ]


BAD_LINES = [
    b"\x00\xff\xfe",
    b"not json",
    b"{",
    b"[]",
    b'{"ph":"M","name":"process_name","pid":[1],"args":{"name":"x"}}',
    b'{"ph":"M","name":"thread_name","pid":77,"args":{}}',
    b'{"ph":"i","name":"run started","args":{"time":"x"}}',
    b'{"ph":"i","name":"run started"}',
    b"{" * 5000,
]


@pytest.mark.parametrize("bad", BAD_LINES, ids=range(len(BAD_LINES)))
@pytest.mark.parametrize("where", ["alone", "inside"])
def test_friction_38_a_damaged_timeline_is_named_and_still_read(tmp_path: Path, bad: bytes, where: str) -> None:
    path = tmp_path / "timeline.json"
    timeline = Timeline(path, RunClock(wall=1000.0, monotonic=0.0))
    timeline.add("engine-0", [TimeSpan("decode", 0.0, 1.0)])
    timeline.close()
    assert timeline_damage(path) == ""
    lines = path.read_bytes().split(b"\n")
    lines[3:3] = [bad + b","]
    content = bad if where == "alone" else b"\n".join(lines)
    path.write_bytes(content)
    assert str(path) in timeline_damage(path)
    with pytest.raises(DataError, match=r"timeline\.json is damaged"):
        Timeline(path, RunClock(wall=1000.0, monotonic=0.0))
    assert path.read_bytes() == content
    names = [span.name for _, span in read_timeline(path)]
    assert names == ([] if where == "alone" else ["decode"])
    assert timeline_started(path) in (None, 1000.0)
