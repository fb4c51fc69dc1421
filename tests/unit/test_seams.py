"""Tests use what is public. They reach for a private name only where `ALLOWED` says why.

A name is private when it begins with one underscore. A test reaches for a private name as an attribute of anything but
`self` or `cls`, by an import from the package, or by a string, as in `setattr`. Private names of other packages are
not looked at where the file shows whose they are: `torch._dynamo` is one.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
TEST_MODULES = {path.stem for path in TESTS.rglob("*.py")}
PACKAGE = "headrace"
NAMED_TUPLES = {"_asdict", "_fields", "_make", "_replace"}
"""These are public: the underscore keeps them apart from the fields of a named tuple."""
TAKE_NAMES = {"delattr", "getattr", "hasattr", "setattr"}
"""Functions and methods that take the name of an attribute."""
PRIVATE = re.compile(r"_[A-Za-z]\w*")
PRIVATE_PATH = re.compile(rf"{PACKAGE}\w*[.:][\w.:]*(?<=[.:])(?P<name>_[A-Za-z]\w*)")

ATTENTION = "Transformers keeps the attention function of a model under this name, and has no public one."
EXPERTS = "The same, for the function of a model's experts."
ALLOWED = {
    ("contract/test_delivery.py", "_Mapped"): "No test can shorten the memory of a GPU that an engine has mapped.",
    ("unit/bench/test_engine_rescore.py", "_attn_implementation"): ATTENTION,
    ("unit/bench/test_shapes.py", "_attn_implementation"): ATTENTION,
    ("unit/engines/test_selfcheck.py", "_attn_implementation"): ATTENTION,
    ("expert_cases.py", "_experts_implementation"): EXPERTS,
    (
        "unit/engines/test_expert_kernels.py",
        "_apply_gate",
    ): "Transformers' activation of experts: what ours must equal.",
    ("unit/engines/test_expert_kernels.py", "_experts_implementation"): EXPERTS,
    ("unit/models/test_experts.py", "_experts_implementation"): EXPERTS,
}
"""Test file and private name -> why the test needs the name."""


class Reaches(ast.NodeVisitor):
    """Collects the private names that one test file reaches for, with their lines."""

    def __init__(self) -> None:
        self.found: list[tuple[int, str]] = []
        self._foreign: set[str] = set()
        """Names that the file imports from other packages."""

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._imported(node.lineno, alias.name, alias.asname or alias.name.partition(".")[0])

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            self._imported(node.lineno, f"{node.module}.{alias.name}", alias.asname or alias.name)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        if PRIVATE.fullmatch(node.attr) and node.attr not in NAMED_TUPLES and not own and not self._is_foreign(node):
            self.found.append((node.lineno, node.attr))
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        named = called in TAKE_NAMES and not (node.args and self._is_foreign(node.args[0]))
        for argument in node.args:
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                path = PRIVATE_PATH.fullmatch(argument.value)
                if path is not None:
                    self.found.append((argument.lineno, path["name"]))
                elif named and PRIVATE.fullmatch(argument.value):
                    self.found.append((argument.lineno, argument.value))
        self.generic_visit(node)

    def _imported(self, line: int, path: str, name: str) -> None:
        package = path.partition(".")[0]
        if package.startswith(PACKAGE):
            self.found += [(line, part) for part in path.split(".") if PRIVATE.fullmatch(part)]
        elif package not in TEST_MODULES:
            self._foreign.add(name)

    def _is_foreign(self, node: ast.expr) -> bool:
        """Whether this is an attribute, of an attribute and so on, of what another package gave."""
        while isinstance(node, ast.Attribute):
            node = node.value
        return isinstance(node, ast.Name) and node.id in self._foreign


def reaches(text: str) -> list[tuple[int, str]]:
    visitor = Reaches()
    visitor.visit(ast.parse(text))
    return visitor.found


def test_no_test_reaches_for_a_private_name() -> None:
    used, wrong = set(), []
    for path in sorted(TESTS.rglob("*.py")):
        file = path.relative_to(TESTS).as_posix()
        for line, name in reaches(path.read_text()):
            used.add((file, name))
            if (file, name) not in ALLOWED:
                wrong.append(f"tests/{file}:{line}: {name}")
    assert not wrong, "use what is public, or add a public way to see or do it:\n" + "\n".join(wrong)
    assert used == ALLOWED.keys(), "the table has a line that nobody needs"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("core._runner.busy", "_runner"),
        ("make()._parts[0]", "_parts"),
        ("super()._answer(1)", "_answer"),
        ("from headrace.engines.fake import _Sequence", "_Sequence"),
        ("from headrace.engines import fake\nfake._ends(1)", "_ends"),
        ("from delivery_parts import Serving\nServing()._core", "_core"),
        ("import headrace_vllm_plugin._hidden", "_hidden"),
        ("monkeypatch.setattr(sender, '_answer', None)", "_answer"),
        ("getattr(sender, '_answer')", "_answer"),
        ("monkeypatch.setattr('headrace.delivery.digest._BAND', 0)", "_BAND"),
        ("stop('engine', 'headrace.engines.embedded.engine:EngineLoop._submit', 4)", "_submit"),
    ],
)
def test_a_private_name_is_found(text: str, name: str) -> None:
    assert [found for _, found in reaches(text)] == [name]


@pytest.mark.parametrize(
    "text",
    [
        "self._core.step()",
        "cls._made = 1",
        "core.__class__.__name__",
        "inputs._replace(lags=None)",
        "import torch\ntorch._dynamo.reset()",
        "from transformers import LlamaForCausalLM\nLlamaForCausalLM._from_config(1)",
        "import torch\nmonkeypatch.setattr(torch, '_dynamo', None)",
        "print('_core')",
        "run('headrace.sim.run_fast')",
    ],
)
def test_what_is_public_or_belongs_to_others_is_not_found(text: str) -> None:
    assert reaches(text) == []
