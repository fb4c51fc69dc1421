"""Six runs that cannot learn get the right advice within 20 steps; twenty healthy runs get none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from runs import NAME, ROOT, headrace, small_settings

from headrace import Run
from headrace.observe.metrics import read_metrics

pytestmark = pytest.mark.slow

REWARDS = """
import re, urllib.request

def vowels(completion, **fields):
    # What is too long earns nothing, so that answers are not cut off for long.
    return sum(letter in "aeiou" for letter in completion) / max(1, len(completion)) * (len(completion) <= 12)

def whole(completion, **fields):
    # A beginning of an answer earns nothing.
    return vowels(completion) * (len(completion) >= 4)

def constant(completion, **fields):
    return 0.5

def unparsed(completion, **fields):
    found = re.search(r"answer: (\\w+)", completion)
    return 0.0 if found is None else 1.0

def judge(completion, **fields):
    # Nothing listens at the port for discarded messages.
    return float(urllib.request.urlopen("http://127.0.0.1:9/judge", timeout=2).read())
"""
ENVIRONMENT = """
from headrace import EnvironmentStep, Prompt

class Twice:
    # Asks for vowels, and once more for more of them.
    def __init__(self, *, seed, heldout):
        prompts = [Prompt(id=f"{n}", messages=[{"role": "user", "content": chr(97 + n % 26)}]) for n in range(200)]
        self.heldout, self.train = prompts[:heldout], prompts[heldout:]

    def episode(self, prompt):
        return Episode(prompt)

    def demonstration(self, prompt):
        return prompt.messages[0]["content"] * 5

    async def close(self):
        pass

class Episode:
    def __init__(self, prompt):
        self.prompt, self.said = prompt, []

    async def reset(self):
        return self.prompt.messages

    async def step(self, completion):
        self.said.append(completion)
        if len(self.said) == 1:
            return EnvironmentStep(messages=[{"role": "user", "content": "more"}])
        letters = "".join(self.said)
        share = sum(letter in "aeiou" for letter in letters) / max(1, len(letters))
        return EnvironmentStep(done=True, reward=share, metrics={"letters": float(len(letters))})

    async def close(self):
        pass
"""
TASKS = {
    "letters": """
        kind = "dataset"
        path = "{root}/examples/quickstart/train.jsonl"
        demonstration = "demonstration"
        reward = "{here}/rewards.py:vowels"
    """,
    "sorting": """
        kind = "dataset"
        path = "{root}/examples/quickstart/train.jsonl"
        demonstration = "demonstration"
        reward = "{root}/examples/quickstart/reward.py:reward"
    """,
    "gym": """
        kind = "gym"
        name = "spell_backward"
        config = {{ min_word_len = 3, max_word_len = 4 }}
    """,
    "environment": """
        kind = "environment"
        factory = "{here}/environment.py:Twice"
    """,
    "agent": """
        kind = "agent"
        agent = "{root}/examples/agent/agent.py:agent"
        path = "{root}/examples/agent/train.jsonl"
        demonstration = "demonstration"
    """,
}


def advised(folder: Path, task: str, *more: str) -> tuple[list[dict[str, Any]], str]:
    """Run twenty versions; return the advice in the metrics, and everything that the run printed."""
    (folder / "rewards.py").write_text(REWARDS)
    (folder / "environment.py").write_text(ENVIRONMENT)
    model = f'[model]\npath = "{ROOT}/examples/quickstart/model"\nweights = "random"\n'
    (folder / "run.toml").write_text(f"{model}[task]\n{TASKS[task].format(root=ROOT, here=folder)}")
    settings = small_settings(
        folder,
        "run.versions=20",
        "warm_start.steps=10",
        "warm_start.batch=16",
        "warm_start.learning_rate=1e-3",
        "rollouts.group_size=8",
        "rollouts.max_tokens=16",
        "engine.slots=64",
        "engine.max_length=128",
        "training.learning_rate=3e-4",
        "evaluate.prompts=0",
        "observe.display=plain",
        *(setting.format(here=folder) for setting in more),
    )
    done = headrace("train", str(folder / "run.toml"), *(word for each in settings for word in ("--set", each)))
    records = read_metrics(folder / NAME / "metrics.jsonl")
    assert records, done.stderr
    return [record for record in records if record["kind"] == "advice"], done.stdout + done.stderr


BROKEN = {
    "constant": (("task.reward={here}/rewards.py:constant",), "constant_reward", "every answer earned 0.5"),
    "unparsed": (("task.reward={here}/rewards.py:unparsed",), "zero_reward", "does not find the answers"),
    "learning rate": (("training.learning_rate=3e-2",), "learning_rate", "[training] learning_rate"),
    "truncation": (
        ("task.reward={here}/rewards.py:whole", "rollouts.max_tokens=1"),
        "truncated",
        "[rollouts] max_tokens",
    ),
    "filter": (
        ("task.reward={here}/rewards.py:constant", "buffer.filter=['zero_variance']", "rollouts.group_size=2"),
        "filter",
        "the filter 'zero_variance' left out",
    ),
    "judge": (("task.reward={here}/rewards.py:judge",), "failing", "Connection refused"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_run_gets_the_right_advice(tmp_path: Path, name: str) -> None:
    settings, cause, words = BROKEN[name]
    found, said = advised(tmp_path, "letters", *settings)
    assert [advice["cause"] for advice in found] == [cause], found
    [advice] = found
    assert words in advice["line"]
    assert advice["step"] <= 20
    assert said.count(f"advice: {advice['line']}") == 1, "said once"
    summary = json.loads((tmp_path / NAME / "summary.json").read_text())
    assert [told["line"] for told in summary["advice"]] == [advice["line"]]
    assert words in (tmp_path / NAME / "report.html").read_text().replace("&#39;", "'")


HEALTHY = [
    ("letters", "run.seed=1"),
    ("letters", "run.seed=2", "rollouts.group_size=4"),
    ("letters", "rollouts.group_size=16", "buffer.groups=2"),
    *[("letters", f"algorithm.loss={loss}") for loss in ("dapo", "gspo", "reinforce", "sapo", "dppo_tv")],
    ("letters", "algorithm.kl=k3", "algorithm.kl_weight=0.05"),
    ("letters", "algorithm.advantage=rloo", "rollouts.temperature=0.8"),
    ("letters", "buffer.depth=0"),
    ("letters", "buffer.depth=3"),
    ("letters", "training.learning_rate=1e-4"),
    ("letters", "training.learning_rate=1e-3"),
    ("letters", "buffer.filter=['zero_variance']", "buffer.oversample=1.5"),
    ("letters", "lora.rank=4", "training.learning_rate=3e-3"),
    ("sorting", "warm_start.steps=60", "warm_start.learning_rate=3e-3"),
    ("gym", "warm_start.steps=60", "warm_start.learning_rate=3e-3"),
    ("environment", "rollouts.max_turns=2"),
    ("agent", "rollouts.max_turns=2"),
]


@pytest.mark.parametrize("settings", HEALTHY, ids=" ".join)
def test_a_healthy_run_gets_none(tmp_path: Path, settings: tuple[str, ...]) -> None:
    found, said = advised(tmp_path, *settings)
    assert found == []
    assert "advice: " not in said and "not like the generated ones" not in said
    assert len(Run(tmp_path / NAME).history) == 20


def test_there_are_twenty_of_them() -> None:
    assert len(set(HEALTHY)) == 20
