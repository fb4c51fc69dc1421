"""Every code block of README.md, CONTRIBUTING.md, docs and examples works as it is written.

A block is run, or its commands are in `NOT_RUN` of doc_reader.py with the reason. A new block that is neither fails.
"""

from __future__ import annotations

import ast
import asyncio
import json
import re
import sqlite3
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
from doc_reader import (
    DATASETS,
    MODELS,
    NOT_RUN,
    REWARDS,
    SMALL_WARM_START,
    STAND_INS,
    TRAINED,
    Reader,
    commands_of,
    set_each,
    succeeded,
    words_of,
)
from runs import QUICKSTART, headrace

from doc_blocks import BLOCKS, PAGES, ROOT, SHELL, Block, quoted_lines
from headrace.config import EngineConfig, load_config
from headrace.engines.base import Request, Sampling
from headrace.engines.embedded.engine import EmbeddedEngine
from headrace.errors import ConfigError
from headrace.tasks.dataset import load_prompts
from waiting import until

KINDS = ("", *SHELL, "toml", "python", "json", "sql")
"""The languages of blocks. A block without one is a drawing or something that a program printed."""

ELSEWHERE = {
    "docs/extending.md": ("test_extensions.py", "test_extension_scorer.py", "test_extension_engine.py"),
    "docs/losses.md": ("test_new_loss.py",),
}
"""Pages whose Python blocks other tests train with, and the files of those tests."""

TASKS = {
    "docs/gateway.md": ["task.kind=agent", "task.agent=my_agent.py:agent", "task.path=train.jsonl"],
    "docs/tasks.md": ["task.kind=environment", "task.factory=guess.py:Guessing", "rollouts.max_turns=2"],
}
"""Pages with a task that is trained with, and the settings that choose it."""

OWN_TESTS = ("async def alternatives(", "def adapted_core(", 'run.post("/sessions"', "GRPOTrainer(")
"""Texts of Python blocks that have tests of their own below."""

NO_PROMPT = (
    'headrace: train.jsonl, line 4 has no "prompt" (it has: question); name the field in [task] fields = '
    '{prompt = "..."}'
)

LORA_MESSAGE = (
    "headrace: LoRA target 'nope' is not in the model; its linear layers are "
    "down_proj, gate_proj, k_proj, lm_head, o_proj, q_proj, up_proj, v_proj"
)
MESSAGES = {
    "headrace: [buffer] unknown key 'dept' (did you mean 'depth'?)": ["buffer.dept=2"],
    "headrace: [algorithm] loss: there is no file my_loss.py": ["algorithm.loss=my_loss.py:build"],
    LORA_MESSAGE: ['lora.targets=["nope"]'],
    "[algorithm] tis_cap: only 'tis' looks at it, which is not in corrections": ["algorithm.tis_cap=3.0"],
    "[algorithm] clip_low: loss 'cispo' does not look at it (only dapo, decoupled_ppo, grpo, gspo)": [
        "algorithm.loss=cispo", "algorithm.clip_low=0.1",
    ],
    "[rollouts] group_size: advantage 'grpo' compares answers and needs at least 2": ["rollouts.group_size=1"],
    "[buffer] max_lag: required with depth = 'unbounded', which nothing else holds back": ["buffer.depth=unbounded"],
    "[buffer] max_lag: 2 is below depth 4, so the deeper work could never be trained (set depth = 2, or a larger "
    "max_lag)": ["buffer.depth=4", "buffer.max_lag=2"],
    "[buffer] on_stale: 'drop' needs max_lag; without it nothing is too old": ["buffer.on_stale=drop"],
    "[buffer] correct_above: says where [algorithm] corrections apply, and there are none": ["buffer.correct_above=1"],
    "[buffer] oversample: makes up for groups that are filtered, and filter is empty": ["buffer.oversample=2"],
    NO_PROMPT: ["task.path=train.jsonl"],
    'headrace: [engine] kind = "vllm" does not go together with [rollouts] top_k, top_p or min_p on a CPU': [
        "engine.kind=vllm", "engine.python=python", "rollouts.top_k=4",
    ],
}  # fmt: skip
"""Mistakes that pages quote the message of, and the settings of the quickstart that make each."""

FOUND_BY = {
    "headrace: [algorithm] loss: there is no file my_loss.py": "check",
    NO_PROMPT: "check",
    LORA_MESSAGE: "train",
}
"""The commands that find those mistakes that are not seen when a configuration is loaded."""


def each(kind: str) -> pytest.MarkDecorator:
    found = [block for block in BLOCKS if block.kind == kind]
    return pytest.mark.parametrize("block", found, ids=[block.where for block in found])


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Reader:
    return Reader(tmp_path_factory.mktemp("reader"))


@pytest.fixture(scope="module")
def quickstart(reader: Reader) -> Path:
    """A small run of the quickstart that has finished."""
    reader.trained("train examples/quickstart/quickstart.toml")
    return reader.home / "runs/quickstart"


def test_every_block_is_of_a_known_kind() -> None:
    fences = sum(len(re.findall(r"^\s*```", page.read_text(), re.MULTILINE)) for page in PAGES)
    assert fences == 2 * len(BLOCKS), "a fence is indented or not closed"
    assert {block.kind for block in BLOCKS} <= set(KINDS)


def test_a_block_that_could_run_says_its_language() -> None:
    runnable = re.compile(r"headrace [a-z]|make |python |pip |[{[]\S*[\]}]$|\{\"|SELECT |import |from \S+ import|def ")
    for block in BLOCKS:
        found = [line for line in block.text.splitlines() if not block.kind and runnable.match(line)]
        assert found == [], f"{block.where} has no language"


@pytest.mark.parametrize("page", sorted({block.page for block in BLOCKS if commands_of(block.page)}))
def test_commands_run(reader: Reader, page: str) -> None:
    for line in commands_of(page):
        reader.run(page, line)


QUOTED = {
    line: str(page.relative_to(ROOT))
    for page in PAGES
    for line in quoted_lines(page)
    if re.match(r"headrace (?!resume|scale)\w+ RUN_DIR|headrace doctor$", line)
}
"""Commands in running text that look into a run, and a page of each. Blocks have `headrace resume` and `scale`."""


@pytest.mark.parametrize("line", sorted(QUOTED))
def test_commands_in_running_text_run(reader: Reader, line: str, quickstart: Path) -> None:
    if line.startswith("headrace stall "):
        done = headrace("stall", str(quickstart))
        assert (done.returncode, "no run lives there" in done.stderr) == (2, True), done.stderr
    else:
        assert reader.run(QUOTED[line], line).strip()


def test_quoted_output_has_the_lines_of_the_output(reader: Reader) -> None:
    """Numbers and names differ from run to run; what each line is about does not."""
    blocks = [block for block in BLOCKS if block.text.startswith("$ ")]
    assert blocks
    for block in blocks:
        command, *expected = block.text.splitlines()
        printed = reader.run(block.page, command).splitlines()
        about = {line.split()[0] for line in printed if line}
        assert {line.split()[0] for line in expected} <= about, block.where


@each("toml")
def test_toml_is_a_configuration(reader: Reader, block: Block) -> None:
    directory = reader.directory(block.page)
    given = tomllib.loads(block.text)
    whole = "model" in given and ("task" in given or "tasks" in given)
    path = directory / (block.file or f"line{block.line}.toml")
    path.write_text(block.text if whole else tomli_w.dumps(completed(given)))
    load_config(path)
    if whole or "task" in given or "tasks" in given:
        assert "\nlag " in succeeded(headrace("check", path.name, cwd=directory))


def completed(fragment: dict[str, Any]) -> dict[str, Any]:
    """The smallest whole configuration with this fragment in it."""
    least: dict[str, Any] = {"run": {"name": "fragment", "versions": 2}}
    if "policies" not in fragment:
        least["model"] = {"path": MODELS[0]}
    if "tasks" not in fragment:
        least["task"] = {"kind": "dataset", "path": DATASETS[0], "reward": f"{REWARDS}:reward"}
    sections = least.keys() | fragment.keys()
    return {
        name: fragment[name] if name == "task" and name in fragment else least.get(name, {}) | fragment.get(name, {})
        for name in sections
    }


@each("json")
def test_json_is_json(reader: Reader, block: Block) -> None:
    records = [json.loads(line) for line in block.text.splitlines()]
    assert records
    if any("prompt" in record for record in records):
        path = reader.directory(block.page) / f"line{block.line}.jsonl"
        path.write_text(block.text)
        assert len(load_prompts(path)) == len(records)
        stand_in = json.loads((reader.directory(block.page) / DATASETS[0]).read_text().splitlines()[0])
        assert records[0].keys() == stand_in.keys(), "the stand-in for the reader's data is not like the example"


def test_the_generated_answer_is_like_the_page(reader: Reader) -> None:
    *_, printed = [reader.run("docs/engine.md", line) for line in commands_of("docs/engine.md")[:3]]
    [shown] = [block for block in BLOCKS if block.page == "docs/engine.md" and block.kind == "json"]
    answer, expected = json.loads(printed), json.loads(shown.text)
    assert answer.keys() == expected.keys()
    assert len(answer["token_ids"]) == len(expected["token_ids"])


@each("sql")
def test_sql_finds_something(block: Block, quickstart: Path) -> None:
    with sqlite3.connect(quickstart / "journal.db") as journal:
        assert journal.execute(block.text).fetchall()


def is_program(block: Block) -> bool:
    """Whether the block does something, beyond defining what others would call."""
    definitions = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    body = [node for node in ast.parse(block.text).body if not isinstance(node, definitions)]
    return any(not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)) for node in body)


PYTHON = [block for block in BLOCKS if block.kind == "python"]
PROGRAMS = [
    block
    for block in PYTHON
    if block.page not in ELSEWHERE and not block.file and not any(text in block.text for text in OWN_TESTS)
]


def test_every_python_block_is_run_or_used() -> None:
    assert [block.where for block in PROGRAMS if not is_program(block)] == [], "these only define something"
    for page, tests in ELSEWHERE.items():
        sources = [(Path(__file__).parent / name).read_text() for name in tests]
        assert all(page in source for source in sources), f"one of {tests} does not read {page}"
    for block in PYTHON:
        if block.file and not any(text in block.text for text in OWN_TESTS):
            users = [other.text for other in BLOCKS if other.page == block.page and other.kind == "toml"]
            users += TASKS.get(block.page, [])
            users += [(Path(__file__).parent / name).read_text() for name in ELSEWHERE.get(block.page, ())]
            assert any(block.file.removesuffix(".py") in user for user in users), f"nothing trains with {block.where}"


@pytest.mark.parametrize("block", PROGRAMS, ids=[block.where for block in PROGRAMS])
def test_programs_run(reader: Reader, quickstart: Path, block: Block) -> None:
    directory = reader.directory(block.page)
    program = directory / f"line{block.line}.py"
    program.write_text(reader.replaced(block.text))
    done = subprocess.run(
        [sys.executable, program.name], cwd=directory, capture_output=True, text=True, timeout=100, check=False
    )
    assert succeeded(done).strip()


def python_block(text: str) -> Block:
    [block] = [block for block in PYTHON if text in block.text]
    return block


def names_in(reader: Reader, text: str) -> dict[str, Any]:
    """What the Python block with this text in it defines."""
    names: dict[str, Any] = {}
    exec(compile(reader.replaced(python_block(text).text), text, "exec"), names)
    return names


def ask(max_tokens: int) -> Request:
    sampling = Sampling(max_tokens=max_tokens, temperature=1.0, seed=7)
    return Request(id="question", token_ids=np.array([5, 6, 7], np.int32), sampling=sampling)


async def test_the_forks_of_the_engine_page(reader: Reader) -> None:
    alternatives = names_in(reader, OWN_TESTS[0])["alternatives"]
    config = EngineConfig(slots=4, device="cpu")
    engine = EmbeddedEngine.from_path(
        ROOT / "tests/data/tiny_model", config, max_length=100, weights="random", version=0
    )
    try:
        async with asyncio.timeout(60):
            answers = await alternatives(engine, ask(90), 5, 2)
    finally:
        await engine.close()
    assert len(answers) == 3
    assert sorted({deltas[0].id for deltas in answers}) == ["question", "question/fork5.0", "question/fork5.1"]
    assert all(deltas[-1].finish is not None for deltas in answers)


async def test_the_adapted_core_of_the_engine_page(reader: Reader) -> None:
    path = reader.directory("docs/engine.md") / MODELS[0]
    core = names_in(reader, OWN_TESTS[1])["adapted_core"](str(path), 64)
    engine = EmbeddedEngine(core, EngineConfig(slots=4, device="cpu"))
    try:
        async with asyncio.timeout(60):
            deltas = [delta async for delta in engine.generate(ask(4))]
    finally:
        await engine.close()
    assert deltas[-1].finish is not None


def test_the_script_of_trl_becomes_one_call() -> None:
    """The page shows both scripts. Every name of TRL in them has its row in the table of the page."""
    theirs = python_block(OWN_TESTS[3])
    calls = [node for node in ast.walk(ast.parse(theirs.text)) if isinstance(node, ast.Call)]
    used = {
        keyword.arg
        for call in calls
        if isinstance(call.func, ast.Name) and call.func.id in ("GRPOTrainer", "GRPOConfig")
        for keyword in call.keywords
    }
    rows = re.findall(r"^\| (`.*?) \|", (ROOT / theirs.page).read_text(), re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert used - {"args"} <= named
    [ours] = [block for block in PYTHON if block.page == theirs.page and "headrace.train(" in block.text]
    assert len(ours.text.splitlines()) < 20


@pytest.mark.parametrize("page", TASKS)
def test_tasks_of_the_pages_train(reader: Reader, page: str) -> None:
    name = page.replace("/", "_")
    changes = reader.small("run.versions=1", f"run.name={name}", f"model.path={MODELS[0]}", *TASKS[page])
    directory = reader.directory(page)
    (directory / "empty.toml").write_text("")
    summary = json.loads(succeeded(headrace("train", "empty.toml", "--json", *changes, cwd=directory)))
    assert summary["ledger"]["trained"] == 2


async def test_the_agent_from_outside_trains_a_run(reader: Reader) -> None:
    block = python_block(OWN_TESTS[2])
    directory = reader.directory(block.page)
    [command] = [words_of(line) for line in commands_of(block.page) if line.startswith("headrace gateway ")]
    settings = reader.small(*SMALL_WARM_START, "run.versions=1")
    with started(directory, "run", "-m", *command, *settings) as run:
        told = directory / "runs/agent/gateway.json"
        await until(lambda: run.poll() is not None or (told.is_file() and told.stat().st_size > 0), 60)
        # The agent asks for sessions as long as the run lives. It fails when the run has ended.
        with started(directory, "agent", "-c", block.text):
            await until(lambda: run.poll() is not None, 60)
    assert run.returncode == 0, [(directory / f"{name}.log").read_text() for name in ("run", "agent")]
    with sqlite3.connect(directory / "runs/agent/journal.db") as journal:
        assert journal.execute("SELECT state, COUNT(*) FROM groups GROUP BY state").fetchall() == [("trained", 2)]


@contextmanager
def started(directory: Path, name: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """A Python process in the background, whose output is in a file. It is killed at the end."""
    with (directory / f"{name}.log").open("wb") as log:
        process = subprocess.Popen([sys.executable, *arguments], cwd=directory, stdout=log, stderr=log)
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def test_every_quoted_message_has_its_mistake() -> None:
    lines = {line for block in BLOCKS if not block.kind for line in block.text.splitlines()}
    assert {line for line in lines if re.match(r"headrace: |\[\w+\] \w+: ", line)} == MESSAGES.keys()


@pytest.mark.parametrize("message", MESSAGES)
def test_a_mistake_gives_the_message_of_the_page(reader: Reader, tmp_path: Path, message: str) -> None:
    settings = MESSAGES[message]
    found_by = FOUND_BY.get(message, "")
    if not found_by:
        with pytest.raises(ConfigError) as caught:
            load_config(QUICKSTART, settings)
        assert str(caught.value) == message.removeprefix("headrace: ")
        return
    (tmp_path / "examples").symlink_to(reader.home / "examples")
    lines = [{"prompt": "a"}, {"prompt": "b"}, {"prompt": "c"}, {"question": "d"}]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = set_each(f"run.directory={tmp_path}", *settings)
    done = headrace(found_by, "examples/quickstart/quickstart.toml", *options, cwd=tmp_path)
    # Pages quote paths as the reader wrote them.
    assert (done.returncode, done.stderr.replace(f"{tmp_path}/", "")) == (2, f"{message}\n")


def test_nothing_in_the_tables_is_left_over() -> None:
    pages = sorted({block.page for block in BLOCKS})
    commands = [line for page in pages for line in commands_of(page)]
    for beginning in NOT_RUN:
        assert any(line.startswith(beginning) for line in commands), f"no command begins with {beginning}"
    for command in TRAINED:
        assert any(" ".join(words_of(line)[1:]) == command for line in commands), f"no page says {command}"
    texts = "\n".join([*commands, *QUOTED, *(block.text for block in PYTHON)])
    for old in STAND_INS:
        assert old in texts, f"no block says {old}"
        texts = texts.replace(old, "")
    for name in (*MODELS, *DATASETS, REWARDS):
        assert any(name in block.text for block in BLOCKS), f"no block names {name}"
    for text in OWN_TESTS:
        python_block(text)
