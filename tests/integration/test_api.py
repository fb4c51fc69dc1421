"""`headrace.train(...)`: five lines do what the command line does, also inside a running event loop."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from runs import ROOT

import headrace
from waiting import until

MODEL = ROOT / "examples/quickstart/model"
SETTINGS = {
    "model.weights": "random",
    "run.versions": 3,
    "rollouts.group_size": 4,
    "rollouts.max_tokens": 8,
    "buffer.groups": 2,
    "engine.max_length": 64,
}
PROMPTS = [{"prompt": "ab", "wanted": "a"}, {"prompt": "cd", "wanted": "c"}]


async def test_train_returns_a_run(tmp_path: Path) -> None:
    seen = []

    def reward(completion: str, prompt: str, wanted: str) -> float:
        seen.append((prompt, wanted))
        return float(completion.count(wanted))

    run = headrace.train(
        model=MODEL,
        prompts=PROMPTS,
        reward=reward,
        settings={**SETTINGS, "run.directory": str(tmp_path)},
        display="none",
    )
    assert len(run.history) == 3
    rollouts = list(run.rollouts())
    assert len(rollouts) == 3 * 2 * 4 == len(seen)
    assert set(seen) == {("ab", "a"), ("cd", "c")}
    assert all(rollout.reward is not None for rollout in rollouts)
    assert (run.model_dir / "model.safetensors").is_file()
    assert run.summary["ledger"]["trained"] == 6


def many(completions: list[str], wanted: list[str], **kwargs: Any) -> list[float]:
    return [float(text.count(letter)) for text, letter in zip(completions, wanted, strict=True)]


def short(completion: str) -> float:
    return -0.1 * len(completion)


def test_steps_are_told_and_a_run_is_stopped_and_resumed(tmp_path: Path) -> None:
    """Two rewards with weights, sections as keywords, a held-out list, a stop from `on_step`, and a resume."""
    told: list[dict[str, Any]] = []

    def until_two(step: dict[str, Any]) -> bool:
        assert threading.current_thread() is threading.main_thread()
        told.append(step)
        return len(told) < 2

    given: dict[str, Any] = {
        "model": {"path": str(MODEL), "weights": "random"},
        "prompts": PROMPTS,
        "heldout": [{"prompt": "ef", "wanted": "e"}],
        "reward": [many, short],
        "reward_weights": [1.0, 0.5],
        "rollouts": {"group_size": 4, "max_tokens": 8},
        "buffer": {"groups": 2},
        "engine": {"max_length": 64},
        "display": "none",
        "run": {"directory": str(tmp_path), "versions": 40},
    }
    first = headrace.train(**given, on_step=until_two)
    assert first.summary["outcome"] == "interrupted"
    assert told == first.history[:2]
    steps = len(first.history)
    assert 2 <= steps < 40
    for rollout in first.rollouts("reward IS NOT NULL"):
        scores = {score.scorer: score.value for score in rollout.scores}
        assert scores.keys() == {"many", "short"}
        assert rollout.reward == scores["many"] + 0.5 * scores["short"]

    more = {**given, "run": {"directory": str(tmp_path), "versions": steps + 2}}
    again = headrace.train(**more, resume=True)
    assert again.path == first.path == tmp_path / "run"
    assert again.summary["outcome"] == "finished"
    assert [step["step"] for step in again.history] == list(range(1, steps + 3))

    assert headrace.train(**more, resume=True).summary == again.summary, "a finished run is returned as it is"
    with pytest.raises(headrace.UserError, match=f"run is finished, with {steps + 2} versions"):
        headrace.train(resume=first.path, display="none")
    further: dict[str, Any] = {"resume": first.path, "display": "none", "run": {"versions": 40}}
    with pytest.raises(headrace.UserError, match="'many' was given in Python"):
        headrace.train(**further)
    with pytest.raises(headrace.UserError, match=r"reward: reward is not a reward of this run \(many, short\)"):
        headrace.train(**further, reward=short)


def test_an_error_of_on_step_ends_the_run_and_is_raised(tmp_path: Path) -> None:
    def fail(step: dict[str, Any]) -> None:
        raise ValueError(f"at step {step['step']}")

    # Without a name, runs are numbered.
    (tmp_path / "run").mkdir()
    with pytest.raises(ValueError, match="at step 1"):
        headrace.train(
            model=MODEL,
            prompts=["ab", "cd"],
            reward=short,
            on_step=fail,
            settings={**SETTINGS, "run.versions": 40, "run.directory": str(tmp_path)},
            display="none",
        )
    run = headrace.Run(tmp_path / "run-2")
    assert run.summary["outcome"] == "interrupted"
    assert run.summary["ledger"]["in_flight"] == 0


class Counting:
    """A task whose factory is given in Python: the reward is the length of the answer."""

    def __init__(self, *, seed: int, heldout: int) -> None:
        prompts = [
            headrace.Prompt(id=str(number), messages=[{"role": "user", "content": letter}])
            for number, letter in enumerate("abcdefgh")
        ]
        self.heldout, self.train = prompts[:heldout], prompts[heldout:]

    def episode(self, prompt: headrace.Prompt) -> Any:
        return Once(prompt)

    def demonstration(self, prompt: headrace.Prompt) -> str | None:
        return None

    async def close(self) -> None:
        pass


class Once:
    def __init__(self, prompt: headrace.Prompt) -> None:
        self._prompt = prompt

    async def reset(self) -> list[dict[str, str]]:
        return self._prompt.messages or []

    async def step(self, completion: str) -> headrace.EnvironmentStep:
        return headrace.EnvironmentStep(done=True, reward=float(len(completion)))

    async def close(self) -> None:
        pass


AGENT = """
from openai import OpenAI


def agent(base_url, api_key, model, messages):
    client = OpenAI(base_url=base_url, api_key=api_key)
    reply = client.chat.completions.create(model=model, messages=messages)
    return float(len(reply.choices[0].message.content))
"""


@pytest.mark.parametrize("kind", ["factory", "object", "gym", "agent"])
def test_every_kind_of_task(tmp_path: Path, kind: str) -> None:
    (tmp_path / "my_agent.py").write_text(AGENT)
    task: dict[str, dict[str, Any]] = {
        "factory": {"task": Counting},
        "object": {"task": Counting(seed=0, heldout=0)},
        "gym": {"task": {"kind": "gym", "name": "spell_backward", "size": 20}},
        "agent": {"task": {"kind": "agent", "agent": f"{tmp_path}/my_agent.py:agent"}, "prompts": ["ab", "cd"]},
    }
    settings = {**SETTINGS, "run.versions": 1, "run.directory": str(tmp_path), "engine.max_length": 256}
    run = headrace.train(model=MODEL, **task[kind], settings=settings, display="none")
    assert run.summary["ledger"]["trained"] == 2
    assert all(rollout.reward is not None for rollout in run.rollouts())


SCRIPT = """
import sys

import headrace

run = headrace.train(
    model={{"path": {model!r}, "weights": "random"}},
    prompts=["ab", "cd"],
    reward=lambda completion: -0.1 * len(completion),
    on_step=lambda step: print("step", step["step"], flush=True),
    run={{"directory": {directory!r}, "versions": 100000}},
    rollouts={{"group_size": 4, "max_tokens": 8}},
    buffer={{"groups": 2}},
    engine={{"max_length": 64}},
    display="none",
)
print(run.summary["outcome"])
"""


def test_ctrl_c_ends_a_script_in_order(tmp_path: Path) -> None:
    script, output = tmp_path / "train.py", tmp_path / "output"
    script.write_text(SCRIPT.format(model=str(MODEL), directory=str(tmp_path)))
    with output.open("w") as file:
        process = subprocess.Popen([sys.executable, str(script)], stdout=file, stderr=file)
    try:
        asyncio.run(until(lambda: "step 2\n" in output.read_text() or process.poll() is not None, 120))
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(120) == 0, output.read_text()
    finally:
        process.kill()
        process.wait()
    assert output.read_text().splitlines()[-1] == "interrupted"


def test_mistakes_are_user_errors(tmp_path: Path) -> None:
    common: dict[str, Any] = {"model": "nowhere", "prompts": ["a"], "reward": lambda completion: 0.0, "display": "none"}
    settings = {"run.directory": str(tmp_path)}
    for more, problem in [
        ({"settings": settings}, "nowhere is not a directory"),
        ({"settings": {"buffer.size": 3}}, "unknown key"),
        ({"settings": {"versions": 3}}, r"section\.key"),
        ({"versions": 3}, r"'versions' is not section\.key"),
        ({"settings": {"run.versions.more": 3}, "run": {"versions": 3}}, "versions is a value, not a section"),
        ({"settings": settings, "prompts": {"train": ["a"], "test": ["b"]}}, r"several splits .* \(train, test\)"),
        ({"settings": settings, "prompts": [{"prompt": "a", "x": object()}]}, "line 1 cannot be written as JSON"),
        ({"settings": settings, "prompts": None}, r"\[task\] path is required"),
        ({"settings": settings, "reward": None}, r"\[task\] reward is required"),
        ({"settings": settings, "reward_weights": [1, 2]}, "reward_weights: 2 for 1 reward functions"),
        ({"settings": settings, "reward": lambda text: 0.0}, "must take `completion`"),
        ({"resume": tmp_path / "nothing"}, "no such run directory"),
    ]:
        with pytest.raises(headrace.UserError, match=problem):
            headrace.train(**(common | more))
    assert list(tmp_path.iterdir()) == []
