"""The start of every worker process: `python -m headrace.pipeline.worker --role R --rank N --address A --run DIR`.

It needs nothing but these four: no inherited descriptor, no environment, no state. It ends when it is told to, when
its parent dies, or when the controller falls silent.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys
from pathlib import Path

from headrace.channel.desk import Desk
from headrace.config import Config, load_config
from headrace.errors import HeadraceError

PR_SET_PDEATHSIG = 1
EXIT_USER_ERROR = 2


def main() -> int:
    """Parse the four arguments and serve."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--role", choices=["engine", "trainer"], required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--address", required=True)
    parser.add_argument("--run", type=Path, required=True)
    arguments = parser.parse_args()
    _die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the controller's to handle; it asks us to stop.
    config = load_config(arguments.run / "config.toml")
    desk = Desk(f"{arguments.role}-{arguments.rank}", arguments.address, arguments.run)
    desk.spoke.start()
    try:
        _serve(arguments.role, desk, config)
    except HeadraceError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_USER_ERROR
    finally:
        desk.spoke.close()
    return 0


def _serve(role: str, desk: Desk, config: Config) -> None:
    threads = config.engine.threads if role == "engine" else config.training.threads
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[variable] = str(threads)
    if role == "engine" and config.engine.kind == "vllm":
        from headrace.engines.vllm.worker import serve as serve_vllm

        return serve_vllm(desk, config)
    import torch

    torch.set_num_threads(threads)
    torch.set_num_interop_threads(1)
    if role == "engine":
        from headrace.engines.worker import serve
    else:
        from headrace.training.worker import serve
    return serve(desk, config)


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
