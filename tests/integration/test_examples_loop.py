"""The loop of `examples/01_loop.py`, as a user starts it: it learns, keeps its lag bound and leaves nothing behind."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "01_loop.py"
VERSIONS = 11
LINE = re.compile(r"version +(\d+)  reward ([\d.]+)  lag mean ([\d.]+) max (\d+)")


def test_the_loop_learns_and_leaves_nothing_behind(tmp_path: Path) -> None:
    # From another directory: the example finds its files by itself.
    process = subprocess.Popen(
        [sys.executable, str(EXAMPLE), str(VERSIONS)],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        output, errors = process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    lines = [LINE.fullmatch(line) for line in output.splitlines()]
    assert all(lines), output
    versions, rewards, lag_means, lags = zip(*(line.groups() for line in lines if line), strict=True)
    assert [int(version) for version in versions] == list(range(1, VERSIONS + 1))

    # Guessing earns about 5 vowels in 64 tokens.
    start, end = float(rewards[0]), sum(map(float, rewards[-3:])) / 3
    assert start < 0.2
    assert end > start + 0.3

    # Asynchronous (generation ran ahead), and never further than depth 1 and 8 groups allow: (2 x 16 - 2) // 8.
    assert max(map(int, lags)) in range(1, 4)
    assert max(map(float, lag_means)) > 0

    left = [path.name for path in Path("/dev/shm").glob(f"headrace-loop-{process.pid}-*")]
    assert left == []


def test_the_loop_uses_the_public_api_only() -> None:
    imports = re.findall(r"^\s*(?:from|import) (headrace[\w.]*)", EXAMPLE.read_text(), re.MULTILINE)
    assert imports == ["headrace"]
