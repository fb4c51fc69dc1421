"""The trial of a run's input, for `headrace check`: what a run would find only after its start is found here.

The task is made, as a run makes it. The first prompt is opened and rendered, and an answer to it is judged once: the
task's demonstration, if it has one, or else an empty answer. The reward function is called where a run calls it, in a
worker process with the time limit of `[scoring]`, so one that hangs is a line too. Lengths of prompts are compared with
the longest sequence of the engines. No torch is loaded, and no engine or trainer starts.
"""

import asyncio
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.config import AgentTaskConfig, Config, DatasetTaskConfig, EnvironmentTaskConfig, TaskConfig
from headrace.config.checks import in_section
from headrace.config.file_digests import check_digests
from headrace.config.hub import find_model, model_dir
from headrace.config.memory import longest_sequence
from headrace.config.model_dir import ModelFacts
from headrace.errors import ConfigError, DataError, UserError
from headrace.pipeline.inputs import ReadyTask, check_inputs, named, refuse_given
from headrace.reference import describe, import_function
from headrace.scoring.base import ScoreError
from headrace.scoring.functions import LIST_STYLE
from headrace.scoring.rewards import RewardScorer
from headrace.tasks.chat import ChatFormat
from headrace.tasks.mixture import Mixture
from headrace.types import Prompt

MEASURED = 2000
"""The most prompts whose lengths are measured. They are spread over the whole dataset."""
MEASURED_GYM = 64
"""The same for questions that are generated when they are asked for."""
NOT_FIELDS = {"completion", "prompt", "messages", "data", *LIST_STYLE}
"""The arguments of a reward function that do not come from the fields of a prompt."""
RESET_SECONDS = 30.0


@dataclass
class Tried:
    """What the trial found."""

    train_prompts: int
    heldout_prompts: int
    prompt: str = ""
    """The first prompt as the policy sees it; empty for agents, who write their messages themselves."""
    prompt_tokens: int = 0
    notes: list[str] = field(default_factory=list)
    tasks: "dict[str, Tried]" = field(default_factory=dict)
    """What was found for each task, by name, if there are several."""


def try_inputs(config: Config, facts: ModelFacts) -> Tried:
    """Check all input of a run, and try each task on its first prompt. Raises `UserError` with one line."""
    check_models(config)
    for section, task in config.tasks.items():
        with in_section(section):
            _import_functions(task)
    ready, chat = check_inputs(config)
    if not len(ready.task.train):
        raise DataError("the task has no training prompts")
    return asyncio.run(_try(config, facts, ready, chat))


def _import_functions(task: TaskConfig) -> None:
    if isinstance(task, DatasetTaskConfig):
        for reference in task.named_rewards.values():
            refuse_given("[task] reward", reference)
            with named("[task] reward"):
                import_function(reference)
    if isinstance(task, AgentTaskConfig) and task.agent is not None:
        with named("[task] agent"):
            import_function(task.agent)


def check_models(config: Config) -> None:
    """Raise `ModelError` if a file that the run loads weights from has changed since Headrace wrote it."""
    check_digests(model_dir(config.model), "[model] path")
    for key, teacher in config.trainer_teachers.items():
        check_digests(find_model(teacher.path, teacher.revision, key=key), key)
    for name, section in config.teachers.items():
        if section.model:
            key = f"[scorers.{name}] model"
            check_digests(find_model(section.model, section.revision, key=key), key)


async def _try(config: Config, facts: ModelFacts, ready: ReadyTask, chat: ChatFormat) -> Tried:
    task, trials = ready.task, dict[str, Trial]()
    parts = task.prompts if isinstance(task, Mixture) else {"": task.train}
    for (section, given), (name, prompts) in zip(config.tasks.items(), parts.items(), strict=True):
        heldout = sum(prompt.task == name for prompt in task.heldout) if name else len(task.heldout)
        trials[name] = Trial(section, given, prompts, Tried(len(prompts), heldout))
    try:
        for trial in trials.values():
            with in_section(trial.section):
                await _try_prompts(config, facts, ready, chat, trial)
        await ready.scoring.start()
        for trial in trials.values():
            with in_section(trial.section):
                await _judge(config, ready, chat, trial.prompts[0])
    finally:
        notes: list[str] = []
        await ready.close(notes.append)
    found = {name: trial.tried for name, trial in trials.items()}
    if not isinstance(task, Mixture):
        found[""].notes.extend(notes)
        return found[""]
    notes += [note.replace("[task]", f"[{trial.section}]") for trial in trials.values() for note in trial.tried.notes]
    return Tried(len(task.train), len(task.heldout), notes=notes, tasks=found)


@dataclass(frozen=True)
class Trial:
    """The trial of one task."""

    section: str
    task: TaskConfig
    prompts: Sequence[Prompt]
    tried: Tried


async def _try_prompts(config: Config, facts: ModelFacts, ready: ReadyTask, chat: ChatFormat, trial: Trial) -> None:
    """Open the first prompt of a task, and compare the lengths and fields of its prompts with what is needed."""
    task, prompts, tried = trial.task, trial.prompts, trial.tried
    if not isinstance(task, AgentTaskConfig):
        opening = await _opening(ready, prompts[0])
        tried.prompt, tried.prompt_tokens = _rendered(chat, prompts[0], opening)
        _check_lengths(config, facts, trial, chat)
    if isinstance(task, DatasetTaskConfig):
        for reference in task.named_rewards.values():
            _check_fields(reference, task.path, prompts, tried)


async def _opening(ready: ReadyTask, prompt: Prompt) -> Sequence[dict[str, str]]:
    """Return the messages with which an episode of this prompt opens. An environment is the user's code."""
    environment = ready.task.episode(prompt)
    try:
        async with asyncio.timeout(RESET_SECONDS):
            return await environment.reset()
    except TimeoutError as error:
        raise ConfigError(f"[task] factory: reset() of the environment took more than {RESET_SECONDS:g} s") from error
    except UserError:
        raise
    except Exception as error:
        raise ConfigError(f"[task] factory: reset() of the environment raised {describe(error)}") from error
    finally:
        await environment.close()


def _rendered(chat: ChatFormat, prompt: Prompt, messages: Sequence[dict[str, str]]) -> tuple[str, int]:
    if not messages and prompt.text is None:
        raise ConfigError("[task] factory: the environment opens without a message, and the prompt has no text")
    tokens = chat.open(messages) if messages else chat.open_text(prompt.text or "")
    return chat.decode(tokens, skip_special=False), len(tokens)


def _check_lengths(config: Config, facts: ModelFacts, trial: Trial, chat: ChatFormat) -> None:
    """Raise `DataError` if no prompt leaves room for an answer; note it if some do not."""
    prompts, tried = trial.prompts, trial.tried
    longest = longest_sequence(config.engine.max_length, facts.max_positions)
    lengths = [tried.prompt_tokens]
    if not isinstance(trial.task, EnvironmentTaskConfig):
        most = MEASURED if isinstance(trial.task, DatasetTaskConfig) else MEASURED_GYM
        some = prompts if len(prompts) <= most else [prompts[i * len(prompts) // most] for i in range(most)]
        lengths = [_rendered(chat, prompt, prompt.messages or [])[1] for prompt in some]
    where = f"the longest sequence of {longest} tokens ([engine] max_length)"
    if min(lengths) >= longest:
        raise DataError(f"[task]: no prompt leaves room for an answer under {where}; the shortest has {min(lengths)}")
    if over := sum(length >= longest for length in lengths):
        tried.notes.append(
            f"[task]: {over} of {len(lengths)} prompts leave no room for an answer under {where}; they are left out"
        )
    room = longest - max(length for length in lengths if length < longest)
    if room < config.rollouts.max_tokens:
        tried.notes.append(
            f"[rollouts] max_tokens: beside the longest prompt, {room} tokens are left for an answer under {where}"
        )


def _check_fields(reward: str, path: str, prompts: Sequence[Prompt], tried: Tried) -> None:
    """Compare the parameters of a reward function with the fields of the data."""
    for name, parameter in inspect.signature(import_function(reward)).parameters.items():
        plain = parameter.kind not in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        if not plain or name in NOT_FIELDS or parameter.default is not inspect.Parameter.empty:
            continue
        without = sum(name not in prompt.data for prompt in prompts)
        if without == len(prompts):
            has = ", ".join(sorted({key for prompt in prompts[:100] for key in prompt.data})) or "no other fields"
            raise ConfigError(f"[task] reward: {reward} wants {name!r}, and no line of {path} has it (there are {has})")
        if without:
            tried.notes.append(
                f"[task] reward: {reward} wants {name!r}, and {without} of {len(prompts)} prompts do not have it: "
                "their rollouts fail (give the parameter a default)"
            )


async def _judge(config: Config, ready: ReadyTask, chat: ChatFormat, prompt: Prompt) -> None:
    """Let every reward function judge one answer to this prompt."""
    answer = ready.task.demonstration(prompt)
    # Even an answer without a word has a token, its end.
    tokens = chat.encode(answer).tolist() if answer else list(chat.stop_token_ids[:1])
    for name in ready.scoring.judges(prompt):
        scorer = ready.scoring.scorers[name]
        if not isinstance(scorer, RewardScorer):
            continue
        try:
            await scorer.judge(prompt, answer or "", tokens)
        except ScoreError as error:
            key = f"[scorers.{name}] scorer" if name in config.scorers else "[task] reward"
            what = "the demonstration of" if answer else "an empty answer to"
            raise ConfigError(f"{key}: tried with {what} the first prompt, {error}") from error
