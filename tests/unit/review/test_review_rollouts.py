"""Browsing and exporting: the rows that a condition names, their tokens as recorded, and nothing ever changed."""

from __future__ import annotations

import hashlib
import json
import sqlite3
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
from recorded_runs import MODEL, RunMaker, trace
from transformers import AutoTokenizer

from headrace.buffer.reader import JournalReader, open_readonly
from headrace.errors import UserError
from headrace.review.rollouts import changed_tokenizer, export, load_chat, shown, table


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    run = RunMaker(tmp_path / "run")
    run.rollout(trace([(6, -0.5, 3), (7, -0.25, 4), (3, -0.125, 4)]), reward=1.0, step=5)
    run.rollout(trace([(8, -2.0, 4)]), trace([(9, -3.0, 4), (3, -1.0, 4)]), reward=0.5, step=5)
    run.rollout(trace([(7, -1.0, 4)]), reward=0.0, reason="stale\x1b[2J\n")
    run.rollout()
    return run.close()


def opened(run_dir: Path) -> JournalReader:
    return open_readonly(run_dir / "journal.db")


def ids(run_dir: Path, where: str, limit: int | None = None) -> list[str]:
    with opened(run_dir) as journal:
        return [record.id for record in journal.rollout_records(where, limit=limit)]


def test_conditions_choose_rows(run_dir: Path) -> None:
    assert ids(run_dir, "TRUE") == ["0/0", "1/0", "2/0", "3/0"]
    assert ids(run_dir, "TRUE", 2) == ["0/0", "1/0"]
    assert ids(run_dir, "newest_version > oldest_version") == ["0/0"]
    assert ids(run_dir, "reward < 1 -- a comment does not eat what follows") == ["1/0", "2/0"]
    assert ids(run_dir, "prompt = 'prompt-2'") == ["2/0"]
    assert ids(run_dir, "group_id IN (SELECT id FROM groups WHERE state = 'trained')") == ["0/0", "1/0"]
    with opened(run_dir) as journal:
        assert journal.count_rollouts("state = 'trained'") == 2
        assert journal.count_rollouts("prompt = 'prompt-2'") == 1


def test_rollouts_of_a_group_come_by_number(tmp_path: Path) -> None:
    run = RunMaker(tmp_path)
    run.rollout()
    path = run.close()
    with sqlite3.connect(path / "journal.db") as db:
        for index in (10, 2, 1):
            sql = "INSERT INTO rollouts (id, group_id, state, admitted) VALUES (?, 0, 'failed', 0)"
            db.execute(sql, (f"0/{index}",))
    assert ids(path, "TRUE") == ["0/0", "0/1", "0/2", "0/10"]


@pytest.mark.parametrize(
    "where",
    ["rewrd > 1", "reward >", "1; DELETE FROM rollouts", "1) UNION DELETE FROM rollouts --", "?", "", "'a\n", "abs()"],
)
def test_a_bad_condition_is_one_line_and_changes_nothing(run_dir: Path, where: str) -> None:
    before = hashlib.sha256((run_dir / "journal.db").read_bytes()).digest()
    for ask in (lambda found: found.count_rollouts(where), lambda found: list(found.rollout_records(where))):
        with opened(run_dir) as journal, pytest.raises(UserError, match="--where") as refused:
            ask(journal)
        assert len(str(refused.value).splitlines()) == 1
    assert hashlib.sha256((run_dir / "journal.db").read_bytes()).digest() == before
    assert len(ids(run_dir, "TRUE")) == 4


def test_an_error_while_rows_are_read_is_the_conditions_too(run_dir: Path) -> None:
    with opened(run_dir) as journal, pytest.raises(UserError, match=r"--where .*malformed JSON"):
        list(journal.rollout_records("json_extract(prompt, '$.x') = 1"))


def test_the_table_has_a_line_for_each_rollout(run_dir: Path) -> None:
    with opened(run_dir) as journal:
        lines = table(shown(journal, journal.rollout_records(), None))
    assert [line.split() for line in lines[:3]] == [
        ["id", "step", "state", "ending", "reward", "tokens", "versions"],
        ["0/0", "5", "trained", "finished", "1", "3", "3-4"],
        ["1/0", "5", "trained", "finished", "0.5", "3", "4"],
    ]
    assert lines[3].split() == ["2/0", "-", "dropped", "(stale\\x1b[2J\\n)", "finished", "0", "1", "4"]
    assert lines[4].split() == ["3/0", "-", "in_flight", "-", "-", "0", "-"]


def test_the_text_is_what_the_models_tokenizer_says(run_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    with opened(run_dir) as journal:
        entries = list(shown(journal, journal.rollout_records(), load_chat(run_dir)))
    assert entries[0]["text"] == [tokenizer.decode([6, 7, 3])]
    assert entries[1]["text"] == [tokenizer.decode([8]), tokenizer.decode([9, 3])]
    assert entries[3]["text"] is None
    assert entries[0]["prompt_text"] == [tokenizer.decode([1, 6, 7, 2])]
    assert entries[3]["metrics"] is None
    lines = table(entries)
    assert lines[0].split()[-1] == "text"
    assert lines[1].endswith(tokenizer.decode([6, 7, 3]))


def test_numbers_beside_the_reward_have_a_column_if_there_are_any() -> None:
    entry = {
        "id": "0/0", "step": 1, "state": "trained", "reason": "", "ending": "finished", "reward": 1.0,
        "sampled_tokens": 1, "oldest_version": 0, "newest_version": 0, "metrics": {"turns": 1.0, "format": 0.5},
    }  # fmt: skip
    heading, line = table([entry])
    assert heading.split()[5] == "numbers"
    assert line.split()[5] == "format=0.5"
    assert "numbers" not in table([entry | {"metrics": {"turns": 1.0}}])[0]


def test_a_long_text_is_cut_in_the_table_only() -> None:
    entry = {
        "id": "0/0", "step": 1, "state": "trained", "reason": "", "ending": "finished", "reward": 1.0,
        "sampled_tokens": 1, "oldest_version": 0, "newest_version": 0, "text": ["x" * 99, "y" * 99],
    }  # fmt: skip
    shown_text = table([entry])[1].split()[-1]
    assert shown_text == "x" * 99 + "…"
    assert entry["text"] == ["x" * 99, "y" * 99]


RECORDS = [
    ("0/0", 0, [1, 6, 7, 2, 6, 7, 3], [0, 0, 0, 0, -0.5, -0.25, -0.125], [-1, -1, -1, -1, 3, 4, 4], 3),
    ("1/0", 0, [1, 6, 7, 2, 8], [0, 0, 0, 0, -2], [-1, -1, -1, -1, 4], 1),
    ("1/0", 1, [1, 6, 7, 2, 9, 3], [0, 0, 0, 0, -3, -1], [-1, -1, -1, -1, 4, 4], 2),
    ("2/0", 0, [1, 6, 7, 2, 7], [0, 0, 0, 0, -1], [-1, -1, -1, -1, 4], 1),
    ("3/0", None, None, None, None, None),
]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_an_export_holds_what_was_recorded(run_dir: Path, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"out.{suffix}"
    with opened(run_dir) as journal:
        assert export(path, journal, journal.rollout_records(), load_chat(run_dir)) == 5
    if suffix == "jsonl":
        found = [json.loads(line) for line in path.read_text().splitlines()]
    else:
        found = pyarrow.parquet.read_table(path).to_pylist()
    assert [entry["id"] for entry in found] == [record[0] for record in RECORDS]
    for entry, (_, number, tokens, logprobs, versions, trained) in zip(found, RECORDS, strict=True):
        assert (entry["trace"], entry["token_ids"], entry["versions"]) == (number, tokens, versions)
        assert entry["logprobs"] == logprobs  # powers of two: exact in float32
        assert entry["trained"] == (None if trained is None else [False] * 4 + [True] * trained)
        assert (entry["text"] is None) == (number is None)
    assert [entry["step"] for entry in found] == [5, 5, 5, None, None]
    assert [entry["prompt"] for entry in found[1:3]] == ["prompt-1", "prompt-1"]
    assert {path.name for path in tmp_path.iterdir()} == {"run", path.name}, "nothing half-written stays"


def test_parquet_keeps_float32_to_the_bit_and_types_of_empty_columns(tmp_path: Path) -> None:
    run = RunMaker(tmp_path / "run")
    value = float(np.float32(-0.1))
    run.rollout(trace([(5, value, 0)]))
    run_dir = run.close()
    with opened(run_dir) as journal:
        export(tmp_path / "out.parquet", journal, journal.rollout_records())
        export(tmp_path / "none.parquet", journal, journal.rollout_records("FALSE"))
    found = pyarrow.parquet.read_table(tmp_path / "out.parquet")
    assert found.column("logprobs").to_pylist()[0][-1] == value
    assert found.schema == pyarrow.parquet.read_table(tmp_path / "none.parquet").schema
    assert str(found.schema.field("step").type) == "int64"
    assert "text" not in found.column_names


def test_an_export_that_cannot_be_made_is_one_line(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(run_dir) as journal:
        with pytest.raises(UserError, match=r"out\.csv: the name must end in \.jsonl or \.parquet"):
            export(tmp_path / "out.csv", journal, journal.rollout_records())
        with pytest.raises(UserError, match=r"No such file or directory"):
            export(tmp_path / "nowhere" / "out.jsonl", journal, journal.rollout_records())
        with pytest.raises(UserError, match="--where"):
            export(tmp_path / "out.jsonl", journal, journal.rollout_records("json_extract(prompt, '$.x') = 1"))
        monkeypatch.setitem(sys.modules, "pyarrow", None)
        monkeypatch.delitem(sys.modules, "pyarrow.parquet")
        with pytest.raises(UserError, match=r'pyarrow \(pip install "headrace\[parquet\]"\)'):
            export(tmp_path / "out.parquet", journal, journal.rollout_records())
    assert {path.name for path in tmp_path.iterdir()} == {"run"}


def test_a_tokenizer_that_has_changed_since_the_run_began_is_named(tmp_path: Path) -> None:
    for name, recorded, line in (
        ("same", hashlib.sha256((MODEL / "tokenizer.json").read_bytes()).hexdigest(), ""),
        ("other", "0" * 64, f"{tmp_path / 'other'}: its tokenizer.json has changed since the run began"),
        ("old", None, ""),
    ):
        run = RunMaker(tmp_path / name)
        if recorded is not None:
            run.journal.meta("tokenizer", recorded)
        path = run.close()
        with opened(path) as journal:
            assert changed_tokenizer(journal, load_chat(path)).startswith(line)
            assert bool(changed_tokenizer(journal, load_chat(path))) == bool(line)
