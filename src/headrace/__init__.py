"""Headrace: asynchronous, disaggregated RL post-training of language models.

Everything named in `__all__` is public; what needs torch is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.algorithms.assemble import assemble
    from headrace.api import Run, train
    from headrace.buffer.window import Window
    from headrace.config import Config, load_config, make_config
    from headrace.delivery.base import Manifest, Proof
    from headrace.delivery.publisher import Publisher
    from headrace.delivery.transports.shm import ShmSender
    from headrace.engines.base import Delta, Engine, Request, Sampling
    from headrace.engines.embedded.engine import EmbeddedEngine
    from headrace.engines.fake import FakeEngine
    from headrace.errors import HeadraceError, UserError
    from headrace.models.loading import load_model
    from headrace.scoring.base import Judgement
    from headrace.tasks.base import Environment, EnvironmentStep, Task
    from headrace.tasks.chat import ChatFormat
    from headrace.training.trainer import Trainer
    from headrace.types import Batch, Group, Prompt, Rollout, Trace, Version

__version__ = "0.1.0"

_WHERE = {
    "Batch": "types",
    "ChatFormat": "tasks.chat",
    "Config": "config",
    "Delta": "engines.base",
    "EmbeddedEngine": "engines.embedded.engine",
    "Engine": "engines.base",
    "Environment": "tasks.base",
    "EnvironmentStep": "tasks.base",
    "FakeEngine": "engines.fake",
    "Group": "types",
    "HeadraceError": "errors",
    "Judgement": "scoring.base",
    "Manifest": "delivery.base",
    "Prompt": "types",
    "Proof": "delivery.base",
    "Publisher": "delivery.publisher",
    "Request": "engines.base",
    "Rollout": "types",
    "Run": "api",
    "Sampling": "engines.base",
    "ShmSender": "delivery.transports.shm",
    "Task": "tasks.base",
    "Trace": "types",
    "Trainer": "training.trainer",
    "UserError": "errors",
    "Version": "types",
    "Window": "buffer.window",
    "assemble": "algorithms.assemble",
    "load_config": "config",
    "load_model": "models.loading",
    "make_config": "config",
    "train": "api",
}

__all__ = [
    "Batch",
    "ChatFormat",
    "Config",
    "Delta",
    "EmbeddedEngine",
    "Engine",
    "Environment",
    "EnvironmentStep",
    "FakeEngine",
    "Group",
    "HeadraceError",
    "Judgement",
    "Manifest",
    "Prompt",
    "Proof",
    "Publisher",
    "Request",
    "Rollout",
    "Run",
    "Sampling",
    "ShmSender",
    "Task",
    "Trace",
    "Trainer",
    "UserError",
    "Version",
    "Window",
    "assemble",
    "load_config",
    "load_model",
    "make_config",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'headrace' has no attribute {name!r}")
    return getattr(importlib.import_module(f"headrace.{_WHERE[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
