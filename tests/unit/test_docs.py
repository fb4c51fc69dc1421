"""The documents say what is: generated pages are fresh; links, paths, commands and SQL that they quote exist."""

import importlib.util
import re
import shlex
import sqlite3
from pathlib import Path
from types import ModuleType

import pytest
import typer

import headrace
from doc_blocks import FENCE, INLINE, SHELL, shell_lines
from headrace.cli.main import app

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])
NAMES = [str(path.relative_to(ROOT)) for path in DOCUMENTS]
EACH_DOCUMENT = pytest.mark.parametrize("document", DOCUMENTS, ids=NAMES)

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
OUR_PATH = re.compile(r"(?:src|tests|docs|examples|benchmarks)/[\w./-]+")
NAME_IN_FILE = re.compile(r"`([\w.]+)`\s+(?:in|of)\s+`(src/[\w./]+\.py)`")
NAMES_BESIDE_FILE = re.compile(r"^\| (`\w+`(?:, `\w+`)*) \| `(src/[\w./]+\.py)` \|", re.MULTILINE)
FETCHED = set((ROOT / ".gitignore").read_text().split())
"""What a command brings: a fresh checkout does not have it."""
PLACEHOLDERS = ("NAME", "RUN_DIR", "CONFIG", "MODEL_DIR", "FILE")


def configuration_maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_configuration", ROOT / "docs" / "make_configuration.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def without_blocks(text: str) -> str:
    return FENCE.sub("", text)


def anchors(document: Path) -> set[str]:
    headings = HEADING.findall(without_blocks(document.read_text()))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def commands(text: str) -> list[str]:
    """Everything quoted that is a call of the program, in blocks and in running text."""
    lines = [line for kind, block in FENCE.findall(text) if kind in (*SHELL, "") for line in shell_lines(block)]
    quoted = [*lines, *(" ".join(code.split()) for code in INLINE.findall(without_blocks(text)))]
    found = [re.match(r"(?:\$ )?(?:\.venv/bin/)?headrace ([a-z-].*)", line) for line in quoted]
    return [match[1] for match in found if match]


def test_the_configuration_reference_is_up_to_date() -> None:
    maker = configuration_maker()
    assert maker.PAGE.read_text() == maker.render(), "run `make docs`"


def test_every_key_has_a_meaning() -> None:
    rows = re.findall(r"^\| `(\w+)` \|.*\| (.*) \|$", configuration_maker().render(), re.MULTILINE)
    assert len(rows) > 60
    assert [key for key, meaning in rows if not meaning.strip()] == []


def test_every_loss_has_a_row() -> None:
    rows = re.findall(r"^\| `(\w+)`(?: \(default\))? \| ", (ROOT / "docs/losses.md").read_text(), re.MULTILINE)
    losses = {path.stem for path in (ROOT / "src/headrace/algorithms/losses/policy").glob("[!_]*.py")}
    assert losses <= set(rows)


@EACH_DOCUMENT
def test_links_resolve(document: Path) -> None:
    for target in LINK.findall(without_blocks(document.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        found = (document.parent / path).resolve() if path else document
        assert found.exists(), f"{document.name} links to {target}"
        if anchor:
            assert anchor in anchors(found), f"{document.name} links to {target}, which has no such heading"


@EACH_DOCUMENT
def test_paths_exist(document: Path) -> None:
    for code in INLINE.findall(without_blocks(document.read_text())):
        for path in OUR_PATH.findall(code):
            if not any(placeholder in path for placeholder in PLACEHOLDERS) and path not in FETCHED:
                assert (ROOT / path).exists(), f"{document.name} speaks of {path}"


@EACH_DOCUMENT
def test_python_files_named_without_their_folder_exist(document: Path) -> None:
    text = document.read_text()
    shown = "".join(block for _, block in FENCE.findall(text))
    tree = [
        path.as_posix()
        for folder in ("src", "tests", "docs", "examples", "benchmarks")
        for path in ROOT.glob(f"{folder}/**/*.py")
    ]
    for code in INLINE.findall(without_blocks(text)):
        if re.fullmatch(r"[\w/]+\.py", code) and not any(mark in code for mark in PLACEHOLDERS) and code not in shown:
            assert any(path.endswith(f"/{code}") for path in tree), f"{document.name} speaks of {code}"


@EACH_DOCUMENT
def test_names_are_in_the_files_that_are_said_to_have_them(document: Path) -> None:
    text = without_blocks(document.read_text())
    for names, path in [*NAME_IN_FILE.findall(text), *NAMES_BESIDE_FILE.findall(text)]:
        for name in re.findall(r"\w+", names):
            assert re.search(rf"\b{name}\b", (ROOT / path).read_text()), f"{document.name}: {path} has no {name}"


@EACH_DOCUMENT
def test_commands_exist(document: Path) -> None:
    for line in commands(document.read_text()):
        words = shlex.split(line, comments=True)
        command = typer.main.get_command(app)
        while isinstance(command, typer.core.TyperGroup):
            assert words, f"{document.name}: `headrace {line}` is only half a command"
            assert words[0] in command.commands, f"{document.name}: there is no `headrace {line}`"
            command = command.commands[words.pop(0)]
        options = {name for each in command.params for name in (*each.opts, *each.secondary_opts)} | {"--help"}
        assert options & {"--json", "--output"}, "these are not the options of a command"
        unknown = [word for word in words if word.startswith("--") and word.partition("=")[0] not in options]
        assert unknown == [], f"{document.name}: `headrace {line}`"


def test_commands_are_found_at_all() -> None:
    text = "Try `headrace check\nfirst.toml`.\n```sh\n.venv/bin/headrace bench loop --json  # both\n```\n"
    assert commands(text) == ["bench loop --json  # both", "check first.toml"]
    assert commands("```bash\nheadrace check a.toml \\\n    --json\n```\n") == ["check a.toml --json"]
    assert {line.split()[0] for line in commands((ROOT / "README.md").read_text())} >= {"train", "check", "resume"}


@EACH_DOCUMENT
def test_make_targets_exist(document: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    text = document.read_text()
    lines = [line for kind, block in FENCE.findall(text) if kind in SHELL for line in shell_lines(block)]
    quoted = [re.match(r"make ([\w-]+)", code) for code in [*lines, *INLINE.findall(without_blocks(text))]]
    assert {match[1] for match in quoted if match} <= targets


def test_quoted_sql_runs_on_a_journal() -> None:
    journal = sqlite3.connect(":memory:")
    journal.executescript((ROOT / "src/headrace/buffer/schema.sql").read_text())
    queries = [block for path in DOCUMENTS for kind, block in FENCE.findall(path.read_text()) if kind == "sql"]
    assert len(queries) >= 5
    for query in queries:
        journal.execute(query)


def test_the_tree_in_the_readme_is_the_tree() -> None:
    readme = (ROOT / "README.md").read_text()
    tree = next(block for _, block in FENCE.findall(readme) if block.startswith("src/headrace/"))
    named = set(re.findall(r"^  ([\w.]+)/? ", tree, re.MULTILINE))
    package = ROOT / "src" / "headrace"
    folders = {path.name for path in package.iterdir() if (path / "__init__.py").is_file()}
    files = {path.name for path in package.glob("*.py")} - {"__init__.py"}
    assert named == folders | files


def test_the_two_commands_come_early() -> None:
    opening = (ROOT / "README.md").read_text().splitlines()[:40]
    assert {"make quickstart", "make test"} <= {" ".join(line.split()[:2]) for line in opening}


@EACH_DOCUMENT
def test_quoted_python_compiles_and_quoted_imports_are_public(document: Path) -> None:
    for kind, block in FENCE.findall(document.read_text()):
        if kind == "python":
            compile(block, document.name, "exec")
            for names in re.findall(r"^from headrace import (.+)$", block, re.MULTILINE):
                assert set(names.split(", ")) <= set(headrace.__all__)
