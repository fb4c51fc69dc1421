"""Models and datasets by their names on the Hugging Face hub.

A name is `owner/name` or `owner/name@revision`. `pinned` resolves every name of a configuration once, when a run
starts: the revision becomes a commit, which is saved with the run. After that each host finds or fetches the same
commit itself. Files go to the cache of huggingface_hub. Its variables apply: HF_HOME, HF_HUB_CACHE, HF_HUB_OFFLINE,
HF_ENDPOINT and HF_TOKEN. The token is only ever in the environment: Headrace neither reads nor writes it.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple

import msgspec

from headrace.config.evaluate import EvaluationSetConfig
from headrace.config.schema import AgentTaskConfig, Config, DatasetTaskConfig, MixtureConfig, ModelConfig, TaskConfig
from headrace.config.scorers import JudgeConfig, ModelScorerSection, ScorerConfig
from headrace.errors import ConfigError, DataError, ModelError, UserError, one_line

DATA_FILES = (".jsonl", ".json", ".csv", ".parquet")
"""The ends of the names of data files. A path that ends so is never a name on the hub."""
MODEL_FILES = ("*.json", "*.jinja", "*.txt", "*.model")
"""The files of a model beside its weights."""
WEIGHT_FILES = ("*.safetensors",)
LEFT_OUT = ("*/*", "consolidated*.safetensors")
"""Files that no model directory needs: other formats in subdirectories, and the weights a second time."""
_NAME = re.compile(r"(?P<id>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w./-]+))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")


class HubName(NamedTuple):
    """A repository on the hub, at a revision: a branch, a tag or a commit."""

    id: str
    revision: str = ""
    """Empty for the default branch."""

    def __str__(self) -> str:
        return f"{self.id}@{self.revision}" if self.revision else self.id


def looks_like_name(text: str) -> bool:
    """Return whether a text has the form of a name on the hub."""
    return _NAME.fullmatch(text) is not None and not text.endswith(DATA_FILES)


def parse_name(text: str, revision: str = "") -> HubName | None:
    """Return the name on the hub that a text and `[model] revision` or `[task] revision` give; None for a path."""
    found = _NAME.fullmatch(text)
    if found is None or not looks_like_name(text):
        return None
    if revision and found["revision"] and revision != found["revision"]:
        raise ConfigError(f"{text} and revision = {revision!r} name two revisions; give one of them")
    return HubName(found["id"], revision or found["revision"] or "")


def model_dir(model: ModelConfig) -> Path:
    """Return the directory of the model on this host. Files of a model by name are fetched if they are not here."""
    return find_model(model.path, model.revision, weights=model.weights)


def teacher_dir(config: Config) -> Path | None:
    """Return the directory, on this host, of the teacher that the trainer holds; None if it holds none."""
    for key, name in config.trainer_teachers.items():
        return find_model(name.path, name.revision, key=key)
    return None


def given_model(path: str, key: str, *, weights: str = "load") -> Path:
    """Return the directory of a model that is given on a command line: a directory here, or a name on the hub."""
    return Path(path) if Path(path).exists() else find_model(path, key=key, weights=weights)


def find_model(path: str, revision: str = "", *, weights: str = "load", key: str = "[model] path") -> Path:
    """Return the directory of a model that is given by its path, or by its name on the hub. Raises `ModelError`."""
    name = parse_name(path, revision)
    if name is None:
        if revision:
            raise ConfigError(f"{key}: revision is for names on the hub, and {path} is a directory (leave it out)")
        return Path(path)
    return fetched_model(name, weights, key)


@cache
def fetched_model(name: HubName, weights: str, key: str) -> Path:
    """Return the directory of a model on the hub, in the cache of this host."""
    wanted = [*MODEL_FILES, *(WEIGHT_FILES if weights == "load" else ())]
    return _snapshot(name, "model", wanted, list(LEFT_OUT), key)


@cache
def fetched_dataset(name: HubName, key: str) -> Path:
    """Return the directory of a dataset on the hub, in the cache of this host."""
    return _snapshot(name, "dataset", None, None, key)


class Pinned(NamedTuple):
    """A configuration whose names on the hub are pinned to commits."""

    config: Config
    names: dict[str, str]
    """The key of each name -> the name, the revision that was asked for, and the commit that it was."""


def pinned(config: Config) -> Pinned:
    """Fetch the models and datasets that a configuration names, and put commits in the place of their revisions.

    The text of a chat template takes the place of its path, because other hosts need not have the file.
    """
    model, algorithm, task, names = config.model, config.algorithm, config.task, dict[str, str]()

    def commit(name: HubName, found: Path, key: str) -> str:
        names[key] = f"{name.id}, revision {name.revision or 'main'}, commit {found.name}"
        return found.name

    if (name := parse_name(model.path, model.revision)) is not None:
        found = find_model(model.path, model.revision, weights=model.weights)
        model = msgspec.structs.replace(model, path=name.id, revision=commit(name, found, "[model] path"))
    else:
        model_dir(model)
    if model.chat_template is not None:
        template = template_text(model.chat_template, "[model] chat_template")
        model = msgspec.structs.replace(model, chat_template=template)
    if algorithm.teacher is not None and (name := parse_name(algorithm.teacher)) is not None:
        key = "[algorithm] teacher"
        found = find_model(algorithm.teacher, key=key)
        teacher = HubName(name.id, commit(name, found, key))
        algorithm = msgspec.structs.replace(algorithm, teacher=str(teacher))

    def pinned_task(section: str, task: TaskConfig) -> TaskConfig:
        if not isinstance(task, DatasetTaskConfig | AgentTaskConfig):
            return task
        if (name := parse_name(task.path, task.revision)) is not None:
            key = f"[{section}] path"
            found = fetched_dataset(name, key)
            task = msgspec.structs.replace(task, path=name.id, revision=commit(name, found, key))
        elif task.revision:
            why = f"is for names on the hub, and {task.path} is a file (leave it out)"
            raise ConfigError(f"[{section}] revision: {why}")
        if task.heldout_path and (name := parse_name(task.heldout_path)) is not None:
            key = f"[{section}] heldout_path"
            heldout = HubName(name.id, commit(name, fetched_dataset(name, key), key))
            task = msgspec.structs.replace(task, heldout_path=str(heldout))
        return task

    if isinstance(task, MixtureConfig):
        task = MixtureConfig(tasks={name: pinned_task(f"tasks.{name}", each) for name, each in task.tasks.items()})
    else:
        task = pinned_task("task", task)

    def pinned_scorer(section: str, scorer: ScorerConfig) -> ScorerConfig:
        if isinstance(scorer, ModelScorerSection) and (name := parse_name(scorer.model, scorer.revision)) is not None:
            key = f"[{section}] model"
            found = find_model(scorer.model, scorer.revision, key=key)
            scorer = msgspec.structs.replace(scorer, model=name.id, revision=commit(name, found, key))
        if isinstance(scorer, JudgeConfig):
            text = template_text(scorer.template, f"[{section}] template")
            scorer = msgspec.structs.replace(scorer, template=text)
        return scorer

    def pinned_set(section: str, given: EvaluationSetConfig) -> EvaluationSetConfig:
        if (name := parse_name(given.path, given.revision)) is None:
            return given
        found = fetched_dataset(name, f"[{section}] path")
        revision = commit(name, found, f"[{section}] path")
        return msgspec.structs.replace(given, path=name.id, revision=revision)

    sets = {name: pinned_set(f"evaluate.sets.{name}", each) for name, each in config.evaluate.sets.items()}
    scorers = {name: pinned_scorer(f"scorers.{name}", scorer) for name, scorer in config.scorers.items()}
    evaluate = msgspec.structs.replace(config.evaluate, sets=sets)
    made = msgspec.structs.replace(
        config, model=model, algorithm=algorithm, task=task, scorers=scorers, evaluate=evaluate
    )
    return Pinned(made, names)


def is_template(text: str) -> bool:
    """Return whether a value is a template itself, and not the path of a file with one."""
    return "{" in text or "\n" in text


def template_text(given: str, key: str) -> str:
    """Return a template that is given as text, or as the path of a file that holds it. Raises `ConfigError`."""
    if is_template(given):
        return given
    try:
        text = Path(given).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"{key}: {given} cannot be read: {why}") from error
    if not is_template(text):
        raise ConfigError(f"{key}: {given} holds no template")
    return text


def _snapshot(name: HubName, kind: str, wanted: list[str] | None, left_out: list[str] | None, key: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    with _one_line(name, kind, key), _quiet("huggingface_hub"):
        return Path(
            snapshot_download(
                name.id,
                repo_type=kind,
                revision=name.revision or None,
                allow_patterns=wanted,
                ignore_patterns=left_out,
                library_name="headrace",
            )
        )


@contextmanager
def _quiet(library: str) -> Iterator[None]:
    """Keep a library from warning. It warns of every retry, and what matters becomes one line."""
    logger = logging.getLogger(library)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextmanager
def _one_line(name: HubName, kind: str, key: str) -> Iterator[None]:
    """Turn what goes wrong with the hub into one line that says what to do."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    # The HTTP library below huggingface_hub is not the same in all its versions.
    http_error: type[Exception] = HfHubHTTPError.__mro__[1]
    error_kind: type[UserError] = ModelError if kind == "model" else DataError
    local = "directory" if kind == "model" else "file"
    where = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    try:
        yield
    except GatedRepoError as error:
        why = f"{where} gives {name.id} only to those who accepted its terms (accept them there, and set HF_TOKEN)"
        raise error_kind(f"{key}: {why}") from error
    except RepositoryNotFoundError as error:
        why = f"there is no {local} {name.id}, and no such {kind} at {where} (if it is private, set HF_TOKEN)"
        raise error_kind(f"{key}: {why}") from error
    except RevisionNotFoundError as error:
        raise error_kind(f"{key}: {name.id} at {where} has no revision {name.revision or 'main'!r}") from error
    except HFValidationError as error:
        raise error_kind(f"{key}: {one_line(str(error), 200)}") from error
    except LocalEntryNotFoundError as error:
        at = f"{name.id}, revision {name.revision or 'main'!r},"
        if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
            why = f"{at} is not whole in the cache, and HF_HUB_OFFLINE is set (fetch it once without)"
        else:
            why = f"there is no {local} {name.id}, and {where} cannot be reached, nor is {at} whole in the cache"
        raise error_kind(f"{key}: {why}") from error
    except (http_error, OSError) as error:
        why = f"{name} could not be fetched from {where}: {one_line(_reason(error), 200)}"
        raise error_kind(f"{key}: {why}; run the same command again to go on with the download") from error


def _reason(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
