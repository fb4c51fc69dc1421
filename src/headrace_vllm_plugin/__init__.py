"""The part of Headrace that runs inside a vLLM server.

It loads new weights with proof, makes sampling noise a function of (seed, position), and protects every HTTP path with
the run's key. vLLM loads this package (through a `vllm.general_plugins` entry point, or `--worker-extension-cls`) in
vLLM's own environment. The package imports only the weight delivery of Headrace, so it needs nothing there but torch,
numpy, msgspec and pyzmq.
"""

import ctypes
import os
import signal
import sys

ORPHANS = "HEADRACE_NO_ORPHANS"
"""An environment variable of a server that a run started: each of the server's processes is killed when the process
that started it ends."""
_PR_SET_PDEATHSIG = 1


def register() -> None:
    """Register the weight-transfer engine with vLLM; called in each of vLLM's processes. Idempotent."""
    if os.environ.get(ORPHANS) and sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from headrace_vllm_plugin.wire import BACKEND

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "headrace_vllm_plugin.transfer", "HeadraceTransfer")
