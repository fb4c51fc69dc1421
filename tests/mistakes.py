"""Mistakes that people make in a configuration, its data, its model or its reward function.

Each is one line on standard error and exit code 2 in `headrace check`, and nothing else. All calls are made in one
process, as the program itself would handle them: `python tests/mistakes.py` prints the line of each.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from headrace.cli.main import main

ROOT = Path(__file__).parents[1]
QUICKSTART = ROOT / "examples/quickstart"
MODEL = QUICKSTART / "model"
ELSEWHERE = {
    3: "tests/integration/test_hub_models.py",
    7: "tests/integration/test_advice_runs.py",
    8: "tests/unit/observe/test_drift.py",
    9: "tests/integration/test_iterating.py",
    10: "tests/integration/test_iterating.py",
    11: "tests/integration/test_iterating.py",
    12: "tests/integration/test_iterating.py",
    14: "tests/integration/test_iterating.py",
    15: "tests/unit/review/test_review_rollouts.py",
    16: "tests/unit/test_run_names.py",
    18: "tests/unit/test_config_paths.py",
    19: "tests/integration/test_review.py",
    20: "tests/integration/test_docs_blocks.py",
    21: "tests/integration/test_generate.py",
    23: "tests/integration/test_common_mistakes.py",
    25: "tests/unit/pipeline/test_watching.py",
    26: "tests/unit/review/test_report.py",
}
"""The frictions that `headrace check` cannot show -> the test that does."""

REWARDS = """
import os
import time

NUMBER = 3

def no_completion(answer): return 1.0
def wants_target(completion, target): return 1.0
def raises(completion): return {}[completion]
def hangs(completion): time.sleep(1000)
def dies(completion): os._exit(3)
def gives_none(completion): return None
def gives_nan(completion): return float("nan")
def gives_text(completion): return "1.0"
def gives_dict(completion): return {"score": 1.0}

class Task:
    def __init__(self, seed, heldout):
        from headrace import Prompt
        self.train, self.heldout = [Prompt(id="1", messages=[{"role": "user", "content": "a"}])], []
    def episode(self, prompt): return Environment()
    def demonstration(self, prompt): return None
    async def close(self): pass

class Environment:
    async def reset(self): raise RuntimeError("no server")
    async def step(self, completion): pass
    async def close(self): pass
"""


class Mistake(NamedTuple):
    """A mistake, and a part of the line that names it."""

    what: str
    settings: Sequence[str]
    expected: str
    friction: int | None = None
    config: Path = QUICKSTART / "quickstart.toml"


def with_task(path: Path, /, **task: str) -> Path:
    """Write a configuration of the quickstart's model with another task, and return its path."""
    lines = [f'{key} = "{value}"' for key, value in task.items()]
    path.write_text("\n".join([f'[model]\npath = "{MODEL}"\nweights = "random"\n[task]', *lines, ""]))
    return path


def simple(tmp: Path) -> list[Mistake]:
    """Mistakes in single keys, and in keys that contradict each other."""
    gym = with_task(tmp / "gym.toml", kind="gym", name="count_bits")
    return [
        Mistake("a key that does not exist", ["buffer.dephts=2"], "did you mean 'depth'?"),
        Mistake("a section that does not exist", ["bufer.depth=2"], "did you mean 'buffer'?"),
        Mistake("a word for a number", ['buffer.depth="two"'], "(one of: a number, unbounded)"),
        Mistake("a number out of range", ["rollouts.group_size=0"], "[rollouts] group_size"),
        Mistake("a number that is none", ["training.learning_rate=nan"], "is not a finite number"),
        Mistake("a huge number", [f"run.seed={2**70}"], "is too large"),
        Mistake("a setting without a value", ["buffer.depth"], "expected section.key=value"),
        Mistake("a loss that does not exist", ["algorithm.loss=ppo2"], "[algorithm] loss: invalid enum value 'ppo2'"),
        Mistake("the name of TRL for the rate", ["training.lr=1e-5"], "here it is [training] learning_rate", 24),
        Mistake("num_generations", ["rollouts.num_generations=8"], "here it is [rollouts] group_size", 24),
        Mistake("max_completion_length", ["rollouts.max_completion_length=8"], "[rollouts] max_tokens", 24),
        Mistake("beta", ["algorithm.beta=0.1"], "here it is [algorithm] kl and kl_weight", 24),
        Mistake("epsilon", ["algorithm.epsilon=0.1"], "here it is [algorithm] clip_low and clip_high", 24),
        Mistake("max_steps", ["training.max_steps=8"], "here it is [run] versions", 24),
        Mistake("batch size", ["training.per_device_train_batch_size=8"], "here it is [buffer] groups", 24),
        Mistake("a path as a name", ["run.name=a/b"], "is not the name of one folder", 27),
        Mistake("max_lag below depth", ["buffer.depth=2", "buffer.max_lag=1"], "is below depth 2"),
        Mistake("unbounded depth alone", ["buffer.depth=unbounded"], "[buffer] max_lag: required"),
        Mistake("on_stale without max_lag", ["buffer.on_stale=drop"], "needs max_lag"),
        Mistake("oversample without a filter", ["buffer.oversample=2"], "filter is empty"),
        Mistake("one answer to compare", ["rollouts.group_size=1"], "needs at least 2"),
        Mistake("kl_weight without kl", ["algorithm.kl_weight=0.1"], "kl is 'none'"),
        Mistake("a clip that the loss ignores", ["algorithm.dppo_delta=0.1"], "does not look at it"),
        Mistake("a teacher for another loss", ["algorithm.teacher=m"], "learns from one"),
        Mistake("every interface", ["gateway.bind=0.0.0.0"], "is every interface"),
        Mistake("no address", ["delivery.bind=localhost"], "is not an IP address"),
        Mistake("ranks that do not divide", ["training.ranks=3", "training.tensor_parallel=2"], "does not divide"),
        Mistake("vLLM without an interpreter", ["engine.kind=vllm"], "[engine] python"),
        Mistake("a key of vLLM", ["engine.arguments=['-q']"], 'only engine kind "vllm" has it'),
        Mistake("evaluations without prompts", ["evaluate.every=5", "evaluate.prompts=0"], "needs prompts > 0"),
        Mistake("a stop that is no token", ["rollouts.stop=['<|no|>']"], "is not one token of the model"),
        Mistake("answers over the context", ["rollouts.max_tokens=100000"], "leaves no room for a prompt", 6),
        Mistake(
            "prompts over the context", ["engine.max_length=6", "rollouts.max_tokens=4"], "no prompt leaves room", 6
        ),
        Mistake("a loss file that does not exist", ["algorithm.loss=my.py:build"], "there is no file "),
        Mistake("a tracker that does not exist", ["observe.trackers=['nothing:make']"], "there is no module 'nothing'"),
        Mistake("a misspelt dataset", ["task.name=count_bit"], "did you mean count_bits", 5, gym),
        Mistake("an option of no dataset", ["task.config.foo=3"], "count_bits has no key 'foo'", 5, gym),
        Mistake("an open bracket", ["task.answer_pattern=(("], "is not a regular expression", 5, gym),
    ]


def with_functions(tmp: Path) -> list[Mistake]:
    """Mistakes in a reward function, or in another part of the user's code."""
    file = tmp / "rewards.py"
    file.write_text(REWARDS)
    broken = tmp / "broken.py"
    broken.write_text("raise RuntimeError('no licence')\n")

    def reward(name: str, *more: str) -> list[str]:
        return [f"task.reward={file}:{name}", *more]

    environment = with_task(tmp / "environment.toml", kind="environment", factory=f"{file}:Task")
    agent = with_task(tmp / "agent.toml", kind="agent", path=str(QUICKSTART / "train.jsonl"), agent="nothing:act")
    return [
        Mistake("no such module", ["task.reward=examples.nothing:reward"], "examples.nothing"),
        Mistake("no such function", reward("nothing"), "has no 'nothing'"),
        Mistake("not a function", reward("NUMBER"), "is a int, not a function"),
        Mistake("raises when imported", [f"task.reward={broken}:reward"], "no licence"),
        Mistake("takes no completion", reward("no_completion"), "must take `completion`"),
        Mistake("wants a field that no line has", reward("wants_target"), "wants 'target'", 6),
        Mistake("raises", reward("raises"), "raised KeyError", 22),
        Mistake("hangs", reward("hangs", "scoring.timeout=0.5"), "took more than 0.5 s", 17),
        Mistake("dies", reward("dies"), "died (exit code 3)"),
        Mistake("gives nothing", reward("gives_none"), "gave a NoneType, not a number"),
        Mistake("gives NaN", reward("gives_nan"), "not a finite number"),
        Mistake("gives text", reward("gives_text"), "gave a str, not a number"),
        Mistake("gives no reward", reward("gives_dict"), 'a dict without "reward"'),
        Mistake("no environment", [f"task.factory={file}:Nothing"], "has no 'Nothing'", None, environment),
        Mistake("an environment that raises", [], "raised RuntimeError: no server", 22, environment),
        Mistake("no agent", [], "there is no module 'nothing'", None, agent),
        Mistake("a scorer with a taken name", [f"scorers.reward.scorer={file}:raises"], "choose another one"),
    ]


def with_data(tmp: Path) -> list[Mistake]:
    """Mistakes in the data."""

    def data(name: str, *lines: object) -> list[str]:
        path = tmp / f"{name}.jsonl"
        path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
        return [f"task.path={path}"]

    line = {"prompt": "ab", "answer": "ab"}
    files = {"path": str(QUICKSTART / "heldout.jsonl"), "reward": f"{QUICKSTART}/reward.py:reward"}
    alone = with_task(tmp / "alone.toml", kind="dataset", **files)
    return [
        Mistake("no such file", ["task.path=nowhere.jsonl"], "there is no such file"),
        Mistake("an empty file", data("empty"), "is empty"),
        Mistake("a cut line", data("cut", line, '{"prompt": "b'), "line 2"),
        Mistake("no prompt", data("other", line, {"question": "b"}), 'line 2 has no "prompt"'),
        Mistake("an id twice", data("twice", line | {"id": 1}, {"prompt": "c", "id": 1}), "already that of line 1"),
        Mistake("an empty prompt", data("blank", {"prompt": " "}), '"prompt" is empty'),
        Mistake("no role", data("role", {"prompt": [{"content": "a"}]}), 'needs "role" and "content"'),
        Mistake(
            "nothing left to say",
            data("said", {"prompt": [{"role": "assistant", "content": "a"}]}),
            "nothing is left to say",
        ),
        Mistake("trained and held out", [f"task.heldout_path={QUICKSTART}/train.jsonl"], "also trained on"),
        Mistake("more held out than there is", ["evaluate.prompts=1000"], "cannot be held out", None, alone),
    ]


def with_models(tmp: Path) -> list[Mistake]:
    """Mistakes in the model directory."""

    def model(name: str, change: Callable[[Path], object], weights: str = "random") -> list[str]:
        path = tmp / name
        shutil.copytree(MODEL, path)
        change(path)
        return [f"model.path={path}", f"model.weights={weights}"]

    def without_template(path: Path) -> None:
        (path / "chat_template.jinja").unlink(missing_ok=True)
        settings = json.loads((path / "tokenizer_config.json").read_text())
        settings.pop("chat_template", None)
        (path / "tokenizer_config.json").write_text(json.dumps(settings))

    def torn(path: Path) -> None:
        header = json.dumps({"a": {"dtype": "F32", "shape": [100], "data_offsets": [0, 400]}}).encode()
        (path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 100)

    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
    return [
        Mistake("no such directory", ["model.path=nowhere"], "is not a directory"),
        Mistake("no weights", ["model.weights=load"], "has no *.safetensors weights"),
        Mistake("no tokenizer", model("a", lambda path: (path / "tokenizer.json").unlink()), "has no tokenizer.json"),
        Mistake("no config", model("b", lambda path: (path / "config.json").unlink()), "has no config.json"),
        Mistake("a broken config", model("c", lambda path: (path / "config.json").write_text("{")), "is not JSON"),
        Mistake("no chat template", model("d", without_template), "has no chat template", 4),
        Mistake(
            "a broken template",
            model("e", lambda path: (path / "chat_template.jinja").write_text("{% for %}")),
            "does not compile",
        ),
        Mistake(
            "a git-lfs pointer",
            model("f", lambda path: (path / "model.safetensors").write_text(pointer), "load"),
            "git-lfs",
            13,
        ),
        Mistake("half-downloaded weights", model("g", torn, "load"), "is not whole", 13),
    ]


def mistakes(tmp: Path) -> list[Mistake]:
    """Return all mistakes. Their files are made in `tmp`."""
    return [*simple(tmp), *with_functions(tmp), *with_data(tmp), *with_models(tmp)]


def check(mistake: Mistake) -> tuple[int, list[str]]:
    """Return the exit code of `headrace check` for a mistake, and the lines on its standard error."""
    words = [word for setting in mistake.settings for word in ("--set", setting)]
    said, before = io.StringIO(), sys.argv
    sys.argv = ["headrace", "check", str(mistake.config), *words]
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            main()
    except SystemExit as end:
        return int(end.code or 0), said.getvalue().splitlines()
    finally:
        sys.argv = before
    return 0, said.getvalue().splitlines()


def wrong(mistake: Mistake) -> str:
    """Return what is wrong with the answer to a mistake; empty if it is one line that names it, with exit code 2."""
    code, lines = check(mistake)
    if code != 2 or len(lines) != 1 or mistake.expected not in lines[0]:
        return f"{mistake.what}: exit code {code}, expected {mistake.expected!r}: {lines}"
    return ""


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        all_of_them = mistakes(Path(directory))
        for one in all_of_them:
            number = f" (friction {one.friction})" if one.friction else ""
            print(wrong(one) or f"{one.what}{number}: {check(one)[1][0]}")
        print(len(all_of_them), "mistakes")
