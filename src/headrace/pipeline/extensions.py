"""The user's own parts that a configuration names, checked before any process starts: a mistake is one line.

What the controller uses is imported here: an advantage, a launcher, trackers. What only workers use may need torch: the
files of a loss and of a transport are read and not run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

from headrace.config import Config
from headrace.config.algorithm import check_references
from headrace.config.declared import loss_facts, transport_facts
from headrace.config.load import check_transport
from headrace.config.names import is_reference
from headrace.errors import ConfigError
from headrace.observe.trackers.feed import Trackers
from headrace.reference import import_function


def check_extensions(config: Config) -> None:
    """Raise `ConfigError` for a reference that leads nowhere, or to what does not go together with the rest."""
    if is_reference(config.algorithm.loss):
        with _named("[algorithm] loss"):
            loss_facts(config.algorithm.loss)
    if is_reference(config.algorithm.advantage):
        with _named("[algorithm] advantage"):
            import_function(config.algorithm.advantage)
    if is_reference(config.delivery.transport):
        with _named("[delivery] transport"):
            transport_facts(config.delivery.transport)
        check_transport(config)
    if is_reference(config.pipeline.launcher):
        with _named("[pipeline] launcher"):
            import_function(config.pipeline.launcher)
    for tracker in config.observe.trackers:
        with _named("[observe] trackers"):
            import_function(tracker)
    check_references(config.algorithm, config.rollouts)


def make_trackers(config: Config, note: Callable[[str], None]) -> Trackers | None:
    """The trackers of `[observe] trackers`, started; `note` is told of one that fails."""
    if not config.observe.trackers:
        return None
    return Trackers(config.observe.trackers, config.run.name, msgspec.to_builtins(config), note)


@contextmanager
def _named(key: str) -> Iterator[None]:
    """What is raised inside begins with the key that is wrong."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error
