"""This module checks the user's input before any process starts.

The input is the model's files, the dataset, and the functions that the configuration names. A mistake is one line.
Functions that the controller uses (an advantage, a launcher, trackers) are imported here. The files of a loss, a
transport or an engine, which only workers use and which may need torch, are found or read but not run.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import permutations
from pathlib import Path
from typing import Any

from headrace.config import (
    AgentTaskConfig,
    Config,
    DatasetTaskConfig,
    EnvironmentTaskConfig,
    GymTaskConfig,
    MixtureConfig,
    ScorerConfig,
    TaskConfig,
)
from headrace.config.checks import check_references, check_transport, in_section
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
from headrace.tasks.dataset import PromptFormat, Prompts, SingleTurnTask, check_contents, check_disjoint, split_heldout
from headrace.tasks.gym import VERIFIER
from headrace.tasks.gym import GymTask as Gym
from headrace.tasks.mixture import Mixture
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
    return ReadyTask(task, make_stage(config, given)), chat


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
    for each in task.tasks.values() if isinstance(task, Mixture) else [task]:
        if not chat.has_template and len(each.train) and each.train[0].text is None:
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
    """Make the configured task, or the mixture of the configured tasks."""
    if not isinstance(config.task, MixtureConfig):
        return _make_task(config, config.task, given)
    tasks: dict[str, Task] = {}
    for name, each in config.task.tasks.items():
        with in_section(f"tasks.{name}"):
            tasks[name] = _make_task(config, each, NOTHING)
    for own, other in permutations(tasks.values(), 2):
        if isinstance(own.train, Prompts) and isinstance(other.heldout, Prompts):
            check_contents(own.train, other.heldout)
    return Mixture(tasks, {name: each.weight for name, each in config.task.tasks.items()})


def _make_task(config: Config, task: TaskConfig, given: Given) -> Task:
    held = config.evaluate.prompts or 0
    match task:
        case DatasetTaskConfig():
            return SingleTurnTask(*_prompts(config, task), task.demonstration)
        case GymTaskConfig():
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
        case EnvironmentTaskConfig():
            if given.factory is None:
                refuse_given("[task] factory", task.factory)
            with named("[task] factory"):
                factory = given.factory or import_function(task.factory)
            arguments = {**task.config, "seed": config.run.seed, "heldout": held}
            made: Task = call_factory(f"[task] factory: {task.factory}", factory, **arguments)
            return made
        case AgentTaskConfig():
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


def make_stage(config: Config, given: Given = NOTHING) -> Stage:
    """Make the stage of all scorers: the tasks' reward functions and those of `[scorers.NAME]`.

    With several tasks, the name of a task's own scorer begins with the name of the task.
    """
    scorers: dict[str, Scorer] = {}
    weights, tasks = dict[str, float](), dict[str, str]()
    if isinstance(config.task, MixtureConfig):
        for name, task in config.task.tasks.items():
            with in_section(f"tasks.{name}"):
                made = _own_scorers(config, task, NOTHING, f"[tasks.{name}]")
            own = {f"{name}/{scorer}": each for scorer, each in made.items()}
            scorers |= own
            weights |= {f"{name}/{scorer}": weight for scorer, weight in _own_weights(task).items()}
            tasks |= dict.fromkeys(own, name)
    else:
        scorers, weights = _own_scorers(config, config.task, given), _own_weights(config.task)
    for name, scorer in config.scorers.items():
        if name in scorers or name in OWN_REWARDS:
            raise ConfigError(f"[scorers.{name}]: {name!r} is the name of the task's own reward; choose another one")
        scorers[name], weights[name] = _named_scorer(config, name, scorer), scorer.weight
    return Stage(scorers, weights, tasks=tasks, timeout=config.scoring.timeout)


def _own_scorers(config: Config, task: TaskConfig, given: Given, section: str = "") -> dict[str, Scorer]:
    """Make the reward functions of a task. Their messages name its `section`, by default `[task]`."""
    match task:
        case DatasetTaskConfig():
            scorers: dict[str, Scorer] = {}
            if strange := given.rewards.keys() - task.named_rewards.keys():
                own = ", ".join(task.named_rewards) or "none"
                raise ConfigError(f"[task] reward: {', '.join(sorted(strange))} is not a reward of this run ({own})")
            for name, reference in task.named_rewards.items():
                if name not in given.rewards:
                    refuse_given("[task] reward", reference)
                scorers[name] = given.rewards.get(name) or _in_workers(
                    config, reference, key=section and f"{section} reward"
                )
            return scorers
        case GymTaskConfig():
            arguments = {"name": task.name, "config": task.config, "answer_pattern": task.answer_pattern}
            return {"verifier": _in_workers(config, VERIFIER, arguments, key=section)}
    return {}


def _own_weights(task: TaskConfig) -> dict[str, float]:
    if not isinstance(task, DatasetTaskConfig) or not task.reward_weights:
        return {}
    return dict(zip(task.named_rewards, task.reward_weights, strict=True))


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
