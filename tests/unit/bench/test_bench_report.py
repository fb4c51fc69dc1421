"""How the figures of a benchmark are shown: one name for a figure, in the lines as in the JSON."""

from __future__ import annotations

from headrace.bench.options import lines


def test_figures_have_the_names_of_the_json_and_unknown_ones_are_left_out() -> None:
    found = {
        "model": "m",
        "tokens_per_second": 12345.6,
        "loss": 0.04,
        "mfu": None,
        "answer_lengths": list(range(9)),
        "ratios": [1.5, 2.0],
        "arguments": {"batch": 4},
    }
    assert lines(found) == [
        "model              m",
        "tokens_per_second  12,346",
        "loss               0.04",
        "answer_lengths     9 of them",
        "ratios             1.5, 2",
    ]


def test_parts_with_the_same_figures_stand_side_by_side() -> None:
    run = {"tokens": 10, "seconds": 2.0, "bytes": {"kv": 3}}
    found = {"ratio": 2.0, "slow": run, "fork": {"equal": 8}, "fast": run | {"seconds": 1.0, "extra": 7}}
    assert lines(found) == [
        "ratio  2",
        "",
        "         slow  fast",
        "tokens   10    10",
        "seconds  2     1",
        "extra          7",
        "",
        "    slow bytes  fast bytes",
        "kv  3           3",
        "",
        "       fork",
        "equal  8",
    ]


def test_rows_and_named_parts_are_columns() -> None:
    rows = [{"transport": "shm", "seconds": 1.0}, {"transport": "tcp", "seconds": 2.0, "ratio_to_socket": 0.5}]
    proof = {"full": {"bytes": 1, "tensors": 2}, "delta": {"bytes": 3, "tensors": 2}}
    assert lines({"proof": proof, "rows": rows}) == [
        "         proof full  proof delta",
        "bytes    1           3",
        "tensors  2           2",
        "",
        "                 rows 1  rows 2",
        "transport        shm     tcp",
        "seconds          1       2",
        "ratio_to_socket          0.5",
    ]
