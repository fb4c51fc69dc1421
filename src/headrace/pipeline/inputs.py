"""This module checks the user's input before any process starts.

The input is the model's files, the dataset, and the functions that the configuration names. A mistake is one line.
Functions that the controller uses (an advantage, a launcher, trackers) are imported here. The files of a loss, a
transport or an engine, which only workers use and which may need torch, are found or read but not run.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
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
from headrace.config.hub import fetched_dataset, model_dir, parse_name, teacher_dir
from headrace.config.memory import longest_sequence
from headrace.config.model_dir import check_model_dir, check_teacher, model_facts
from headrace.config.schema import RolloutsConfig, is_reference
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
from headrace.tasks.dataset import PromptFormat, Prompts, SingleTurnTask, check_disjoint, split_heldout
from headrace.tasks.gym import VERIFIER
from headrace.tasks.gym import GymTask as Gym
from headrace.tasks.records import Table, read_dataset, read_file

GIVEN = "given in Python:"
"""How a reference begins that stands for a Python object. A program gives the object itself."""
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


@dataclass(frozen=True)
class Given:
    """What a program gives to a run as Python objects, in place of what the configuration names."""

    rewards: Mapping[str, Scorer] = field(default_factory=dict)
    """The task's reward functions, by name."""
    factory: Callable[..., Task] | None = None
    """The factory of an environment's task."""


NOTHING = Given()


def check_inputs(config: Config, given: Given = NOTHING) -> tuple[ReadyTask, ChatFormat]:
    """Check all user input that needs no process."""
    chat = check_model(config)
    task = make_task(config, given)
    _check_template(chat, task)
    weights = {name: scorer.weight for name, scorer in config.scorers.items()}
    if isinstance(config.task, DatasetTaskConfig) and config.task.reward_weights:
        weights |= zip(config.task.named_rewards, config.task.reward_weights, strict=True)
    scoring = Stage(make_scorers(config, given), weights, timeout=config.scoring.timeout)
    return ReadyTask(task, scoring), chat


def check_model(config: Config) -> ChatFormat:
    """Return the model's chat format. Raises if the directory is incomplete or does not know a stop token."""
    check_extensions(config)
    path = model_dir(config.model)
    check_model_dir(path, config.model.weights, tokenizer=True)
    facts = model_facts(path, config.model.weights)
    longest = longest_sequence(config.engine.max_length, facts.max_positions)
    wanted = config.rollouts.max_tokens
    # The default is not a wish: a model with a shorter context gives shorter answers.
    if wanted >= longest and wanted != RolloutsConfig().max_tokens:
        raise ConfigError(
            f"[rollouts] max_tokens: {wanted} leaves no room for a prompt under the longest "
            f"sequence of {longest} tokens (that of the model, or [engine] max_length)"
        )
    if (teacher := teacher_dir(config)) is not None:
        check_teacher(teacher, path, config.model.weights)
    chat = ChatFormat.load(path, config.model.chat_template)
    for token in config.rollouts.stop:
        chat.token_id(token)
    return chat


def _check_template(chat: ChatFormat, task: Task) -> None:
    """Raise `ModelError` if the prompts are messages and the model has no chat template."""
    if not chat.has_template and len(task.train) and task.train[0].text is None:
        chat.open([{"role": "user", "content": ""}])


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


def make_task(config: Config, given: Given = NOTHING) -> Task:
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
            if given.factory is None:
                refuse_given("[task] factory", task.factory)
            with named("[task] factory"):
                factory = given.factory or import_function(task.factory)
            arguments = {**task.config, "seed": config.run.seed, "heldout": held}
            made: Task = call_factory(f"[task] factory: {task.factory}", factory, **arguments)
            return made
        case AgentTaskConfig() as task:
            agents = None
            if task.agent is not None or task.command:
                setup = AgentSetup(function=task.agent, command=task.command or None)
                agents = AgentPool(setup, workers=task.workers, concurrency=task.concurrency)
            train, heldout = _prompts(config, task)
            return Agents(train, heldout, agents, timeout=task.timeout, demonstration_field=task.demonstration)


def refuse_given(key: str, reference: str) -> None:
    """Raise `ConfigError` if the configuration only says that a program gave a function, and no program does."""
    if reference.startswith(GIVEN):
        raise ConfigError(
            f"{key}: {reference.removeprefix(GIVEN)!r} was given in Python; go on by headrace.train(resume=...), "
            "with the same functions"
        )


def make_scorers(config: Config, given: Given = NOTHING) -> dict[str, Scorer]:
    """Make the scorers by name: the task's reward functions and those of `[scorers.NAME]`."""
    scorers: dict[str, Scorer] = {}
    match config.task:
        case DatasetTaskConfig() as task:
            if strange := given.rewards.keys() - task.named_rewards.keys():
                own = ", ".join(task.named_rewards) or "none"
                raise ConfigError(f"[task] reward: {', '.join(sorted(strange))} is not a reward of this run ({own})")
            for name, reference in task.named_rewards.items():
                if name not in given.rewards:
                    refuse_given("[task] reward", reference)
                scorers[name] = given.rewards.get(name) or _in_workers(config, reference)
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


def _prompts(config: Config, task: DatasetTaskConfig | AgentTaskConfig) -> tuple[Prompts, Prompts]:
    """Return (training prompts, held-out prompts) from the task's files or datasets."""
    chat = not isinstance(task, DatasetTaskConfig) or task.format == "chat"
    if task.system is not None and not chat:
        raise ConfigError('[task] system: goes with chat messages, and [task] format is "text" (leave one out)')
    form = PromptFormat(system=task.system, fields=task.fields, chat=chat)
    train = Prompts(_table(task.path, task.revision, task.subset, task.split, "[task] path"), form)
    wanted = config.evaluate.prompts
    if not task.heldout_path and not task.heldout_split:
        return split_heldout(train, wanted or 0)
    if not task.heldout_path and parse_name(task.path, task.revision) is None:
        raise ConfigError(f"[task] heldout_split: is for datasets on the hub, and {task.path} is a file (heldout_path)")
    path, revision = (task.heldout_path, "") if task.heldout_path else (task.path, task.revision)
    split = task.heldout_split or task.split
    table = _table(path, revision, task.subset, split, "[task] heldout_path")
    # The same row number may be in both tables, so the ids of the second one begin differently.
    heldout = Prompts(table._replace(ids=table.ids and f"heldout-{table.ids}"), form)[:wanted]
    check_disjoint(train, heldout)
    return train, heldout


def _table(path: str, revision: str, subset: str | None, split: str, key: str) -> Table:
    """Return the rows of a file, or of a dataset on the hub."""
    name = parse_name(path, revision)
    if name is None:
        return read_file(Path(path))
    return read_dataset(fetched_dataset(name, key), name.id, subset, split)
