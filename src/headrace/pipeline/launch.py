"""This module starts a new run or resumes one. The command line and the Python API both call it.

Before any process of the run starts, the input is checked, the run directory is locked, and a resume has taken over
from the journal what it needs. A `RunSession` then runs to its summary under the lock.
"""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from headrace.buffer.journal import Journal
from headrace.buffer.reader import open_readonly
from headrace.buffer.store import check_resumable, lock_run
from headrace.cluster.inventory import place_run
from headrace.cluster.launchers.local import hosts_of
from headrace.config import Config, dump_config, with_settings
from headrace.config.hub import pinned
from headrace.config.schema import PROCESSES
from headrace.errors import DiskError, RunFinished, UserError
from headrace.observe.metrics import reported_step
from headrace.observe.progress import Progress
from headrace.observe.records import ENGINES, STRETCHES
from headrace.observe.spans import timeline_damage
from headrace.pipeline.inputs import NOTHING, Given, check_inputs
from headrace.pipeline.run_session import RunSession
from headrace.pipeline.trial import check_models
from headrace.run_dir import RunDir, set_aside, with_name
from headrace.training.checkpoints.remote_store import check_store

ENGINE_KEYS = re.compile(r"\bengine\.(count|gpus|urls)\b")
"""The settings of a resume that say which engines there are, whatever the run was scaled to."""
Execute = Callable[[RunSession], RunSession]
"""Executes a session to its end, and returns it."""


def start_run(
    config: Config,
    progress: Progress,
    given: Given = NOTHING,
    *,
    files: Mapping[str, str] = {},
    execute: Execute = RunSession.execute,
    overwrite: bool = False,
) -> RunSession:
    """Start a new run. A user's mistake that shows before the first version is served leaves no run directory behind.

    Nor does Ctrl-C while the processes of the run start. `given` replaces what the configuration names. `files` are
    written into the run directory, each under its name. `execute` executes the session. With `overwrite`, a run of the
    same name is removed once the input of the new one is found to be right.
    """
    config, names = pinned(with_name(config))
    for key, name in names.items():
        progress.note(f"{key}: {name}")
    config, _ = place_run(config, hosts_of(config))
    check_store(config, new=True)
    with contextlib.ExitStack() as replacing:
        run_dir = RunDir.of(config)
        remove_old: Callable[[], None] = lambda: None  # noqa: E731
        if overwrite and run_dir.path.exists():
            with lock_run(run_dir.journal):
                remove_old = replacing.enter_context(run_dir.set_aside())
        run_dir = RunDir.create(config)
        session = None
        try:
            for name, text in files.items():
                (run_dir.path / name).write_text(text)
            task, chat = check_inputs(config, given)
            check_models(config)
            remove_old()
            # The lock is held from here on: a resume of a run that is only starting is refused.
            with lock_run(run_dir.journal) as lock, run_dir.report_full_disk():
                make_journal = partial(Journal, lock=lock)
                session = RunSession(config, run_dir, progress, task, chat, journal=make_journal, hub_names=names)
                return execute(session)
        except (UserError, KeyboardInterrupt) as error:
            resumable = isinstance(error, DiskError) or (session is not None and session.began)
            if isinstance(error, KeyboardInterrupt):
                resumable = session is not None and session.started
            if not (resumable and run_dir.journal.is_file()):
                shutil.rmtree(run_dir.path, ignore_errors=True)
            raise


def resume_run(
    path: str | Path,
    progress: Progress,
    settings: Iterable[str],
    given: Given = NOTHING,
    *,
    execute: Execute = RunSession.execute,
) -> RunSession:
    """Continue a run from its newest checkpoint, or begin it if it ended before it began.

    `settings` change its configuration; the changes are shown. The changed configuration is kept once every process has
    started with it. `given` and `execute` are those of `start_run`.
    """
    run_dir, before = RunDir.open(path)
    settings = list(settings)
    config = pinned(with_settings(before, settings)).config
    config, _ = place_run(config, hosts_of(config))
    check_store(config, new=not run_dir.journal.is_file())
    if not run_dir.journal.is_file():
        with lock_run(run_dir.journal) as lock:
            return _begin_again(run_dir, config, progress, given, execute, partial(Journal, lock=lock))
    # The lock is held from here on: another resume of the same run is refused before it starts anything.
    with check_resumable(run_dir.journal) as lock:
        as_scaled = not any(ENGINE_KEYS.search(setting.partition("=")[0]) for setting in settings)
        journal = partial(Journal, lock=lock)
        return _resume(run_dir, before, config, progress, given, execute, journal, as_scaled=as_scaled)


def _begin_again(
    run_dir: RunDir,
    config: Config,
    progress: Progress,
    given: Given,
    execute: Execute,
    make_journal: Callable[..., Journal],
) -> RunSession:
    """Begin a run whose processes were ended before the first of them had anything to do."""
    if run_dir.metrics.exists() or any(run_dir.checkpoints.glob("step-*")) or (run_dir.path / "segments").exists():
        raise UserError(f"{run_dir.path}: nothing to resume (it has no journal.db)")
    task, chat = check_inputs(config, given)
    check_models(config)
    progress.note("the run had ended before it began: it begins now")
    with run_dir.report_full_disk(), run_dir.with_trial_config(config):
        return execute(RunSession(config, run_dir, progress, task, chat, journal=make_journal))


def _resume(
    run_dir: RunDir,
    before: Config,
    config: Config,
    progress: Progress,
    given: Given,
    execute: Execute,
    make_journal: Callable[..., Journal],
    *,
    as_scaled: bool,
) -> RunSession:
    """Resume a run that has a journal; if `as_scaled`, with the engines that it was scaled to."""
    _refuse_finished(run_dir, config)
    for line in _set_damage_aside(run_dir, config.policy_name):
        progress.note(line)
    task, chat = check_inputs(config, given)
    with open_readonly(run_dir.journal) as journal:
        meta, last = journal.meta(), journal.training_window()
    stretches = [*meta.get(STRETCHES, []), *([last] if last else [])]
    known = meta.get("tokenizer")
    ranks = _scaled_to(meta.get(ENGINES), config) if as_scaled else None
    if known is None:
        progress.note("the journal has no digest of the run's tokenizer; that of today is recorded")
    elif known != chat.digest:
        progress.note(f"[model] path: tokenizer.json of {config.model.path} has changed since the run began")
    check_models(config)
    old, new = dump_config(before).splitlines(), dump_config(config).splitlines()
    for line in old:
        if line not in new:
            progress.note(f"config was: {line}")
    for line in new:
        if line not in old:
            progress.note(f"config now: {line}")
    with run_dir.report_full_disk(), run_dir.with_trial_config(config):
        session = RunSession(
            config,
            run_dir,
            progress,
            task,
            chat,
            journal=make_journal,
            tokenizer_known=known is not None,
            ranks=ranks,
            stretches=stretches,
        )
        return execute(session)


def _refuse_finished(run_dir: RunDir, config: Config) -> None:
    """Raise `RunFinished` if the run has ended in order with all its versions."""
    with open_readonly(run_dir.journal) as journal:
        steps, outcome = journal.last_step(config.policy_name), journal.meta().get("outcome")
    versions = steps // config.delivery.publish_every
    if outcome == "finished" and versions >= config.run.versions:
        raise RunFinished(
            f"{run_dir.path} is finished, with {versions} versions; train more of them with "
            f"`headrace resume {run_dir.path} --set run.versions={2 * versions}`"
        )


def _set_damage_aside(run_dir: RunDir, policy: str) -> Iterator[str]:
    """Set aside what is damaged and not needed to train. Yield a line about each file, and about lost commits."""
    for path in (run_dir.metrics, run_dir.timeline, run_dir.status, run_dir.summary, run_dir.report):
        problem = f"{path} is not a file" if path.exists() and not path.is_file() else ""
        if path == run_dir.timeline:
            problem = problem or timeline_damage(path)
        if problem:
            yield f"{problem}; it is kept as {set_aside(path).name}, and a new one begins"
    with open_readonly(run_dir.journal) as journal:
        last = journal.last_step(policy)
    if (reported := reported_step(run_dir.metrics)) > last:
        log = run_dir.journal.with_name(f"{run_dir.journal.name}-wal")
        kept = ""
        if log.is_file() and log.stat().st_size:
            shutil.copyfile(log, log.with_name(f"damaged-{log.name}"))
            kept = f" A copy of it is kept as damaged-{log.name}."
        yield (
            f"{run_dir.journal} ends with step {last}, but step {reported} was reported: its last commits are lost, "
            f"because {log.name} is missing or damaged.{kept} The run goes on from what is left"
        )


def _scaled_to(found: Any, config: Config) -> list[int] | None:
    """Return the ranks of the engines that a run was scaled to; None if the journal does not have them."""
    limit = len(config.engine.urls) or PROCESSES
    if not isinstance(found, list) or not all(isinstance(rank, int) and 0 <= rank < limit for rank in found):
        return None
    return sorted(set(found)) or None
