"""Processes of tests, forked from one that has loaded what takes seconds to import.

A process of pytest has one such server with one list of modules: whoever forks from the server takes it from here.
"""

from __future__ import annotations

import multiprocessing

PROCESSES = multiprocessing.get_context("forkserver")
# Only what is installed: the server does not see the directories of tests.
_MODELS = [f"transformers.models.{name}.modeling_{name}" for name in ("llama", "mixtral", "qwen3")]
_TRANSPORTS = [f"headrace.delivery.transports.{name}" for name in ("file", "nccl", "shm", "tcp")]
PROCESSES.set_forkserver_preload(
    [*_MODELS, *_TRANSPORTS, "transformers.integrations.moe", "headrace.training.serving", "headrace.delivery.receiver"]
)
