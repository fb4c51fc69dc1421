"""The rows of files of each kind, under other names, and held out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.errors import DataError
from headrace.tasks.dataset import PromptFormat, Prompts, check_disjoint, load_prompts, split_heldout
from headrace.tasks.records import Table, read_file
from headrace.types import Prompt

ROWS = [{"question": f"what is {n}?", "solution": str(n), "level": n} for n in range(20)]
FIELDS = {"prompt": "question", "answer": "solution"}


def test_fields_have_the_names_that_the_configuration_gives_them() -> None:
    first = Prompts(Table(ROWS, "rows"), PromptFormat(fields=FIELDS, chat=False))[0]
    assert first.text == "what is 0?"
    assert first.data == {"answer": "0", "solution": "0", "level": 0}
    with pytest.raises(DataError, match=r"rows, row 1 has no 'task', which \[task\] fields calls 'prompt' \(it has"):
        Prompts(Table(ROWS, "rows"), PromptFormat(fields={"prompt": "task"}))


def test_files_are_read_by_the_end_of_their_names(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(ROWS))
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "a.csv").write_text('question,solution,level\n"what, then?",1,2\n"two\nlines",2,3\n')
    assert list(read_file(tmp_path / "a.json").rows) == list(read_file(tmp_path / "a.jsonl").rows) == ROWS
    assert read_file(tmp_path / "a.csv").rows == [
        {"question": "what, then?", "solution": "1", "level": "2"},
        {"question": "two\nlines", "solution": "2", "level": "3"},
    ]


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.json", '{"prompt": "a"}', "must be a list of objects"),
        ("a.json", "[]", "is empty"),
        ("a.json", "[1", "is not JSON"),
        ("a.json", "[1]", 'row 1 must be an object with a "prompt", not a number'),
        ("a.csv", "prompt,answer\n", "has no rows"),
        ("a.csv", "prompt,answer\na,1\nb\n", "row 2 has another number of values than the header has names"),
        ("a.csv", "prompt,answer\na,1,2\n", "row 1 has another number of values than the header has names"),
        ("a.csv", 'prompt\n"a', "is not a CSV file"),
    ],
)
def test_a_mistake_in_a_file_is_one_line(tmp_path: Path, name: str, content: str, expected: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError) as caught:
        load_prompts(tmp_path / name)
    assert str(caught.value).startswith(str(tmp_path / name))
    assert expected in str(caught.value)


def test_rows_that_are_not_in_memory_are_read_when_they_are_asked_for() -> None:
    read: list[int] = []

    class Rows(list[dict[str, object]]):
        def __getitem__(self, index: int) -> dict[str, object]:  # type: ignore[override]
            read.append(index)
            return super().__getitem__(index)

    prompts = Prompts(Table(Rows(ROWS), "a dataset", ids="train-"), PromptFormat(fields=FIELDS))
    assert read == list(range(20))  # Each row is checked once.
    train, heldout = split_heldout(prompts, 5)
    assert len(read) == 20
    assert (len(train), len(heldout)) == (15, 5)
    ids = {prompt.id for prompt in train} | {prompt.id for prompt in heldout}
    assert ids == {f"train-{n}" for n in range(20)}
    assert read[20:] == sorted(read[20:35]) + sorted(read[35:])
    assert prompts[7] == Prompt(
        id="train-7",
        messages=[{"role": "user", "content": "what is 7?"}],
        data={**prompts[7].data, "answer": "7"},
        as_text=True,
    )
    same = Prompts(Table(ROWS[3:4], "another", ids="heldout-"), PromptFormat(fields=FIELDS))
    with pytest.raises(DataError, match=r"another, row 1: this prompt is also trained on \(a dataset, row 4\)"):
        check_disjoint(prompts, same)


def test_plain_text_must_be_text() -> None:
    messages = [{"prompt": [{"role": "user", "content": "a"}]}]
    with pytest.raises(DataError, match=r'row 1: "prompt" must be text, because \[task\] format = "text", not a list'):
        Prompts(Table(messages, "rows"), PromptFormat(chat=False))
