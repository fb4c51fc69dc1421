"""A small run directory, written by the journal and the checkpoint writer that runs use, with numbers made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from headrace.buffer.journal import Journal
from headrace.config import dump_config, make_config
from headrace.observe.records import DeliveryRecord, StepRecord
from headrace.training.checkpoints.base import TrainerState, begin_checkpoint, finish_checkpoint, partial_path
from headrace.types import Float32Array, Group, Int32Array, Kept, Prompt, Rollout, Trace, Version

MODEL = Path(__file__).parents[3] / "examples" / "quickstart" / "model"
PROMPT = (1, 6, 7, 2)
"""Token ids of the quickstart's vocabulary."""


def trace(sampled: Sequence[tuple[int, float, int]], prompt: Sequence[int] = PROMPT) -> Trace:
    """A prompt, then (token, log-probability, version) each."""
    tokens, logprobs, versions = zip(*sampled, strict=True)
    return Trace.of_context(np.array(prompt, np.int32)).extended(
        np.array(tokens, np.int32), np.array(logprobs, np.float32), np.array(versions, np.int32), trained=True
    )


def digest_of(version: int) -> int:
    return 0xABC0 + version


class ConstantWeights:
    """Weights under which every token has log-probability -1 at temperature 1, and -1 / T at T."""

    loaded: list[str] = []

    def __init__(self, path: Path, dtype: str) -> None:
        assert dtype == "float32"
        ConstantWeights.loaded.append(path.name)
        self.version = int(path.name.removeprefix("step-")) if path.name.startswith("step-") else 0

    @property
    def digest(self) -> int:
        return digest_of(self.version)

    def logprobs(self, token_ids: Int32Array, temperature: Float32Array, kept: Kept | None = None) -> Float32Array:
        assert len(temperature) == len(token_ids) - 1
        return np.asarray(-1.0 / temperature, np.float32)


class RunMaker:
    """Versions, groups of one rollout, checkpoints; `close` before reading."""

    def __init__(self, path: Path, **settings: str) -> None:
        self.path = path
        task = {"kind": "dataset", "path": "none.jsonl", "reward": "none:none"}
        config = make_config(
            {"model": {"path": str(MODEL), "weights": "random"}, "task": task},
            [f"{key.replace('__', '.')}={value}" for key, value in settings.items()],
        )
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.toml").write_text(dump_config(config))
        self.journal = Journal(path / "journal.db")
        self._groups = 0

    def version(self, number: int, *, step: int | None = None, accepted: bool = True, live: int | None = None) -> None:
        digest = digest_of(number)
        step = number if step is None else step
        self.journal.version(Version(id=number, parent=number - 1, step=step, digest=digest))
        self.journal.delivery(
            DeliveryRecord(
                version=number, engine="engine-0", accepted=accepted, reason="" if accepted else "canary",
                staged_digest=f"{digest:016x}", live_digest=f"{digest if live is None else live:016x}",
                canary_error=number * 1e-6, time=number,
            )
        )  # fmt: skip

    def checkpoint(self, version: int) -> Path:
        state = TrainerState(steps_done=version, policy_steps=version, version=version)
        partial = partial_path(self.path / "checkpoints", state)
        begin_checkpoint(partial)
        return finish_checkpoint(partial, state)

    def rollout(self, *traces: Trace, reward: float = 1.0, step: int | None = None, reason: str = "") -> str:
        """A group of one rollout: trained at `step`, dropped for `reason`, or else still in flight."""
        number, self._groups = self._groups, self._groups + 1
        group = Group(id=number, prompt=Prompt(id=f"prompt-{number}", text="x"), version=0)
        rollout = Rollout(id=f"{number}/0", index=0, traces=list(traces), ending="finished", reward=reward)
        self.journal.admitted(group, [rollout.id])
        if traces:
            self.journal.rollout_ended(rollout)
        if step is not None:
            self.journal.group_ended(number, "trained", step=step)
        elif reason:
            self.journal.group_ended(number, "dropped", reason)
        return rollout.id

    def step(self, step: int, version: int) -> None:
        self.journal.step(
            StepRecord(
                step=step, version=version, objective="policy", groups=1, rollouts=1, tokens=1, trained_tokens=1
            ),
            {0: 1},
        )

    def close(self) -> Path:
        self.journal.close()
        return self.path
