from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import DataError
from headrace.tasks.dataset import PromptFormat, Prompts, check_disjoint, load_prompts, prompt_content, split_heldout
from headrace.tasks.records import Table
from headrace.types import Prompt


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_text_and_messages_become_prompts(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}]
    path = write(
        tmp_path / "data.jsonl",
        {"prompt": "What is 2+2?", "answer": "4", "id": "first"},
        {"prompt": messages, "answer": [1, {"deep": None}], "id": 7},
    )
    plain, chat = load_prompts(path, system="Be brief.")
    assert plain == Prompt(
        id="first",
        messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2+2?"}],
        data={"answer": "4"},
        as_text=True,
    )
    assert chat == Prompt(id="7", messages=messages, data={"answer": [1, {"deep": None}]})
    assert load_prompts(path)[0].messages == [{"role": "user", "content": "What is 2+2?"}]


def test_ids_without_an_id_are_stable(tmp_path: Path) -> None:
    a = load_prompts(write(tmp_path / "a", {"prompt": "one", "answer": 1, "level": 2}, {"prompt": "two"}))
    b = load_prompts(write(tmp_path / "b", {"prompt": "two"}, {"level": 2, "answer": 1, "prompt": "one"}), system="S")
    assert [prompt.id for prompt in a] == [prompt.id for prompt in reversed(b)]
    # Pinned: a journal written by an earlier release must still be understood.
    assert a[1].id == hashlib.blake2b(b'{"data":{},"prompt":"two"}', digest_size=12).hexdigest()


def test_the_last_line_may_lack_its_line_break_and_the_first_may_have_a_mark(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes('\ufeff{"prompt": "é"}\r\n{"prompt": "b"}'.encode())
    assert [prompt.messages[0]["content"] for prompt in load_prompts(path) if prompt.messages] == ["é", "b"]


GOOD = '{"prompt": "fine"}'


@pytest.mark.parametrize(
    ("lines", "error"),
    [
        (["", "  "], "{path} is empty"),
        ([GOOD, "", '{"prompt": "b"}'], "{path}, line 2: the line is empty"),
        ([GOOD, '{"prompt": "b"'], "{path}, line 2 is not JSON: Input data was truncated"),
        ([GOOD, "[1, 2]"], '{path}, line 2 must be an object with a "prompt", not a list'),
        (['{"question": "b", "answer": 1}'], '{path}, line 1 has no "prompt" (it has: question, answer)'),
        (['{"prompt": 3}'], '{path}, line 1: "prompt" must be text or a list of messages, not a number'),
        (['{"prompt": []}'], '{path}, line 1: "prompt" must be text or a list of messages, not empty'),
        (['{"prompt": " "}'], '{path}, line 1: "prompt" is empty'),
        (['{"prompt": ["hi"]}'], '{path}, line 1: message 1 of "prompt" needs "role" and "content", both text'),
        (
            ['{"prompt": [{"role": "user", "content": null}]}'],
            '{path}, line 1: message 1 of "prompt" needs "role" and "content", both text',
        ),
        (
            ['{"prompt": [{"role": "user", "content": "x", "n": 1}]}'],
            "{path}, line 1: 'n' in message 1 of \"prompt\" must be text",
        ),
        (['{"prompt": [{"role": "assistant", "content": "x"}]}'], '{path}, line 1: the last message of "prompt" is'),
        (['{"prompt": "b", "id": [1]}'], '{path}, line 1: "id" must be text or a whole number, not a list'),
        (
            ['{"prompt": "a", "id": "x"}', GOOD, '{"prompt": "b", "id": "x"}'],
            "{path}, line 3: the id 'x' is already that of line 1",
        ),
        ([GOOD, GOOD], "{path}, line 2: the id "),
    ],
)
def test_each_mistake_is_one_line_with_its_place(tmp_path: Path, lines: list[str], error: str) -> None:
    path = write(tmp_path / "data.jsonl", *lines)
    with pytest.raises(DataError) as caught:
        load_prompts(path)
    assert str(caught.value).startswith(error.replace("{path}", str(path)))
    assert "\n" not in str(caught.value)


def test_files_that_are_not_there_or_not_text(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nothing\.jsonl: there is no such file"):
        load_prompts(tmp_path / "nothing.jsonl")
    (tmp_path / "latin").write_bytes(b'{"prompt": "fine"}\n{"prompt": "\xe9"}\n')
    with pytest.raises(DataError, match="latin, line 2 is not JSON"):
        load_prompts(tmp_path / "latin")


@given(st.lists(st.integers(0, 30), min_size=2, max_size=60), st.integers(0, 20))
def test_a_split_is_exact_disjoint_and_complete(contents: list[int], count: int) -> None:
    rows = [{"prompt": str(c), "id": f"p{i}"} for i, c in enumerate(contents)]
    prompts = Prompts(Table(rows, "a table"), PromptFormat())
    single = sum(contents.count(c) == 1 for c in contents)
    if count and (single < count or count == len(prompts)):
        with pytest.raises(DataError, match="cannot be held out"):
            split_heldout(prompts, count)
        return
    train, heldout = split_heldout(prompts, count)
    assert len(heldout) == count
    assert sorted(p.id for p in [*train, *heldout]) == sorted(p.id for p in prompts)
    assert not {prompt_content(p) for p in train} & {prompt_content(p) for p in heldout}
    # The choice follows the ids, not the order of the lines.
    _, again = split_heldout(Prompts(Table(rows[::-1], "a table"), PromptFormat()), count)
    assert {p.id for p in again} == {p.id for p in heldout}


def test_two_files_may_not_share_a_prompt_or_an_id(tmp_path: Path) -> None:
    train = write(tmp_path / "train", {"prompt": "a", "id": "1"}, {"prompt": "b", "id": "2"})
    same_content = write(tmp_path / "same", {"prompt": "c", "id": "3"}, {"prompt": "b", "answer": 4, "id": "9"})
    same_id = write(tmp_path / "id", {"prompt": "c", "id": "1"})
    fine = write(tmp_path / "fine", {"prompt": "c", "id": "3"})
    loaded = load_prompts(train)
    check_disjoint(loaded, load_prompts(fine))
    with pytest.raises(DataError) as caught:
        check_disjoint(loaded, load_prompts(same_content))
    assert str(caught.value) == f"{same_content}, line 2: this prompt is also trained on ({train}, line 2)"
    with pytest.raises(DataError) as caught:
        check_disjoint(loaded, load_prompts(same_id))
    assert str(caught.value) == f"{same_id}, line 1: the id '1' is also in {train}, line 1"
