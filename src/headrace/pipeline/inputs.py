"""This module checks the user's input before any process starts.

The input is the model's files, the dataset, and the functions that the configuration names. A mistake is one line.
Functions that the controller uses (an advantage, a launcher, trackers) are imported here. The files of a loss, a
transport or an engine, which only workers use and which may need torch, are found or read but not run.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from headrace.config import (
    AgentTaskConfig,
    Config,
    DatasetTaskConfig,
    EnvironmentTaskConfig,
    GymTaskConfig,
    ScorerConfig,
)
from headrace.config.checks import check_references, check_transport
from headrace.config.declared import loss_facts, transport_facts
from headrace.config.model_dir import check_model_dir, check_teacher
from headrace.config.schema import is_reference
from headrace.errors import ConfigError
from headrace.gateway.agent_main import AgentSetup
from headrace.gateway.agents import AgentPool
from headrace.gateway.agents import AgentTask as Agents
from headrace.observe.prometheus import parse_address
from headrace.observe.trackers.base import find_tracker
from headrace.reference import call_factory, find_source, import_function, split_reference
from headrace.scoring.base import Scorer, Stage
from headrace.scoring.functions import is_reward_function
from headrace.scoring.rewards import WorkerScorer
from headrace.tasks.base import Task
from headrace.tasks.chat import ChatFormat
from headrace.tasks.dataset import SingleTurnTask, check_disjoint, load_prompts, split_heldout
from headrace.tasks.gym import VERIFIER
from headrace.tasks.gym import GymTask as Gym
from headrace.types import Prompt

OWN_REWARDS = ("environment", "agent")
"""The scorer names under which the rewards of environments and agents are recorded."""


@dataclass(frozen=True)
class ReadyTask:
    """A task and the stage that scores its rollouts."""

    task: Task
    scoring: Stage

    async def start(self) -> None:
        """Start the workers of agents and scorers, before the first episode. Raises `ConfigError`."""
        if isinstance(self.task, Agents):
            await self.task.start()
        await self.scoring.start()

    async def close(self) -> None:
        """End the workers of agents and scorers. Idempotent."""
        await self.scoring.close()
        await self.task.close()


def check_inputs(config: Config, reward: Scorer | None = None) -> tuple[ReadyTask, ChatFormat]:
    """Check all user input that needs no process. `reward` replaces the configured reward function."""
    chat = check_model(config)
    task = make_task(config)
    weights = {name: scorer.weight for name, scorer in config.scorers.items()}
    scoring = Stage(make_scorers(config, reward), weights, timeout=config.scoring.timeout)
    return ReadyTask(task, scoring), chat


def check_model(config: Config) -> ChatFormat:
    """Return the model's chat format. Raises if the directory is incomplete or does not know a stop token."""
    check_extensions(config)
    check_model_dir(Path(config.model.path), config.model.weights, tokenizer=True)
    if config.algorithm.teacher is not None:
        check_teacher(Path(config.algorithm.teacher), Path(config.model.path), config.model.weights)
    chat = ChatFormat.load(config.model.path)
    for token in config.rollouts.stop:
        chat.token_id(token)
    return chat


def check_extensions(config: Config) -> None:
    """Raise `ConfigError` for a reference that leads nowhere, or to a part that does not fit the rest."""
    checks: list[tuple[str, str, Callable[[str], object]]] = [
        ("[algorithm] loss", config.algorithm.loss, loss_facts),
        ("[algorithm] advantage", config.algorithm.advantage, import_function),
        ("[delivery] transport", config.delivery.transport, transport_facts),
        ("[engine] kind", config.engine.kind, lambda kind: find_source(split_reference(kind)[0])),
        ("[pipeline] launcher", config.pipeline.launcher, import_function),
    ]
    for key, reference, check in checks:
        if is_reference(reference):
            with named(key):
                check(reference)
    if config.observe.prometheus:
        parse_address(config.observe.prometheus)
    with named("[observe] trackers"):
        for tracker in config.observe.trackers:
            find_tracker(tracker, config.observe.tracker_options.get(tracker, {}))
    if unused := sorted(config.observe.tracker_options.keys() - set(config.observe.trackers)):
        raise ConfigError(f"[observe] tracker_options: {unused[0]!r} is not one of trackers")
    if is_reference(config.delivery.transport):
        check_transport(config)
    check_references(config.algorithm, config.rollouts)


@contextmanager
def named(key: str) -> Iterator[None]:
    """Begin the line of every `ConfigError` that is raised inside with the key that is wrong."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error


def count_prompts(config: Config) -> tuple[int, int]:
    """Return the numbers of training and held-out prompts. This checks everything that `check_inputs` checks.

    A reasoning-gym dataset is not checked here, because importing it takes seconds. It is checked when a run starts.
    """
    if isinstance(config.task, GymTaskConfig):
        check_model(config)
        if find_spec("reasoning_gym") is None:
            raise ConfigError('[task] kind = "gym" needs reasoning-gym: pip install "headrace[tasks]"')
        make_scorers(config)
        return config.task.size, config.evaluate.prompts or 0
    if isinstance(config.task, DatasetTaskConfig) and config.task.reward is not None:
        with named("[task] reward"):
            import_function(config.task.reward)
    if isinstance(config.task, AgentTaskConfig) and config.task.agent is not None:
        with named("[task] agent"):
            import_function(config.task.agent)
    task = check_inputs(config)[0].task
    return len(task.train), len(task.heldout)


def make_task(config: Config) -> Task:
    """Make the configured task."""
    held = config.evaluate.prompts or 0
    match config.task:
        case DatasetTaskConfig() as task:
            return SingleTurnTask(*_prompts(config, task), task.demonstration)
        case GymTaskConfig() as task:
            return Gym(
                task.name,
                config=task.config,
                seed=config.run.seed,
                size=task.size,
                heldout=held,
                system=task.system,
                suffix=task.suffix,
                answer_pattern=task.answer_pattern,
            )
        case EnvironmentTaskConfig() as task:
            given = {**task.config, "seed": config.run.seed, "heldout": held}
            made: Task = call_factory(f"[task] factory: {task.factory}", import_function(task.factory), **given)
            return made
        case AgentTaskConfig() as task:
            agents = None
            if task.agent is not None or task.command:
                setup = AgentSetup(function=task.agent, command=task.command or None)
                agents = AgentPool(setup, workers=task.workers, concurrency=task.concurrency)
            train, heldout = _prompts(config, task)
            return Agents(train, heldout, agents, timeout=task.timeout, demonstration_field=task.demonstration)


def make_scorers(config: Config, reward: Scorer | None = None) -> dict[str, Scorer]:
    """Make the scorers by name: the task's reward function (`reward` replaces it) and those of `[scorers.NAME]`."""
    scorers: dict[str, Scorer] = {}
    match config.task:
        case DatasetTaskConfig(reward=reference):
            if reward is not None:
                scorers["reward"] = reward
            elif reference is not None:
                scorers["reward"] = _in_workers(config, reference)
        case GymTaskConfig() as gym:
            arguments = {"name": gym.name, "config": gym.config, "answer_pattern": gym.answer_pattern}
            scorers["verifier"] = _in_workers(config, VERIFIER, arguments)
    for name, scorer in config.scorers.items():
        if name in scorers or name in OWN_REWARDS:
            raise ConfigError(f"[scorers.{name}]: {name!r} is the name of the task's own reward; choose another one")
        scorers[name] = _named_scorer(config, name, scorer)
    return scorers


def _named_scorer(config: Config, name: str, scorer: ScorerConfig) -> Scorer:
    """Make the scorer of `[scorers.NAME]` from a reward function, or from a factory of it or of a scorer."""
    place = f"[scorers.{name}] scorer"
    with named(place):
        found = import_function(scorer.scorer)
    if not scorer.config and is_reward_function(found):
        return _in_workers(config, scorer.scorer, key=place)
    made = call_factory(f"{place}: {scorer.scorer}", found, **scorer.config)
    if isinstance(made, Scorer):
        return made
    if is_reward_function(made):
        return _in_workers(config, scorer.scorer, scorer.config, key=place)
    raise ConfigError(
        f"{place}: {scorer.scorer} made a {type(made).__name__}, neither a scorer nor a function of `completion`"
    )


def _in_workers(config: Config, reference: str, arguments: dict[str, Any] | None = None, key: str = "") -> WorkerScorer:
    scoring = config.scoring
    return WorkerScorer(
        reference,
        arguments=arguments,
        workers=scoring.workers,
        timeout=scoring.timeout,
        key=key,
        recycle=scoring.judgements_per_worker,
    )


def _prompts(config: Config, task: DatasetTaskConfig | AgentTaskConfig) -> tuple[list[Prompt], list[Prompt]]:
    """Return (training prompts, held-out prompts) from the task's files."""
    train = load_prompts(task.path, system=task.system)
    wanted = config.evaluate.prompts
    if task.heldout_path is None:
        return split_heldout(train, wanted or 0, task.path)
    heldout = load_prompts(task.heldout_path, system=task.system)[:wanted]
    check_disjoint(train, heldout, task.path, task.heldout_path)
    return train, heldout
