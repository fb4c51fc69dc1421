from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.errors import ConfigError, PeerDied
from headrace.reference import call_factory, import_function


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory of its own; what is imported from it is forgotten again."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_a_function_of_an_installed_module() -> None:
    import json

    assert import_function("json:dumps") is json.dumps
    assert import_function("pathlib:Path.cwd")() == Path.cwd()


def test_a_module_in_the_working_directory(workplace: Path) -> None:
    (workplace / "my_rewards_here.py").write_text("def reward(completion): return 3.0")
    assert import_function("my_rewards_here:reward")("x") == 3.0


def test_a_file_with_a_neighbour_and_a_dataclass(workplace: Path) -> None:
    (workplace / "sub").mkdir()
    (workplace / "sub" / "neighbour_of_rewards.py").write_text("BONUS = 2.5")
    (workplace / "sub" / "rewards.py").write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\nimport neighbour_of_rewards\n"
        "@dataclass\nclass Reward:\n    scale: float = 2.0\n"
        "    def __call__(self, completion): return self.scale * neighbour_of_rewards.BONUS\n"
        "reward = Reward()\n"
    )
    function = import_function("sub/rewards.py:reward")
    assert function("x") == 5.0
    assert import_function(f"{workplace}/sub/../sub/rewards.py:reward") is function


def test_a_file_never_hides_an_installed_module(workplace: Path) -> None:
    (workplace / "json.py").write_text("def reward(completion): return 1.0")
    assert import_function("json.py:reward")("x") == 1.0
    import json

    assert json.loads("1") == 1


@pytest.mark.parametrize(
    ("reference", "line"),
    [
        ("no_colon", "'no_colon' must be `module:function` or `path/to/file.py:function`"),
        (":f", "':f' must be `module:function` or `path/to/file.py:function`"),
        ("nowhere_at_all:f", "there is no module 'nowhere_at_all' (looked for 'nowhere_at_all')"),
        ("json.nothing:f", "there is no module 'json.nothing' (looked for 'json.nothing')"),
        ("missing/file.py:f", "there is no file missing/file.py"),
        ("json:nothing", "'json:nothing': json has no 'nothing'"),
        ("json:__name__", "'json:__name__': __name__ is a str, not a function"),
        ("breaks_one.py:f", "importing breaks_one.py raised ValueError: no such luck (breaks_one.py, line 2)"),
        ("breaks_one:f", "importing breaks_one raised ValueError: no such luck (breaks_one.py, line 2)"),
        ("exits_at_once:f", "importing exits_at_once raised SystemExit: 3 (exits_at_once.py, line 1)"),
        ("needs_more:f", "importing needs_more raised ModuleNotFoundError: No module named 'not_there_either'"),
        ("bad_syntax.py:f", "importing bad_syntax.py raised SyntaxError: invalid syntax"),
    ],
)
def test_each_mistake_is_one_line(workplace: Path, reference: str, line: str) -> None:
    (workplace / "breaks_one.py").write_text("x = 1\nraise ValueError('no such luck\\nand more of it')")
    (workplace / "exits_at_once.py").write_text("raise SystemExit(3)")
    (workplace / "needs_more.py").write_text("import not_there_either")
    (workplace / "bad_syntax.py").write_text("def f(:\n")
    with pytest.raises(ConfigError) as caught:
        import_function(reference)
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)


def test_a_failed_import_can_be_tried_again(workplace: Path) -> None:
    file = workplace / "mended.py"
    file.write_text("raise ValueError")
    with pytest.raises(ConfigError, match="raised ValueError"):
        import_function("mended.py:f")
    file.write_text("def f(): return 'mended now'")
    assert import_function("mended.py:f")() == "mended now"


def test_a_factory_that_raises_is_one_line_and_errors_of_headrace_pass(workplace: Path) -> None:
    (workplace / "makes.py").write_text("def make(what):\n    raise what\n")
    make = import_function("makes.py:make")
    for given, text in ((ValueError("odd\nvery"), "ValueError: odd"), (SystemExit(3), "SystemExit: 3")):
        with pytest.raises(ConfigError) as caught:
            call_factory("[engine] kind", make, given)
        assert str(caught.value) == f"[engine] kind raised {text} (makes.py, line 2)"
    with pytest.raises(PeerDied):
        call_factory("[engine] kind", make, what=PeerDied("server", "gone"))
    assert call_factory("[engine] kind", dict, a=1) == {"a": 1}
