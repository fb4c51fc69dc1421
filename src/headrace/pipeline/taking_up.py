"""What an earlier life of a run left, before anything new begins: groups take their slots, steps are trained again.

Every group of it goes on, or ends here with a reason; what has to be sampled again is counted.
"""

from __future__ import annotations

from collections.abc import Callable

from headrace.buffer.journal import Journal
from headrace.buffer.recovery import LeftGroup, Recovered
from headrace.buffer.window import Window
from headrace.errors import PeerDied
from headrace.pipeline.batches import recorded_batches
from headrace.pipeline.comeback import Comeback
from headrace.pipeline.parts import Parts
from headrace.pipeline.recording import Recorder
from headrace.tasks.base import Task
from headrace.types import Group, Prompt


def take_up(
    before: Recovered, window: Window, recorder: Recorder, journal: Journal, task: Task, checkpoint_step: int
) -> list[LeftGroup]:
    """The groups that go on; `recorder` and `window` know them afterwards."""
    if before.last_version < 0:
        return []
    prompts = {prompt.id for prompt in task.train} if before.left else set()
    known = [left for left in before.left if left.prompt in prompts]
    refused = set(window.restore([(left.id, left.version) for left in known], before.overtakers))
    lost, going_on = 0, []
    for left in before.left:
        recorder.resumed(Group(id=left.id, prompt=Prompt(id=left.prompt), version=left.version), left.members)
        if left.prompt in prompts and left.id not in refused:
            going_on.append(left)
            continue
        reason = "no slot after a resume" if left.id in refused else "its prompt is gone"
        lost += _sampled(left)
        recorder.group_ended(Group(id=left.id, prompt=Prompt(id=left.prompt), version=left.version), "dropped", reason)
    if going_on or before.reach > checkpoint_step:
        ready = sum(left.complete for left in going_on)
        recorder.note(
            f"resumed: {before.reach - checkpoint_step} steps are trained again from the journal, {ready} groups are "
            f"ready, {len(going_on) - ready} go on from their saved tokens"
        )
    unseen = before.unseen_tokens if len(going_on) > sum(left.complete for left in going_on) else 0
    journal.restarted("controller", "resumed", steps=(checkpoint_step, before.reach), regenerated_tokens=lost + unseen)
    return going_on


async def train_again(parts: Parts, comeback: Comeback, stopping: Callable[[], bool]) -> None:
    """Train what came after the checkpoint once more, from the journal, where it is recorded already."""
    if parts.first_step <= parts.checkpoint_step:
        return
    path, until = parts.recorder.journal_path, parts.first_step
    for recorded in recorded_batches(parts.config, path, parts.checkpoint_step, until):
        if stopping():
            return
        step = recorded.batch.step
        while True:
            await comeback.turn(step)
            try:
                await parts.trainer.train(recorded.batch)
                break
            except PeerDied as death:
                comeback.failed(death)
        comeback.trained(step)
        parts.waits.moved()


def _sampled(left: LeftGroup) -> int:
    whole = sum(rollout.trained_tokens for rollout in left.rollouts)
    return whole + sum(trace.trained_tokens for trace in left.partial.values())
