"""How the figures of a benchmark are shown: one name for a figure, in the lines as in the JSON."""

from __future__ import annotations

from headrace.bench.report import lines


def test_figures_have_the_names_of_the_json_and_unknown_ones_are_left_out() -> None:
    found = {
        "model": "m",
        "tokens_per_second": 12345.6,
        "loss": 0.04,
        "mfu": None,
        "answer_lengths": list(range(9)),
        "ratios": [1.5, 2.0],
        "step_ms": {"all": 4.25, "decode": None},
        "seconds": {"median": 0.5, "min": 0.25, "max": 1.0},
        "arguments": {"batch": 4},
    }
    assert lines(found) == [
        "model              m",
        "tokens_per_second  12,346",
        "loss               0.04",
        "answer_lengths     9 of them",
        "ratios             1.5, 2",
        "step_ms.all        4.25",
        "seconds            0.5",
    ]


def test_parts_with_the_same_figures_stand_side_by_side() -> None:
    run = {"tokens": 10, "seconds": 2.0, "lag_mean": 0.0, "lag_max": 0, "bytes": {"kv": 3}}
    other = {"continuations": 8, "at": 2000, "equal": 8, "prefilled_tokens": 0, "seconds": 1.0}
    found = {"ratio": 2.0, "slow": run, "fast": run | {"seconds": 1.0, "extra": 7}, "fork": other}
    assert lines(found) == [
        "ratio  2",
        "",
        "          slow  fast",
        "tokens    10    10",
        "seconds   2     1",
        "lag_mean  0     0",
        "lag_max   0     0",
        "bytes.kv  3     3",
        "extra           7",
        "",
        "                  fork",
        "continuations     8",
        "at                2,000",
        "equal             8",
        "prefilled_tokens  0",
        "seconds           1",
    ]


def test_rows_and_named_parts_are_columns() -> None:
    rows = [{"transport": name, "seconds": {"median": 1.0, "min": 0.5, "max": 2.0}} for name in ("shm", "tcp")]
    proof = {"full": {"bytes": 1, "tensors": 2}, "delta": {"bytes": 3, "tensors": 2}}
    assert lines({"proof": proof, "rows": rows}) == [
        "",
        "         proof full  proof delta",
        "bytes    1           3",
        "tensors  2           2",
        "",
        "           rows 1  rows 2",
        "transport  shm     tcp",
        "seconds    1       1",
    ]


def test_a_long_text_is_broken_and_is_in_no_column() -> None:
    formula = "; ".join(["x" * 60, "y" * 60])
    part = {"formula": formula, "a": 1, "b": 2, "c": 3, "d": 4}
    assert lines({"formula": formula, "one": part, "two": part})[:4] == [
        "formula  " + "x" * 60,
        "         " + "y" * 60,
        "",
        "   one  two",
    ]
