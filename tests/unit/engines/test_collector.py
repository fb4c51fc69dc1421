"""The collector of an engine's process: it looks at nothing that was loaded, and rarely at what comes."""

from __future__ import annotations

import subprocess
import sys

LOOKS = """
import gc
from headrace.engines.collector import keep_collector_away

loaded = [[] for _ in range(1000)]
keep_collector_away()
before = sum(generation["collections"] for generation in gc.get_stats())
for _ in range(200):
    turn = [[i] for i in range(10_240)]
    del turn
looks = sum(generation["collections"] for generation in gc.get_stats()) - before
print(looks, any(found is loaded for found in gc.get_objects()))
for _ in range(300_000):
    ring = []
    ring.append(ring)
print(gc.get_stats()[0]["collected"] > 0)
"""


def test_turns_do_not_wake_it_and_cycles_do() -> None:
    done = subprocess.run([sys.executable, "-c", LOOKS], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["0", "False", "True"]
