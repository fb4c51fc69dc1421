"""Conversations that outgrow the longest sequence of the engines, in a real run."""

from __future__ import annotations

import tomllib
from pathlib import Path

import tomli_w
from runs import QUICKSTART, small_settings

from headrace import Run
from headrace.config import load_config
from headrace.config.paths import make_absolute
from headrace.observe.progress import NoProgress
from headrace.pipeline.launch import start_run

TALKATIVE = """
from headrace import EnvironmentStep, Prompt


class Task:
    heldout = []

    def __init__(self, *, seed, heldout):
        self.train = [Prompt(id=str(n), messages=[{"role": "user", "content": f"{n}"}]) for n in range(20)]

    def episode(self, prompt):
        return Episode(prompt)

    def demonstration(self, prompt):
        return None

    async def close(self):
        pass


class Episode:
    def __init__(self, prompt):
        self.prompt = prompt

    async def reset(self):
        return self.prompt.messages

    async def step(self, completion):
        return EnvironmentStep(messages=[{"role": "user", "content": "1234567890"}])

    async def close(self):
        pass
"""


class Notes(NoProgress):
    """Keeps the lines that the run prints."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, line: str) -> None:
        self.lines.append(line)


def test_friction_48_long_conversations_are_trained_as_truncated(tmp_path: Path) -> None:
    (tmp_path / "talkative.py").write_text(TALKATIVE)
    sections = make_absolute(tomllib.loads(QUICKSTART.read_text()), QUICKSTART.parent)
    sections["task"] = {"kind": "environment", "factory": "talkative.py:Task"}
    (tmp_path / "run.toml").write_text(tomli_w.dumps(sections))
    settings = small_settings(
        tmp_path,
        "run.versions=1",
        "warm_start.steps=0",
        "evaluate.prompts=0",
        "buffer.depth=0",
        "engine.max_length=48",
        "rollouts.max_tokens=47",
        "rollouts.max_turns=20",
        "evaluate.samples=2",
    )
    notes = Notes()
    run = Run(start_run(load_config(tmp_path / "run.toml", settings), notes).run_dir.path)
    assert notes.lines[0].startswith("[evaluate] samples: at temperature 0"), "a run says what `headrace check` says"
    rollouts = list(run.rollouts())
    assert {(rollout.ending, rollout.reward) for rollout in rollouts} == {("truncated", 0.0)}
    assert len(rollouts) == 16 and all(len(rollout.traces[0]) <= 48 for rollout in rollouts)
    assert any(not rollout.traces[0].trained[rollout.traces[0].trained.argmax() :].all() for rollout in rollouts)
