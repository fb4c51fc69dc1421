"""A reader who tries what the pages say: a directory for each page, stand-ins for what readers bring, and its commands.

The directory of a page holds the examples, the files that blocks of the page define, and stand-ins for the reader's
model, data and runs. A command that is not run is in `NOT_RUN`, with the reason.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from pathlib import Path

import typer
from runs import headrace

from doc_blocks import BLOCKS, ROOT, SHELL, shell_lines
from headrace.cli.main import app
from headrace.config import load_config
from headrace.models.loading import load_model

NOT_RUN = {
    "make ": "sets up an environment, or takes minutes",
    "pip install ": "needs a network",
    "python examples/smollm2/fetch.py": "needs a network; `make examples` runs it",
    "python examples/01_loop.py": "takes long; tests/integration/test_examples_loop.py runs it",
    "python examples/steps/make_reward_model.py": "takes minutes; `make examples` runs a small one",
    "headrace train examples/steps/steps.toml": "needs that model; test_process_reward_run.py trains with a small one",
    "python benchmarks/": "takes minutes, or needs a GPU",
    ".venv/bin/pre-commit install": "changes the reader's checkout",
    "path/to/vllm/bin/python -m pip ": "needs a network",
    "OUT=logs HEADRACE_VLLM_PYTHON=": "needs a GPU, and vLLM for it",
    "VLLM_SERVER_DEV_MODE=1 ": "needs vLLM; `make test-vllm` starts such servers",
    "ray ": "needs Ray; tests/cluster/test_ray_launcher.py starts a cluster",
    "headrace train two_nodes.toml ": "needs two nodes with 8 GPUs each",
    "headrace launch run.toml --slurm --gpus-per-node ": "needs Slurm; tests/unit/cluster/test_recipes.py runs it",
    "kubectl ": "needs Kubernetes",
    "sky ": "needs a cloud",
    "docker ": "needs Docker",
    "headrace bench engine ": "needs a GPU; tests/integration/test_bench_engine.py runs a small one",
    "headrace bench train ": "needs a GPU; tests/integration/test_bench_train.py runs a small one",
    "headrace bench loop": "takes minutes; tests/integration/test_bench_loops.py runs a small one",
    "headrace bench delivery ": "takes minutes; tests/integration/test_bench_delivery.py runs small ones",
    "headrace bench journal": "takes minutes; tests/integration/test_bench_loops.py runs a small one",
    "headrace doctor --gpus": "needs a GPU; tests/integration/test_doctor_runs.py runs it on CPUs",
    "headrace scale ": "needs a live run; tests/integration/test_scale.py has one",
    "headrace gateway ": "waits for agents; test_the_agent_from_outside_trains_a_run runs it",
}
"""How commands begin that are not run here, with the reason. Those of Headrace are parsed."""

TRAINED = {
    "train examples/quickstart/quickstart.toml": "runs/quickstart",
    "train first.toml": "runs/first",
    "train examples/lora/lora.toml": "runs/lora",
}
"""Commands that train in small, once, and the runs that they make. Other `headrace train` commands are checked."""

SMALL = (
    "run.versions=2", "rollouts.group_size=2", "rollouts.max_tokens=8", "buffer.groups=2", "engine.slots=8",
    "engine.max_length=256", "evaluate.prompts=1", "evaluate.every=0", "observe.display=plain",
)  # fmt: skip
SMALL_WARM_START = ("warm_start.steps=2", "warm_start.batch=8")
AUDITED = (*SMALL_WARM_START, "run.versions=4", "training.checkpoint_every=1", "training.keep_checkpoints=9")
"""Settings of a run of the quickstart that keeps enough checkpoints for an audit."""

STAND_INS = {
    "RUN_DIR --to peft": "runs/lora --to peft --out peft",
    "RUN_DIR --to hf": "runs/quickstart --to hf --out hf",
    "RUN_DIR": "runs/quickstart",
    "runs/rloo": "runs/quickstart",
    "reward >= 1 AND newest_version > oldest_version": "reward >= 0 AND newest_version >= oldest_version",
    '"run.versions": 50, "evaluate.prompts": 100': '"run.versions": 2, "evaluate.prompts": 4, "rollouts.group_size": 2,'
    ' "rollouts.max_tokens": 8, "buffer.groups": 2, "engine.max_length": 64, "run.directory": "HOME/runs"',
    'run={"versions": 50}': 'run={"versions": 2, "directory": "HOME/runs"}, engine={"max_length": 256}',
    '"group_size": 8, "max_tokens": 32': '"group_size": 2, "max_tokens": 8',
    'dtype="bfloat16", device="cuda"': 'dtype="float32", device="cpu"',
    "EngineConfig(slots=256)": 'EngineConfig(slots=4, device="cpu")',
}
"""Exact texts of commands and programs, and what stands in their place here. HOME is the reader's directory."""

MODELS = ("path/to/model", "models/qwen3-0.6b")
"""Directories in which blocks expect the reader's model."""
DATASETS = ("train.jsonl", "heldout.jsonl", "prompts.jsonl", "sorting.jsonl")
"""Files in which blocks expect the reader's prompts."""
REWARDS = "rewards.py"
"""The file in which blocks expect the reader's reward function."""


class Reader:
    """The directories of the pages, and what was run in them."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self._outputs: dict[str, str] = {}
        (home / "runs").mkdir()
        fetched = ROOT / "examples/smollm2"
        shutil.copytree(
            ROOT / "examples",
            home / "examples",
            ignore=lambda folder, names: {"model"} if Path(folder) == fetched else set(),
        )
        self._model = home / "examples/smollm2/model"
        shutil.copytree(ROOT / "tests/data/tiny_model", self._model)
        config = json.loads((self._model / "config.json").read_text())
        (self._model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 4096}))
        load_model(self._model, weights="random", seed=0).save_pretrained(self._model)

    def directory(self, page: str) -> Path:
        """The directory of a page, with the files that its blocks define."""
        directory = self.home / page.replace("/", "_")
        if directory.is_dir():
            return directory
        directory.mkdir()
        for folder in ("runs", "examples"):
            (directory / folder).symlink_to(self.home / folder)
        for name in MODELS:
            (directory / name).parent.mkdir(exist_ok=True, parents=True)
            (directory / name).symlink_to(self._model)
        for number, name in enumerate(DATASETS):
            sums = [(number, a, b) for a in range(15) for b in range(15)]
            lines = [{"prompt": f"{n}: what is {a} + {b}?", "answer": f"{a + b}"} for n, a, b in sums]
            (directory / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
        (directory / REWARDS).write_text("def reward(completion, answer):\n    return float(completion == answer)\n")
        for block in BLOCKS:
            if block.page == page and block.file:
                (directory / block.file).write_text(block.text)
        return directory

    def small(self, *more: str) -> list[str]:
        """Options that make a run a matter of seconds. Its directory is absolute for the tests' fork server."""
        return set_each(*SMALL, f"run.directory={self.home / 'runs'}", *more)

    def replaced(self, text: str) -> str:
        """The text with stand-ins for what cannot be had here."""
        for old, new in STAND_INS.items():
            text = text.replace(old, new.replace("HOME", str(self.home)))
        return text

    def trained(self, command: str) -> str:
        """What a command of `TRAINED` prints. It is run once, with small settings."""
        if command not in self._outputs:
            page = "README.md"
            assert not (self.home / TRAINED[command]).exists(), f"`headrace {command}` would find a run in its place"
            settings = self.small(*(AUDITED if "quickstart" in command else ()))
            done = headrace(*command.split(), *settings, cwd=self.directory(page))
            self._outputs[command] = succeeded(done)
            assert (self.home / TRAINED[command] / "summary.json").is_file()
        return self._outputs[command]

    def run(self, page: str, line: str) -> str:
        """Run one command of a page; give what it prints."""
        directory = self.directory(page)
        if is_not_run(line):
            words = words_of(line)
            if words[0] == "headrace":
                parsed(words[1:])
            elif words[0] == "python":
                assert (ROOT / words[1]).is_file(), f"{page}: `{line}`"
            return ""
        words = words_of(self.replaced(line))
        if words[0] in ("echo", "cat"):
            return succeeded(
                subprocess.run(["bash", "-c", line], cwd=directory, capture_output=True, text=True, check=False)
            )
        assert words[0] == "headrace", f"{page}: `{line}` is neither run nor in NOT_RUN"
        for command, run in TRAINED.items():
            if run in words:
                self.trained(command)
        if words[1] == "resume":
            run_dir = directory / words[2]
            words[2] = str(run_dir)  # Absolute, for the tests' fork server.
            if "run.versions" not in line:
                # The reader's run was ended in the middle. That of the tests is finished.
                words += set_each(f"run.versions={load_config(run_dir / 'config.toml').run.versions + 1}")
        command = " ".join(words[1:])
        if command in TRAINED:
            return self.trained(command)
        return self._answer(words[1:], directory)

    def _answer(self, words: list[str], directory: Path) -> str:
        """What a command prints. A run would take minutes: its configuration is checked instead."""
        words = ["check", *words[1:]] if words[0] == "train" else words
        key = " ".join(words)
        if not key.startswith("check examples/"):
            return succeeded(headrace(*words, cwd=directory))
        if key not in self._outputs:
            self._outputs[key] = succeeded(headrace(*words, cwd=directory))
        return self._outputs[key]


def set_each(*settings: str) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


def succeeded(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, f"{done.args}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def words_of(line: str) -> list[str]:
    return shlex.split(line.removeprefix("$ ").removeprefix(".venv/bin/"), comments=True)


def is_not_run(line: str) -> bool:
    return any(line.startswith(beginning) for beginning in NOT_RUN)


def parsed(words: list[str]) -> None:
    """Parse a command as the program would, values included, without calling it."""
    command = typer.main.get_command(app)
    while isinstance(command, typer.core.TyperGroup):
        command, words = command.commands[words[0]], words[1:]
    with command.make_context("headrace", list(words)):
        pass


def commands_of(page: str) -> list[str]:
    """The commands of a page's blocks, in their order: of shell blocks, and after `$` where output is quoted."""
    lines = []
    for block in BLOCKS:
        if block.page == page and block.kind in SHELL:
            lines += shell_lines(block.text)
        elif block.page == page and not block.kind:
            lines += [line for line in block.text.splitlines() if line.startswith("$ ")]
    return lines
