"""This module checks the user's own parts that the configuration names, before any process starts.

A mistake is one line. Parts that the controller uses (an advantage, a launcher, trackers) are imported here. The files
of a loss, a transport or an engine, which only workers use and which may need torch, are found or read but not run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

from headrace.config import Config
from headrace.config.checks import check_references, check_transport
from headrace.config.declared import loss_facts, transport_facts
from headrace.config.schema import is_reference
from headrace.errors import ConfigError
from headrace.observe.trackers import Trackers
from headrace.reference import find_source, import_function, split_reference


def check_extensions(config: Config) -> None:
    """Raise `ConfigError` for a reference that leads nowhere, or to a part that does not fit the rest."""
    if is_reference(config.algorithm.loss):
        with named("[algorithm] loss"):
            loss_facts(config.algorithm.loss)
    if is_reference(config.algorithm.advantage):
        with named("[algorithm] advantage"):
            import_function(config.algorithm.advantage)
    if is_reference(config.delivery.transport):
        with named("[delivery] transport"):
            transport_facts(config.delivery.transport)
        check_transport(config)
    if is_reference(config.engine.kind):
        with named("[engine] kind"):
            find_source(split_reference(config.engine.kind)[0])
    if is_reference(config.pipeline.launcher):
        with named("[pipeline] launcher"):
            import_function(config.pipeline.launcher)
    for tracker in config.observe.trackers:
        with named("[observe] trackers"):
            import_function(tracker)
    check_references(config.algorithm, config.rollouts)


def make_trackers(config: Config, note: Callable[[str], None]) -> Trackers | None:
    """Start the trackers of `[observe] trackers`. `note` is called with a line about each tracker that fails."""
    if not config.observe.trackers:
        return None
    return Trackers(config.observe.trackers, config.run.name, msgspec.to_builtins(config), note)


@contextmanager
def named(key: str) -> Iterator[None]:
    """Begin the line of every `ConfigError` that is raised inside with the key that is wrong."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error
