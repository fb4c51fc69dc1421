"""The compute threads of a process can be fixed again, as by a second replay in one notebook."""

import subprocess
import sys

SCRIPT = """
import torch
from headrace.cluster.worker_main import fix_threads

for threads in (1, 2):
    fix_threads(threads)
    torch.jit.wait(torch.jit.fork(torch.ones, 3))  # work of several operations side by side
    assert torch.get_num_threads() == threads
"""


def test_threads_are_fixed_again_after_parallel_work() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
