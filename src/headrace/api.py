"""The Python API: `headrace.train(...)` runs the whole loop on the same code path as the command line."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.config import Config, make_config
from headrace.errors import UserError
from headrace.types import Rollout

PromptLike = str | Sequence[Mapping[str, str]] | Mapping[str, Any]
"""A text, a list of messages, or an object with `prompt` and any other fields that the reward function needs."""


def train(
    *,
    model: str | Path,
    prompts: Sequence[PromptLike] | str | Path,
    reward: Callable[..., Any] | str,
    settings: Mapping[str, Any] | None = None,
    display: str = "auto",
) -> Run:
    """Train a model to earn a reward, and return when the run has ended.

    `prompts` is a list, or the path of a JSON-lines file. `reward` is a function, which is called in threads of this
    process with a deadline, or the name of one for worker processes, `"module:function"`. `settings` holds keys of the
    configuration, such as `{"run.versions": 50, "buffer.depth": 2}`.
    """
    from headrace.observe.progress import make_progress
    from headrace.pipeline.inputs import Given
    from headrace.pipeline.launch import start_run
    from headrace.scoring.rewards import ThreadScorer

    config, lines = _config(model, prompts, reward, {"observe.display": display, **(settings or {})})
    given = {} if isinstance(reward, str) else {"reward": ThreadScorer(reward, timeout=config.scoring.timeout)}
    progress = make_progress(config.observe.display, title=config.run.name)
    outcome = _outside_of_a_loop(lambda: start_run(config, progress, Given(rewards=given), prompts=lines))
    return Run(outcome.run_dir.path)


class Run:
    """The results of a run, read from its run directory."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not (self.path / "journal.db").is_file():
            raise UserError(f"{path}: not a run directory (it has no journal.db)")

    @property
    def summary(self) -> dict[str, Any]:
        """The figures of the run, as in `summary.json`."""
        from headrace.review.summary import summarize

        return summarize(self.path)

    @property
    def history(self) -> list[dict[str, Any]]:
        """One entry for each optimizer step, with reward, loss, lag and more, as in `metrics.jsonl`."""
        from headrace.observe.metrics import read_metrics

        metrics = read_metrics(self.path / "metrics.jsonl")
        return [entry for entry in metrics if entry["kind"] == "step" and entry["objective"] == "policy"]

    @property
    def model_dir(self) -> Path:
        """The directory of the newest checkpoint, for `from_pretrained`; for peft's too if an adapter was trained."""
        from headrace.buffer.reader import open_readonly
        from headrace.run_dir import RunDir
        from headrace.training.checkpoints.base import refuse_pickled
        from headrace.training.checkpoints.remote_store import fetch_missing

        with open_readonly(self.path / "journal.db") as journal:
            name = journal.newest_checkpoint()
        if name is None:
            raise UserError(f"{self.path} has no checkpoint yet")
        # The run directory may have been moved since the path was recorded.
        path = self.path / "checkpoints" / name
        if not path.is_dir() and RunDir(self.path).config.is_file():
            fetch_missing(RunDir.open(self.path)[1], path.parent, name)
        if not path.is_dir():
            raise UserError(f"{path}, the newest checkpoint of the run, is gone")
        refuse_pickled(path)
        return path

    def rollouts(self, where: str = "TRUE") -> Iterator[Rollout]:
        """Yield every recorded rollout with its tokens. `where` is an SQL condition on the table `rollouts`."""
        from headrace.buffer.reader import open_readonly

        with open_readonly(self.path / "journal.db") as journal:
            yield from journal.rollouts(where)

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"


def _config(
    model: str | Path,
    prompts: Sequence[PromptLike] | str | Path,
    reward: Callable[..., Any] | str,
    settings: Mapping[str, Any],
) -> tuple[Config, str | None]:
    task = {"kind": "dataset", "path": "", "reward": reward if isinstance(reward, str) else "given in Python"}
    raw: dict[str, Any] = {"model": {"path": str(model)}, "task": task}
    for key, value in settings.items():
        section, dot, name = key.partition(".")
        if not dot:
            raise UserError(f"settings: {key!r} is not section.key, such as 'buffer.depth'")
        raw.setdefault(section, {})[name] = value
    if isinstance(prompts, str | Path):
        raw["task"]["path"] = str(prompts)
        return make_config(raw), None
    run = make_config(raw).run
    raw["task"]["path"] = str(Path(run.directory) / run.name / "prompts.jsonl")
    lines = [prompt if isinstance(prompt, Mapping) else {"prompt": prompt} for prompt in prompts]
    return make_config(raw), "".join(json.dumps(dict(line)) + "\n" for line in lines)


def _outside_of_a_loop(call: Callable[[], Any]) -> Any:
    """Call `call` in this thread, or in another thread if an event loop already runs here (in a notebook)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return call()
    with concurrent.futures.ThreadPoolExecutor(1, "headrace") as thread:
        return thread.submit(call).result()
