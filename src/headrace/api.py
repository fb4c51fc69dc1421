"""The Python API: `headrace.train(...)` runs the whole loop on the same code path as the command line.

The run has a thread of its own. The caller's thread waits for it, calls `on_step`, and takes Ctrl-C, so `train` works
in a script and in a notebook, where an event loop runs already.
"""

from __future__ import annotations

import json
import queue
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w

from headrace.config import Config, make_config, with_settings
from headrace.errors import RunFinished, UserError
from headrace.types import Rollout

if TYPE_CHECKING:
    from headrace.pipeline.inputs import Given
    from headrace.pipeline.run_session import RunSession
    from headrace.tasks.base import Task

PromptLike = str | Sequence[Mapping[str, str]] | Mapping[str, Any]
"""A text, a list of messages, or an object with `prompt` and any other fields that the reward function needs."""
Prompts = Iterable[PromptLike] | str | Path
"""A list of prompts, a `datasets.Dataset`, a file, or the name of a dataset on the hub, as in `[task] path`."""
Reward = Callable[..., Any] | str
"""A reward function, or the name of one, `"module:function"`."""
OnStep = Callable[[dict[str, Any]], Any]

PROMPTS, HELDOUT = "prompts.jsonl", "heldout.jsonl"
"""The files of the run directory that hold prompts which were given as lists."""


def train(
    *,
    model: str | Path | Mapping[str, Any] | None = None,
    prompts: Prompts | None = None,
    heldout: Prompts | None = None,
    reward: Reward | Sequence[Reward] | None = None,
    reward_weights: Sequence[float] = (),
    task: Mapping[str, Any] | Task | Callable[..., Task] | None = None,
    on_step: OnStep | None = None,
    resume: bool | str | Path = False,
    settings: Mapping[str, Any] | None = None,
    display: str = "auto",
    **sections: Mapping[str, Any],
) -> Run:
    """Train a model to earn a reward, and return when the run has ended.

    `prompts` and `heldout` are lists, or what `[task] path` and `heldout_path` may name. `reward` is one function or
    several. A function is called in threads of this process with a deadline; a name, `"module:function"`, stands for a
    function in worker processes. `task` is the section `[task]`, for a gym or for agents, or a `headrace.Task`, or a
    factory of one that is called with `seed` and `heldout`. Several tasks are `tasks={"math": {...}, "code": {...}}`.

    The other sections of the configuration are keywords: `engine={"slots": 8}`. `settings` holds the same with dots,
    `{"engine.slots": 8}`, and is applied last.

    `on_step` is called in this thread after each optimizer step, with the entry of `Run.history`. The run goes on
    meanwhile. If `on_step` returns False, the run ends in order. If it raises, the run ends in order and `train` raises
    the same. Ctrl-C ends the run in order, and a second Ctrl-C ends it at once.

    With `resume=True`, a run of the same name goes on if it exists, and is returned as it is if it is finished.
    `resume` may also be the directory of a run that is not finished. Model, data and task are then those of the run.
    The settings may be new.
    """
    from headrace.observe.progress import make_progress
    from headrace.pipeline.launch import resume_run, start_run
    from headrace.run_dir import RunDir, with_name

    chosen = _merged({"observe.display": display}, sections, settings or {})
    execute = partial(_follow, on_step=on_step)
    several = "tasks" in chosen and task is None and reward is None
    raw = _merged(_model(model), {} if several else _task(task, reward, reward_weights), chosen)
    existing = resume if not isinstance(resume, bool) else None
    if existing is None:
        named = with_name(make_config(_merged(raw, _paths(prompts, heldout, Path()))), existing=resume is True)
        directory = RunDir.of(named).path
        existing = directory if resume and directory.exists() else None
    if existing is not None:
        changes = _flat(chosen)
        config = with_settings(RunDir.open(existing)[1], changes)
        progress = make_progress(config.observe.display, title=config.run.name)
        given = _given(config, task, reward)
        try:
            resume_run(existing, progress, changes, given, execute=execute)
        except RunFinished as finished:
            if resume is not True:
                raise
            progress.note(str(finished))  # A script that is started again has nothing left to do.
        return Run(existing)
    config = make_config(_merged(raw, {"run.name": directory.name}, _paths(prompts, heldout, directory)))
    progress = make_progress(config.observe.display, title=config.run.name)
    files = {name: _lines(given, name) for name, given in ((PROMPTS, prompts), (HELDOUT, heldout)) if _is_list(given)}
    given = _given(config, task, reward)
    return Run(start_run(config, progress, given, files=files, execute=execute).run_dir.path)


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
        return [entry for entry in metrics if _is_step(entry)]

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


def _merged(*parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested dictionaries as one. A key may be a path with dots. Later parts replace earlier ones."""
    merged: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            *outer, last = key.split(".")
            if not outer and not isinstance(value, Mapping):
                raise UserError(
                    f"{key!r} is not section.key, such as settings={{'buffer.depth': 2}}, nor a section, such as "
                    "buffer={'depth': 2}"
                )
            target = merged
            for name in outer:
                target = target.setdefault(name, {})
                if not isinstance(target, dict):
                    raise UserError(f"{key!r}: {name} is a value, not a section")
            target[last] = value if outer else {**target.get(last, {}), **value}
    return merged


def _flat(nested: Mapping[str, Any], *outer: str) -> list[str]:
    """Return a nested dictionary as settings, `section.key=value`."""
    settings: list[str] = []
    for key, value in nested.items():
        if isinstance(value, Mapping):
            settings += _flat(value, *outer, key)
        elif value is not None:
            settings.append(".".join((*outer, key)) + "=" + tomli_w.dumps({"value": value}).partition("=")[2].strip())
    return settings


def _model(model: str | Path | Mapping[str, Any] | None) -> dict[str, Any]:
    if isinstance(model, Mapping):
        return {"model": model}
    return {} if model is None else {"model.path": str(model)}


def _task(task: Any, reward: Reward | Sequence[Reward] | None, weights: Sequence[float]) -> dict[str, Any]:
    """Return the section of the task. Objects of Python are named in it."""
    from headrace.pipeline.inputs import GIVEN

    if task is not None and not isinstance(task, Mapping):
        kind = task if hasattr(task, "__name__") else type(task)
        return {"task": {"kind": "environment", "factory": f"{GIVEN}{kind.__name__}"}}
    section = {"kind": "dataset", **(task or {})}
    if reward is not None:
        several = not isinstance(reward, str) and not callable(reward)
        references = [each if isinstance(each, str) else f"{GIVEN}{name}" for name, each in _named(reward)]
        section["reward"] = references if several else references[0]
    if weights:
        section["reward_weights"] = [float(weight) for weight in weights]
    return {"task": section}


def _named(reward: Reward | Sequence[Reward]) -> list[tuple[str, Reward]]:
    """Return the reward functions with the names under which they are recorded."""
    if isinstance(reward, str) or callable(reward):
        return [("reward", reward)]
    named: list[tuple[str, Reward]] = []
    for each in reward:
        name = each.rpartition(":")[2] if isinstance(each, str) else getattr(each, "__name__", "reward")
        name = name if name.isidentifier() else "reward"
        if not isinstance(each, str) and name in dict(named):
            name = f"{name}_{len(named) + 1}"
        named.append((name, each))
    return named


def _given(config: Config, task: Any, reward: Reward | Sequence[Reward] | None) -> Given:
    """Return the objects of Python that the run uses in place of what its configuration names."""
    from headrace.pipeline.inputs import Given
    from headrace.scoring.rewards import ThreadScorer

    timeout, threads = config.scoring.timeout, config.scoring.workers
    functions = [] if reward is None else [(name, each) for name, each in _named(reward) if not isinstance(each, str)]
    factory = None
    if task is not None and not isinstance(task, Mapping):
        factory = task if callable(task) else lambda **arguments: task
    scorers = {name: ThreadScorer(each, timeout, threads=threads) for name, each in functions}
    return Given(rewards=scorers, factory=factory)


def _is_list(prompts: Prompts | None) -> bool:
    return prompts is not None and not isinstance(prompts, str | Path)


def _paths(prompts: Prompts | None, heldout: Prompts | None, directory: Path) -> dict[str, str]:
    """Return where the prompts are. Lists are written into the run directory."""
    keys = {"task.path": (prompts, PROMPTS), "task.heldout_path": (heldout, HELDOUT)}
    return {
        key: str(directory / file if _is_list(given) else given)
        for key, (given, file) in keys.items()
        if given is not None
    }


def _lines(prompts: Any, name: str) -> str:
    """Return prompts as JSON lines."""
    if isinstance(prompts, Mapping):
        raise UserError(f"{name}: these are several splits of a dataset; give one of them ({', '.join(prompts)})")
    lines = []
    for number, prompt in enumerate(prompts, start=1):
        entry = dict(prompt) if isinstance(prompt, Mapping) else {"prompt": prompt}
        try:
            lines.append(json.dumps(entry, allow_nan=False) + "\n")
        except (TypeError, ValueError) as error:
            raise UserError(f"{name}, line {number} cannot be written as JSON: {error}") from error
    return "".join(lines)


def _follow(session: RunSession, on_step: OnStep | None) -> RunSession:
    """Execute a run in a thread. `on_step` and signals are handled in this thread."""
    records: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()

    def listen(record: dict[str, Any]) -> None:
        if _is_step(record):
            records.put(record)

    with _signals(session.interrupt), ThreadPoolExecutor(1, "headrace") as thread:
        run = thread.submit(session.execute, listen)
        run.add_done_callback(lambda ended: records.put(None))
        with ExitStack() as undone:
            # If `on_step` raises, the run is interrupted, and the end of the outer `with` waits until it has ended.
            undone.callback(session.interrupt)
            while (record := records.get()) is not None:
                if on_step is not None and on_step(record) is False:
                    on_step = None
                    session.interrupt()
            undone.pop_all()
        return run.result()


def _is_step(record: Mapping[str, Any]) -> bool:
    return (record["kind"], record.get("objective")) == ("step", "policy")


@contextmanager
def _signals(interrupt: Callable[[], None]) -> Iterator[None]:
    """Let Ctrl-C and SIGTERM interrupt a run. Only the main thread of a program can take signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {each: signal.signal(each, lambda *_: interrupt()) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, signal.SIG_DFL if handler is None else handler)
