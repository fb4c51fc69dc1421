"""Python in an engine's process: who else gets the interpreter, and for how long."""

from __future__ import annotations

import subprocess
import sys

LOOKS = """
import gc
from headrace.engines.embedded.setup import give_way_to_decoding

loaded = [[] for _ in range(1000)]
give_way_to_decoding()
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
    done = subprocess.run([sys.executable, "-c", LOOKS], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.split() == ["0", "False", "True"]


TURNS = """
import sys
from headrace.engines.embedded.setup import give_way_to_decoding

usual = sys.getswitchinterval()
give_way_to_decoding()
print(usual / sys.getswitchinterval())
"""


def test_other_threads_keep_the_interpreter_for_a_tenth_of_the_usual_time() -> None:
    done = subprocess.run([sys.executable, "-c", TURNS], capture_output=True, text=True, timeout=300, check=True)
    assert float(done.stdout) >= 10
