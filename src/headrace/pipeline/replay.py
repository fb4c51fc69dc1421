"""Replay: train a run again from its journal alone, with the recorded batches in their order and without engines.

On a CPU a trainer is a deterministic function of its batches, so every version must get the digest that it was
published with. The replay names the versions that do not.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headrace.buffer.reader import open_readonly
from headrace.config import Config
from headrace.errors import UserError
from headrace.pipeline.batches import recorded_batches, warm_start_batches
from headrace.pipeline.inputs import check_model, make_task
from headrace.run_dir import RunDir


def replay_run(path: str | Path, until: int | None = None) -> dict[str, Any]:
    """Train the steps up to version `until` (all by default). Return which versions came out identical."""
    run_dir, config = RunDir.open(path)
    with open_readonly(run_dir.journal) as reader:
        versions = reader.versions()
        last = reader.last_step()
        if wrong := reader.misscheduled_groups():
            raise UserError(f"{path}: group {wrong[0]} was consumed by another step than its ledger says")
        schedule = reader.scheduled_events()
    if until is not None:
        versions = [version for version in versions if version.id <= until]
        last = min(last, max((version.step for version in versions), default=0))
    if not versions:
        raise UserError(f"{path}: nothing to replay (no version was published)")
    digests = dict(_digests(config, run_dir, last))
    compared = [version for version in versions if version.step in digests]
    other = [version.id for version in compared if version.digest != f"{digests[version.step]:016x}"]
    return {
        "steps": last,
        "versions": len(compared),
        "identical": not other,
        "other": other,
        "last_version": compared[-1].id,
        "digest": compared[-1].digest,
        "replayed_digest": f"{digests[compared[-1].step]:016x}",
        "scheduled_events": schedule,
    }


def _digests(config: Config, run_dir: RunDir, last: int) -> Iterator[tuple[int, int]]:
    """Yield (optimizer steps, digest as published) at every step where a version may have been published."""
    from headrace.cluster.worker_main import fix_threads

    fix_threads(config.training.threads)
    from headrace.delivery.digest import digest_as
    from headrace.training.serving import build_trainer, published_dtype

    trainer, dtype = build_trainer(config, run_dir.checkpoints).trainer, published_dtype(config)
    if config.warm_start.steps:
        chat = check_model(config)
        for batch in warm_start_batches(config, make_task(config), chat, version=0):
            trainer.step(batch)
    yield 0, digest_as(trainer.weights(), dtype)
    for batch in recorded_batches(config, run_dir.journal, 0, last):
        trainer.step(batch)
        if batch.step % config.delivery.publish_every == 0:
            yield batch.step, digest_as(trainer.weights(), dtype)


def describe(found: dict[str, Any]) -> str:
    """Describe the result of a replay for people."""
    lines = [f"{found['steps']} steps trained again, {found['versions']} versions compared"]
    if found["identical"]:
        lines.append(f"identical: version {found['last_version']} has digest {found['digest']} again")
    else:
        others = ", ".join(map(str, found["other"][:5]))
        lines.append(f"NOT identical: {len(found['other'])} versions have other weights, the first ones: {others}")
    return "\n".join(lines)
