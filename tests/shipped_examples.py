"""Every shipped TOML but two, trained for two versions, as a user would start it. Run by `make examples`.

The quickstart's is trained by the integration tests, vLLM's by `make test-vllm`, whole. The real model that the others
use is fetched first, and the reward model of the steps is made, with hardly any training.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from shared_fork_server import shared_fork_server

ROOT = Path(__file__).parents[1]
ELSEWHERE = ("quickstart", "vllm")
SMALL = {
    "run.versions": 2,
    "buffer.groups": 2,
    "rollouts.group_size": 2,
    "rollouts.max_tokens": 8,
    "evaluate.prompts": 2,
    "observe.display": "plain",
}


def main() -> int:
    """Train each; the closing line counts."""
    tomls = sorted(path for path in (ROOT / "examples").rglob("*.toml") if path.parent.name not in ELSEWHERE)
    subprocess.run([sys.executable, "examples/smollm2/fetch.py"], cwd=ROOT, check=True)
    with tempfile.TemporaryDirectory() as directory, shared_fork_server(Path(directory)):
        reward_model = f"{directory}/reward_model"
        make = [sys.executable, "examples/steps/make_reward_model.py", "--steps", "5", "--out", reward_model]
        subprocess.run(make, cwd=ROOT, check=True)
        own = {"steps": {"scorers.steps.model": reward_model}}
        passed = sum(trains(path.relative_to(ROOT), own.get(path.parent.name, {})) for path in tomls)
    sys.stdout.write(f"{passed} passed, {len(tomls) - passed} failed\n")
    return 0 if passed == len(tomls) else 1


def trains(toml: Path, own: dict[str, str]) -> bool:
    """Whether two versions of it, with settings of its own, are trained, delivered and accounted for."""
    with tempfile.TemporaryDirectory() as directory:
        settings = [f"{key}={value}" for key, value in {**SMALL, **own}.items()] + [f"run.directory={directory}"]
        command = [sys.executable, "-m", "headrace", "train", str(toml), "--json"]
        command += [part for setting in settings for part in ("--set", setting)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
        if done.returncode != 0:
            sys.stdout.write(f"FAILED {toml}: exit code {done.returncode}\n{done.stderr}\n")
            return False
        summary = json.loads(done.stdout)
    ledger = summary["ledger"]
    good = (
        summary["outcome"] == "finished"
        and ledger["trained"] == 4
        and ledger["admitted"] == ledger["trained"] + ledger["dropped"] + ledger["failed"]
        and summary["deliveries_proved"] == 3
    )
    sys.stdout.write(f"{'ok' if good else 'FAILED'} {toml}: {ledger}, {summary['tokens_trained']} tokens trained\n")
    return good


if __name__ == "__main__":
    sys.exit(main())
