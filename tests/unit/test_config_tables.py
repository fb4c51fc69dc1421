"""Tasks, policies and scorers with names: the long form means what the short form means, and a mistake is one line."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from headrace.config import (
    DatasetTaskConfig,
    FunctionScorerConfig,
    GymTaskConfig,
    MixtureConfig,
    dump_config,
    load_config,
    make_config,
    with_settings,
)
from headrace.errors import ConfigError
from headrace.types import POLICY, TASK

MODEL = {"path": "m"}
GYM = {"kind": "gym", "name": "spell_backward"}
SHORT: dict[str, Any] = {"model": MODEL, "task": GYM, "training": {"learning_rate": 1e-4}, "run": {"versions": 3}}
LONG: dict[str, Any] = {
    "tasks": {"spelling": GYM},
    "policies": {"writer": {"model": MODEL, "training": {"learning_rate": 1e-4}}},
    "run": {"versions": 3},
}
DATASET = {"kind": "dataset", "path": "p.jsonl"}
EXACT = {"scorer": "scorers.py:Exact"}
SCORED = {"scorers": {"exact": EXACT}}


def saved(config: Any, directory: Path) -> Any:
    """A configuration after it was written to a run directory and read back."""
    file = directory / "config.toml"
    file.write_text(dump_config(config))
    return load_config(file)


def test_the_short_form_has_the_default_names() -> None:
    config = make_config(SHORT)
    assert (config.task_name, config.policy_name) == (TASK, POLICY) == ("task", "policy")
    assert "tasks" not in dump_config(config)
    assert "policies" not in dump_config(config)


def test_named_ones_mean_what_the_short_form_means(tmp_path: Path) -> None:
    short, named = make_config(SHORT), make_config(LONG)
    assert (named.task_name, named.policy_name) == ("spelling", "writer")
    for section in ("task", "model", "training", "engine", "buffer", "algorithm", "delivery", "run"):
        assert getattr(named, section) == getattr(short, section)
    written = tomllib.loads(dump_config(named))
    assert set(written["policies"]["writer"]) == {
        "model", "engine", "buffer", "algorithm", "training", "warm_start", "delivery",
    }  # fmt: skip
    assert saved(named, tmp_path) == named
    assert saved(short, tmp_path) == short
    default = make_config({**LONG, "tasks": {"task": GYM}, "policies": {"policy": LONG["policies"]["writer"]}})
    assert default == short


def test_a_policy_takes_the_sections_it_does_not_hold_from_the_top_level() -> None:
    config = make_config({**SHORT, "policies": {"writer": {"lora": {"rank": 4}}}})
    assert config.policy_name == "writer"
    assert config.lora is not None
    assert (config.lora.rank, config.training.learning_rate) == (4, 1e-4)


def test_settings_reach_both_forms(tmp_path: Path) -> None:
    config = make_config(LONG, ["tasks.spelling.size=7", "policies.writer.training.learning_rate=0.5"])
    assert (config.task.size, config.training.learning_rate) == (7, 0.5)  # type: ignore[union-attr]
    config = make_config(LONG, ["task.size=7", "training.learning_rate=0.5", "engine.count=2"])
    assert (config.task.size, config.training.learning_rate) == (7, 0.5)  # type: ignore[union-attr]
    assert (config.policy_name, config.engine.count) == ("writer", 2)
    config = make_config(SHORT, ["tasks.task.size=7", "policies.policy.training.learning_rate=0.5"])
    assert (config.task.size, config.training.learning_rate) == (7, 0.5)  # type: ignore[union-attr]
    resumed = with_settings(saved(make_config(LONG), tmp_path), ["training.beta1=0.5", "policies.writer.lora.rank=2"])
    assert (resumed.policy_name, resumed.training.beta1, resumed.training.learning_rate) == ("writer", 0.5, 1e-4)
    assert resumed.lora is not None
    alone = make_config({}, ["policies.writer.model.path=m", "tasks.a.kind=gym", "tasks.a.name=x"])
    assert (alone.policy_name, alone.task_name, alone.model.path) == ("writer", "a", str(Path("m").absolute()))


@pytest.mark.parametrize(
    ("change", "settings", "expected"),
    [
        (
            {"task": GYM},
            [],
            "[tasks]: [task] is given too, which is short for one of them; give one of the two",
        ),
        (
            {"policies": {"a": {"model": MODEL}, "b": {"model": MODEL}}},
            [],
            "[policies]: several policies in one run are not built yet; give one (there are a, b)",
        ),
        ({"training": {}}, [], "[policies.writer.training]: [training] is given too; give one of the two"),
        ({"tasks": {}}, [], "[tasks]: has no entry; give one, [tasks.NAME]"),
        ({"tasks": 3}, [], "[tasks]: expected a section for each name, such as [tasks.NAME]"),
        ({"tasks": {"a": 3}}, [], "[tasks] a: expected a section, [tasks.a]"),
        ({"tasks": {"a b": GYM}}, [], "[tasks] 'a b': a name is made of letters, digits, - and _"),
        ({"scorers": {"a.b": EXACT}}, [], "[scorers] 'a.b': a name is made of letters, digits, - and _"),
        ({"policies": {"writer": {}}}, [], "section [policies.writer.model] is required"),
        ({"policies": {"writer": {"model": {}}}}, [], "[policies.writer.model] path is required"),
        ({"policies": {"writer": {"model": 3}}}, [], "[policies.writer.model]: expected `object`, got `int`"),
        (
            {"policies": {"writer": {"modell": MODEL}}},
            [],
            "[policies.writer] unknown key 'modell' (did you mean 'model'?)",
        ),
        ({"tasks": {"spelling": {"kind": "gym"}}}, [], "[tasks.spelling] name is required"),
        ({}, ["tasks.spelling.nam=x"], "[tasks.spelling] unknown key 'nam' (did you mean 'name'?)"),
        (
            {},
            ["tasks.spelling.kind=bandit"],
            "[tasks.spelling] kind: invalid value 'bandit' (one of: dataset, gym, environment, agent)",
        ),
        ({}, ["tasks.spelling.weight=0"], "[tasks.spelling] weight: expected `float` > 0.0"),
        (
            {},
            ["policies.writer.training.learning_rat=1"],
            "[policies.writer.training] unknown key 'learning_rat' (did you mean 'learning_rate'?)",
        ),
        (
            {},
            ["policies.writer.training.learning_rate=0"],
            "[policies.writer.training] learning_rate: expected `float` > 0.0",
        ),
        ({}, ["training.learning_rate=inf"], "[policies.writer.training] learning_rate: inf is not a finite number"),
        ({}, ["policies.writer.trainin.beta1=0"], "[policies.writer] unknown key 'trainin' (did you mean 'training'?)"),
        (
            {},
            ["policies.writer.buffer.max_lag=0"],
            "[policies.writer.buffer] max_lag: 0 is below depth 1, so the deeper work could never be trained "
            "(set depth = 0, or a larger max_lag)",
        ),
        (
            {},
            ["policies.reader.model.path=m"],
            "[policies.reader]: several policies in one run are not built yet, and this one has 'writer'",
        ),
        ({}, ["tasks.b.size=1"], "[tasks.b]: there is no such task (the run has 'spelling')"),
        ({}, ["tasks.spelling=1"], "--set tasks.spelling: expected tasks.NAME.key=value"),
        ({}, ["scorers.exact=1"], "[scorers.exact]: expected `object`, got `int`"),
        ({"task_name": "x"}, [], "unknown section 'task_name' (did you mean 'task'?)"),
        ({"polices": {}}, [], "unknown section 'polices' (did you mean 'policies'?)"),
        ({"scorers": {"exact": {}}}, [], "[scorers.exact] scorer is required"),
        ({"scorers": 3}, [], "[scorers]: expected a section for each name, such as [scorers.NAME]"),
        (
            SCORED,
            ["scorers.exact.wieght=1"],
            "[scorers.exact] unknown key 'wieght' (did you mean 'weight'?)",
        ),
        (SCORED, ["scorers.exact.weight=x"], "[scorers.exact] weight: expected `float`, got `str`"),
        (SCORED, ["scorers.exact.config.a=nan"], "[scorers.exact] config.a: nan is not a finite number"),
        (
            {"scorers": {"exact": {"scorer": "Exact"}}},
            [],
            "[scorers.exact] scorer: 'Exact' is not module:attribute, or file.py:attribute",
        ),
        (
            {"tasks": {"spelling": DATASET}},
            [],
            "[tasks.spelling] reward is required, or a scorer in its place ([scorers.NAME])",
        ),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(change: dict[str, Any], settings: list[str], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_config({**LONG, **change}, settings)
    assert str(caught.value) == expected


def test_a_name_in_a_setting_does_not_rename_what_a_file_describes() -> None:
    with pytest.raises(ConfigError, match=r"^\[policies.writer\]: several policies .* this one has 'policy'$"):
        make_config(SHORT, ["policies.writer.training.learning_rate=0.5"])
    with pytest.raises(ConfigError, match=r"^\[tasks.sorting\]: there is no such task .* 'task'\)$"):
        make_config(SHORT, ["tasks.sorting.size=5"])


def test_scorers_stand_in_for_a_reward(tmp_path: Path) -> None:
    raw = {"model": MODEL, "task": DATASET, "scorers": {"exact": EXACT, "short": {"scorer": "m:Short", "weight": -0.5}}}
    config = make_config(raw, ["scorers.short.config.limit=9"])
    assert isinstance(config.task, DatasetTaskConfig)
    assert config.task.reward is None
    assert config.scorers == {
        "exact": FunctionScorerConfig(scorer=f"{Path.cwd()}/scorers.py:Exact"),
        "short": FunctionScorerConfig(scorer="m:Short", weight=-0.5, config={"limit": 9}),
    }
    assert saved(config, tmp_path) == config
    assert with_settings(config, ["scorers.exact.weight=2.0"]).scorers["exact"].weight == 2.0


TWO: dict[str, Any] = {
    "model": MODEL,
    "tasks": {"math": {**DATASET, "reward": "r.py:f", "weight": 2}, "code": GYM},
}


def test_several_tasks_have_sections_of_their_own(tmp_path: Path) -> None:
    config = make_config(TWO, ["tasks.code.weight=3"], base=tmp_path)
    assert isinstance(config.task, MixtureConfig)
    assert {name: task.weight for name, task in config.tasks.items()} == {"tasks.math": 2.0, "tasks.code": 3.0}
    math = config.task.tasks["math"]
    assert isinstance(math, DatasetTaskConfig)
    assert (math.path, math.reward) == (str(tmp_path / "p.jsonl"), f"{tmp_path / 'r.py'}:f")
    assert saved(config, tmp_path) == config
    assert set(tomllib.loads(dump_config(config))["tasks"]) == {"math", "code"}
    assert with_settings(config, ["tasks.code.size=7"]).tasks["tasks.code"] == GymTaskConfig(
        name="spell_backward", weight=3.0, size=7
    )


@pytest.mark.parametrize(
    ("task", "settings", "expected"),
    [
        ({"weight": 0}, [], "[tasks.code] weight: expected `float` > 0.0"),
        ({"weight": -1}, [], "[tasks.code] weight: expected `float` > 0.0"),
        ({"weight": float("nan")}, [], "[tasks.code] weight: nan is not a finite number"),
        ({"weight": float("inf")}, [], "[tasks.code] weight: inf is not a finite number"),
        ({"weight": "2"}, [], "[tasks.code] weight: expected `float`, got `str`"),
        ({"wieght": 2}, [], "[tasks.code] unknown key 'wieght' (did you mean 'weight'?)"),
        (
            {"kind": "mixture"},
            [],
            "[tasks.code] kind: invalid value 'mixture' (one of: dataset, gym, environment, agent)",
        ),
        ({}, ["tasks.cod.size=3"], "[tasks.cod]: there is no such task (there are math, code)"),
        ({}, ["tasks.math.weight=0"], "[tasks.math] weight: expected `float` > 0.0"),
        (
            {},
            ["task.size=3"],
            "[task]: the run has several tasks; name one of them, [tasks.NAME] (there are math, code)",
        ),
        ({}, ["tasks.math.reward_weights=[1.0, 2.0]"], "[tasks.math] reward_weights: 2 for 1 reward functions"),
    ],
)  # fmt: skip
def test_mistakes_in_one_of_several_tasks_name_it(task: dict[str, Any], settings: list[str], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_config({**TWO, "tasks": {**TWO["tasks"], "code": {**GYM, **task}}}, settings)
    assert str(caught.value) == expected


def test_what_several_tasks_cannot_be() -> None:
    math = TWO["tasks"]["math"]
    agent = {"kind": "agent", "path": "p.jsonl"}
    with pytest.raises(ConfigError, match=r"^\[tasks.a\] kind: agents cannot be mixed with other tasks; give a run of"):
        make_config({**TWO, "tasks": {"math": math, "a": agent}})
    with pytest.raises(ConfigError, match=r"^\[tasks.score\]: 'score' is what other curves begin with; choose another"):
        make_config({**TWO, "tasks": {"math": math, "score": GYM}})
    with pytest.raises(ConfigError, match=r"^\[tasks\]: \[task\] is given too, which is short for one of them"):
        make_config({**TWO, "task": GYM})
    with pytest.raises(
        ConfigError, match=r"^\[task\] kind: several tasks are given by a section each, \[tasks.NAME\]$"
    ):
        make_config({"model": MODEL, "task": {"kind": "mixture", "tasks": TWO["tasks"]}})
