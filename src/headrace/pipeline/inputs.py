"""What the user gave, checked before any process starts: the model's files, the dataset, the functions it names."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from headrace.config import AgentTask, Config, DatasetTask, EnvironmentTask, GymTask
from headrace.config.model_dir import check_model_dir, check_teacher
from headrace.errors import ConfigError
from headrace.gateway.agents import AgentPool
from headrace.gateway.frames import Setup
from headrace.gateway.task import AgentTask as Agents
from headrace.pipeline.extensions import check_extensions
from headrace.reference import import_function
from headrace.scoring.workers import WorkerJudge
from headrace.tasks.base import Judge, Task
from headrace.tasks.chat import ChatFormat
from headrace.tasks.dataset import check_disjoint, load_prompts, split_heldout
from headrace.tasks.gym import GymTask as Gym
from headrace.tasks.single_turn import SingleTurnTask
from headrace.types import Prompt


@dataclass(frozen=True)
class ReadyTask:
    """A task and what must happen before its first episode."""

    task: Task
    start: Callable[[], Awaitable[None]]


async def _nothing() -> None:
    """For tasks that need no start."""


def check_inputs(config: Config, judge: Judge | None = None) -> tuple[ReadyTask, ChatFormat]:
    """Everything of the user's that can be wrong without starting a process: model files, dataset, references."""
    chat = check_model(config)
    return make_task(config, judge), chat


def check_model(config: Config) -> ChatFormat:
    """The model's chat format, if its directory is complete and knows the configured stop tokens."""
    check_extensions(config)
    model = check_model_dir(Path(config.model.path), config.model.weights, tokenizer=True)
    if config.algorithm.teacher is not None:
        check_teacher(Path(config.algorithm.teacher), model)
    chat = ChatFormat.load(config.model.path)
    for token in config.rollouts.stop:
        chat.token_id(token)
    return chat


def count_prompts(config: Config) -> tuple[int, int]:
    """Training and held-out prompts, with everything checked that `check_inputs` checks at once.

    A reasoning-gym dataset is taken at its word: importing it takes seconds, and it is checked when a run starts.
    """
    if isinstance(config.task, GymTask):
        check_model(config)
        if find_spec("reasoning_gym") is None:
            raise ConfigError('[task] kind = "gym" needs reasoning-gym: pip install "headrace[tasks]"')
        return config.task.size, config.evaluate.prompts or 0
    if isinstance(config.task, DatasetTask) and config.task.reward is not None:
        import_function(config.task.reward)
    if isinstance(config.task, AgentTask) and config.task.agent is not None:
        import_function(config.task.agent)
    task = check_inputs(config)[0].task
    return len(task.train), len(task.heldout)


def make_task(config: Config, judge: Judge | None = None) -> ReadyTask:
    """The configured task; `judge` replaces its reward function (the Python API gives one)."""
    if config.scorers:
        raise ConfigError("[scorers]: the run's own scorers are not built yet; give [task] reward")
    match config.task:
        case DatasetTask() as dataset:
            return _dataset(config, dataset, judge)
        case GymTask() as gym:
            return _gym(config, gym)
        case EnvironmentTask() as environment:
            return ReadyTask(_environment(config, environment), _nothing)
        case AgentTask() as agent:
            task = _agents(config, agent)
            return ReadyTask(task, task.start)


def _prompts(config: Config, task: DatasetTask | AgentTask) -> tuple[list[Prompt], list[Prompt]]:
    """(training, held-out) from the task's files."""
    train = load_prompts(task.path, system=task.system)
    wanted = config.evaluate.prompts
    if task.heldout_path is None:
        return split_heldout(train, wanted or 0, task.path)
    heldout = load_prompts(task.heldout_path, system=task.system)[:wanted]
    check_disjoint(train, heldout, task.path, task.heldout_path)
    return train, heldout


def _agents(config: Config, task: AgentTask) -> Agents:
    train, heldout = _prompts(config, task)
    agents = None
    if task.agent is not None or task.command:
        setup = Setup(function=task.agent, command=task.command or None)
        agents = AgentPool(setup, workers=task.workers, concurrency=task.concurrency)
    return Agents(train, heldout, agents, timeout=task.timeout, demonstration_field=task.demonstration)


def _dataset(config: Config, task: DatasetTask, judge: Judge | None) -> ReadyTask:
    train, heldout = _prompts(config, task)
    start = _nothing
    if judge is None:
        assert task.reward is not None, "checked with the configuration: without scorers there is a reward"
        workers = WorkerJudge(task.reward, workers=config.scoring.workers, timeout=config.scoring.timeout)
        judge, start = workers, workers.start
    return ReadyTask(SingleTurnTask(train, heldout, judge, task.demonstration), start)


def _gym(config: Config, task: GymTask) -> ReadyTask:
    judge = WorkerJudge(
        "headrace.tasks.gym:verifier",
        arguments=Gym.verifier_arguments(task.name, task.config, task.answer_pattern),
        workers=config.scoring.workers,
        timeout=config.scoring.timeout,
    )
    gym = Gym(
        task.name,
        judge=judge,
        config=task.config,
        seed=config.run.seed,
        size=task.size,
        heldout=config.evaluate.prompts or 0,
        system=task.system,
        suffix=task.suffix,
        answer_pattern=task.answer_pattern,
    )
    return ReadyTask(gym, judge.start)


def _environment(config: Config, task: EnvironmentTask) -> Task:
    factory = import_function(task.factory)
    try:
        made: Task = factory(**task.config, seed=config.run.seed, heldout=config.evaluate.prompts or 0)
    except TypeError as error:
        raise ConfigError(f"[task] config: {task.factory} does not take it: {error}") from error
    return made
