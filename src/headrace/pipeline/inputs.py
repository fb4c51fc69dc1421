"""This module checks the user's input before any process starts.

The input is the model's files, the dataset, and the functions that the configuration names. A mistake is one line.
Functions that the controller uses (an advantage, a launcher, trackers) are imported here. The files of a loss, a
transport or an engine, which only workers use and which may need torch, are found or read but not run.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import permutations
from pathlib import Path
from typing import Any

import msgspec

from headrace.config import (
    AgentTaskConfig,
    Config,
    DatasetTaskConfig,
    EnvironmentTaskConfig,
    FunctionScorerConfig,
    GymTaskConfig,
    JudgeConfig,
    MixtureConfig,
    ProgramConfig,
    ScorerConfig,
    TaskConfig,
    TeacherConfig,
)
from headrace.config.checks import check_references, check_teachers, check_transport, in_section
from headrace.config.declared import loss_facts, needs, transport_facts
from headrace.config.hub import fetched_dataset, find_model, model_dir, parse_name, teacher_dir, template_text
from headrace.config.memory import longest_sequence
from headrace.config.model_dir import check_model_dir, check_teacher, check_tokens, model_facts, weights_stamp
from headrace.config.reward_model import reward_verdict, token_id, tokens_that_contain
from headrace.config.schema import RolloutsConfig, is_reference
from headrace.config.scorers import ModelScorerSection, ProcessRewardConfig
from headrace.errors import ConfigError, HeadraceError, UserError
from headrace.gateway.agent_main import AgentSetup
from headrace.gateway.agents import AgentPool
from headrace.gateway.agents import AgentTask as Agents
from headrace.observe.prometheus import parse_address
from headrace.observe.trackers.base import find_tracker
from headrace.reference import call_factory, describe, find_source, import_function, split_reference
from headrace.scoring.base import ScoreError, Scorer, Stage
from headrace.scoring.functions import is_reward_function
from headrace.scoring.judges import Judge, Template
from headrace.scoring.model_process import ROLE, ModelEngine, ModelProcess
from headrace.scoring.process_reward import ProcessRewardScorer
from headrace.scoring.programs import Program
from headrace.scoring.replies import EngineReplies, UrlReplies
from headrace.scoring.rewards import WorkerScorer
from headrace.scoring.teachers import EngineTeacher, MovingTeacher, Teacher, TeacherProcess, Teachers, UrlTeacher
from headrace.tasks.base import Task
from headrace.tasks.chat import ChatFormat
from headrace.tasks.dataset import PromptFormat, Prompts, SingleTurnTask, check_contents, check_disjoint, split_heldout
from headrace.tasks.gym import VERIFIER
from headrace.tasks.gym import GymTask as Gym
from headrace.tasks.mixture import Mixture
from headrace.tasks.records import Table, read_dataset, read_file
from headrace.types import Prompt

GIVEN = "given in Python:"
"""How a reference begins that stands for a Python object. A program gives the object itself."""
OWN_REWARDS = ("environment", "agent")
"""The scorer names under which the rewards of environments and agents are recorded."""


@dataclass(frozen=True)
class ReadyTask:
    """A task and the stage that scores its rollouts."""

    task: Task
    scoring: Stage
    sets: Mapping[str, Sequence[Prompt]] = field(default_factory=dict)
    """The further sets of held-out prompts, by name."""

    async def start(self) -> None:
        """Start the workers of agents and scorers, before the first episode. Raises `ConfigError`."""
        if isinstance(self.task, Agents):
            await self.task.start()
        await self.scoring.start()

    async def close(self, note: Callable[[str], None]) -> None:
        """End the workers of agents and scorers. Idempotent. What goes wrong is noted, and ends nothing else."""
        for what, close in (("a scorer", self.scoring.close), ("the task", self.task.close)):
            try:
                with _foreign(f"{what} could not be closed"):
                    await close()
            except HeadraceError as error:
                note(str(error))


@contextmanager
def _foreign(what: str) -> Iterator[None]:
    """Run a user's code. Any exception of it becomes a `UserError`."""
    try:
        yield
    except HeadraceError:
        raise
    except Exception as error:
        raise UserError(f"{what}: {describe(error)}") from error


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
    scoring = make_stage(config, given)
    _check_questions(scoring, task)
    return ReadyTask(task, scoring, make_sets(config, task)), chat


def make_sets(config: Config, task: Task) -> dict[str, list[Prompt]]:
    """Return the prompts of every `[evaluate.sets.NAME]`. Raises `DataError` if one is a training prompt."""
    found: dict[str, list[Prompt]] = {}
    for name, each in config.evaluate.sets.items():
        own = config.task.tasks[each.task] if isinstance(config.task, MixtureConfig) else config.task
        assert isinstance(own, DatasetTaskConfig | AgentTaskConfig)
        chat = not isinstance(own, DatasetTaskConfig) or own.format == "chat"
        form = PromptFormat(system=own.system, fields={**own.fields, **each.fields}, chat=chat)
        table = _table(each.path, each.revision, each.subset, each.split, f"[evaluate.sets.{name}] path")
        prompts = Prompts(table, form)[: each.prompts]
        trained = task.tasks.values() if isinstance(task, Mixture) else [task]
        for one in trained:
            if isinstance(one.train, Prompts):
                check_contents(one.train, prompts)
        found[name] = [msgspec.structs.replace(prompt, task=each.task) for prompt in prompts]
    return found


def check_model(config: Config) -> ChatFormat:
    """Return the model's chat format. Raises if the directory is incomplete or does not know a stop token."""
    check_extensions(config)
    path = model_dir(config.model)
    check_model_dir(path, config.model.weights, tokenizer=True)
    facts = model_facts(path, config.model.weights)
    longest = longest_sequence(config.engine.max_length, facts.max_positions)
    for section, wanted in config.longest_answers.items():
        # The default is not a wish: a model with a shorter context gives shorter answers.
        if wanted >= longest and wanted != RolloutsConfig().max_tokens:
            raise ConfigError(
                f"[{section}] max_tokens: {wanted} leaves no room for a prompt under the longest "
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


def _check_questions(scoring: Stage, task: Task) -> None:
    """Raise `ConfigError` if the template of a judge names a field that the first prompt does not have."""
    prompts = [
        each.train[0] for each in (task.tasks.values() if isinstance(task, Mixture) else [task]) if len(each.train)
    ]
    judges = {name: scorer for name, scorer in scoring.scorers.items() if isinstance(scorer, Judge)}
    for name, judge in judges.items():
        for prompt in prompts:
            try:
                judge.question(prompt, "")
            except ScoreError as error:
                raise ConfigError(f"[scorers.{name}] template: {error}") from error


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
    check_teachers(config)


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
        if isinstance(scorer, TeacherConfig):
            continue
        scorers[name], weights[name] = _named_scorer(config, name, scorer), scorer.weight
    teachers = {name: _teacher(config, name, section) for name, section in config.teachers.items()}
    return Stage(
        scorers,
        weights,
        tasks=tasks,
        timeout=config.scoring.timeout,
        teachers=Teachers(teachers, config.teachers, field=config.algorithm.teacher_field) if teachers else None,
    )


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
    """Make the scorer of `[scorers.NAME]`."""
    match scorer:
        case FunctionScorerConfig():
            return _function_scorer(config, f"[scorers.{name}] scorer", scorer)
        case ProgramConfig():
            return Program(scorer, f"scorers.{name}")
        case JudgeConfig():
            return _judge(config, name, scorer)
        case ProcessRewardConfig():
            return _process_reward(config, name, scorer)
    raise AssertionError(f"{name} is no scorer of rewards")


def _function_scorer(config: Config, place: str, scorer: FunctionScorerConfig) -> Scorer:
    """Make a scorer from a reward function, or from a factory of it or of a scorer."""
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


def _judge(config: Config, name: str, judge: JudgeConfig) -> Judge:
    """Make a judge, whose replies come from a server, or from a worker process with a model of its own."""
    template = template_text(judge.template, f"[scorers.{name}] template")
    with named(f"[scorers.{name}] template"):
        Template(template)
    if judge.url:
        source = UrlReplies(
            judge.url,
            judge.served_model,
            key=read_api_key(f"scorers.{name}", judge.api_key),
            max_tokens=judge.max_tokens,
            temperature=judge.temperature,
            concurrency=judge.concurrency,
        )
        return Judge(judge, template, source)
    path = scorer_model_dir(f"scorers.{name}", judge)
    with named(f"[scorers.{name}] model"):
        chat = ChatFormat.load(path)
        if not chat.has_template:
            raise ConfigError(f"{path} has no chat template, and a judge is asked in messages")
    process = ModelEngine(process_name(config, f"scorers.{name}"), timeout=judge.timeout)
    replies = EngineReplies(process, chat, max_tokens=judge.max_tokens, temperature=judge.temperature)
    return Judge(judge, template, replies, process=process, weights=weights_stamp(path))


def _process_reward(config: Config, name: str, section: ProcessRewardConfig) -> ProcessRewardScorer:
    """Make the scorer of a process-reward model, which must know all tokens of the policy."""
    key = f"[scorers.{name}]"
    path, policy = scorer_model_dir(f"scorers.{name}", section), model_dir(config.model)
    check_teacher(path, policy, config.model.weights, key=f"{key} model")
    reward_verdict(path, section.good, section.bad, f"{key} model")
    return ProcessRewardScorer(
        ModelProcess(process_name(config, f"scorers.{name}"), timeout=section.timeout),
        tokens_that_contain(policy, section.markers, f"{key} markers"),
        tag=token_id(path, section.tag, f"{key} tag") if section.tag else None,
        whole=section.whole,
        cancel_below=section.cancel_below,
        streaming=section.when == "step",
        limits=section,
    )


def _teacher(config: Config, name: str, section: TeacherConfig) -> Teacher:
    """Make a teacher outside of the trainer, which must have the tokens of the policy."""
    model = model_dir(config.model)
    facts, k = model_facts(model, config.model.weights), needs(config.algorithm).top_k
    if section.url:
        key = f"[scorers.{name}] tokenizer"
        check_tokens(find_model(section.tokenizer, key=key), model, key)
        return UrlTeacher(
            section.url,
            section.served_model,
            key=read_api_key(f"scorers.{name}", section.api_key),
            concurrency=section.concurrency,
            k=k,
            vocabulary=facts.vocabulary,
            longest=longest_sequence(config.engine.max_length, facts.max_positions),
        )
    if section.policy != "none":
        follows = TeacherProcess(
            process_name(config, f"scorers.{name}"), timeout=section.timeout, load_deadline=config.delivery.deadline
        )
        label = f"{section.policy} {section.decay} {section.versions_ago}"
        return MovingTeacher(follows, label, k=k, vocabulary=facts.vocabulary)
    path = find_model(section.model, section.revision, key=f"[scorers.{name}] model")
    check_teacher(path, model, config.model.weights, key=f"[scorers.{name}] model")
    process = ModelProcess(process_name(config, f"scorers.{name}"), timeout=section.timeout)
    return EngineTeacher(process, weights_stamp(path), k=k, vocabulary=facts.vocabulary)


def read_api_key(section: str, variable: str) -> str:
    """Return the API key in this environment variable; empty if no variable is named. Raises `ConfigError`."""
    # A key that was read from a file often ends with a line break, which no header may hold.
    key = os.environ.get(variable, "").strip() if variable else ""
    if variable and not key:
        raise ConfigError(f"[{section}] api_key: the environment variable {variable!r} is not set")
    return key


def process_name(config: Config, section: str) -> str:
    """Return the name of the worker process that has the model of this section."""
    return f"{ROLE}-{list(config.scorer_models).index(section)}"


def scorer_model_dir(section: str, scorer: ModelScorerSection) -> Path:
    """Return the directory of a scorer's model on this host. Raises `ModelError` if it is not complete."""
    key = f"[{section}] model"
    path = find_model(scorer.model, scorer.revision, key=key)
    check_model_dir(path, "load", tokenizer=True, key=key)
    return path


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
