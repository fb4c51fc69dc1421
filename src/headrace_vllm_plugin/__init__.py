"""Headrace inside a vLLM server: weights come in proved, noise follows (seed, position), every path asks for the key.

It is loaded by vLLM (a `vllm.general_plugins` entry point, or `--worker-extension-cls`) in an environment of vLLM's
own, and imports of Headrace only what carries weights: torch, numpy, msgspec and pyzmq are all that it needs there.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

ORPHANS = "HEADRACE_NO_ORPHANS"
"""Set in the environment of a server that a run started: each of its processes dies with the one that started it."""
_PR_SET_PDEATHSIG = 1


def register() -> None:
    """Make the weight-transfer engine known to vLLM, in whichever of its processes this runs. Idempotent."""
    if os.environ.get(ORPHANS) and sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from headrace_vllm_plugin.wire import BACKEND

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "headrace_vllm_plugin.transfer", "HeadraceTransfer")
