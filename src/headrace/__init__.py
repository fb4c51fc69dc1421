"""Headrace: asynchronous, disaggregated RL post-training of language models.

Everything named in `__all__` is public; what needs torch is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.algorithms.assemble import assemble as assemble
    from headrace.api import Run as Run
    from headrace.api import train as train
    from headrace.buffer.window import Window as Window
    from headrace.config import Config as Config
    from headrace.config import load_config as load_config
    from headrace.config import make_config as make_config
    from headrace.delivery.base import Manifest as Manifest
    from headrace.delivery.base import Proof as Proof
    from headrace.delivery.publisher import Publisher as Publisher
    from headrace.delivery.transports.shm import ShmSender as ShmSender
    from headrace.engines.base import Delta as Delta
    from headrace.engines.base import Engine as Engine
    from headrace.engines.base import Request as Request
    from headrace.engines.base import Sampling as Sampling
    from headrace.engines.embedded.engine import EmbeddedEngine as EmbeddedEngine
    from headrace.engines.fake import FakeEngine as FakeEngine
    from headrace.errors import HeadraceError as HeadraceError
    from headrace.errors import UserError as UserError
    from headrace.models.loading import load_model as load_model
    from headrace.scoring.base import Judgement as Judgement
    from headrace.tasks.base import Environment as Environment
    from headrace.tasks.base import EnvironmentStep as EnvironmentStep
    from headrace.tasks.base import Task as Task
    from headrace.tasks.chat import ChatFormat as ChatFormat
    from headrace.training.trainer import Trainer as Trainer
    from headrace.types import Batch as Batch
    from headrace.types import Group as Group
    from headrace.types import Prompt as Prompt
    from headrace.types import Rollout as Rollout
    from headrace.types import Trace as Trace
    from headrace.types import Version as Version

__version__ = "0.1.0"

_WHERE = {
    "algorithms.assemble": ("assemble",),
    "api": ("Run", "train"),
    "buffer.window": ("Window",),
    "config": ("Config", "load_config", "make_config"),
    "delivery.base": ("Manifest", "Proof"),
    "delivery.publisher": ("Publisher",),
    "delivery.transports.shm": ("ShmSender",),
    "engines.base": ("Delta", "Engine", "Request", "Sampling"),
    "engines.embedded.engine": ("EmbeddedEngine",),
    "engines.fake": ("FakeEngine",),
    "errors": ("HeadraceError", "UserError"),
    "models.loading": ("load_model",),
    "scoring.base": ("Judgement",),
    "tasks.base": ("Environment", "EnvironmentStep", "Task"),
    "tasks.chat": ("ChatFormat",),
    "training.trainer": ("Trainer",),
    "types": ("Batch", "Group", "Prompt", "Rollout", "Trace", "Version"),
}
"""Module -> the public names in it."""
_MODULES = {name: module for module, names in _WHERE.items() for name in names}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'headrace' has no attribute {name!r}")
    return getattr(importlib.import_module(f"headrace.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
