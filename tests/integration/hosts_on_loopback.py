"""A launcher for tests: hosts that are loopback addresses of this machine, each with a temporary directory of its own.

`HEADRACE_TEST_HOSTS` says how many there are.
"""

import os
import tempfile
from pathlib import Path

from headrace.cluster.launchers.base import WorkerSpec
from headrace.cluster.launchers.local import LocalLauncher
from headrace.cluster.placement import Host

COUNT = "HEADRACE_TEST_HOSTS"


class LoopbackHosts(LocalLauncher):
    """Starts workers on `host1` (the controller's, 127.0.0.1), `host2` (127.0.0.2), ..."""

    async def hosts(self) -> list[Host]:
        return [Host(f"host{n}", (), 1, f"127.0.0.{n}") for n in range(1, int(os.environ[COUNT]) + 1)]

    async def start(self, spec: WorkerSpec) -> str:
        own = Path(tempfile.gettempdir()) / spec.host
        own.mkdir(exist_ok=True)
        spec.environment["TMPDIR"] = str(own)
        return await super().start(spec)
