"""Recovery: this file describes and handles the death of every kind of process.

    an engine      Its requests end as aborted, and their episodes continue from their prefix on another engine.
                   Supervision restarts it. It rejoins without weights, and serves again once it has proved the newest
                   version.
    the trainer    Steps wait. Supervision restarts it from its newest checkpoint. The steps after the checkpoint are
                   trained again from the journal; nothing is generated for them. The weights are published under the
                   next free id, for two reasons: the bytes of the old id were lost with the old process, and only on
                   some devices are the new weights equal to the last bit. Then steps continue.
    a rank of      The run ends with one line, because the ranks of a trainer depend on each other. It is resumed as a
    several        whole.
    the            `headrace resume`: the groups of the previous process take their slots again. Complete groups are
    controller     judged from the journal; the others continue from their saved tokens. Steps after the checkpoint are
                   trained again from the journal, as above.
    a reward       Its pool starts another one, which judges the same answer once more. If that worker dies too, the
    worker         rollout fails, with this as the reason (`scoring.rewards`).
    an agent       Its pool starts another one. Its rollout fails, with this as the reason (`gateway.agents`).
    the gateway    The sessions in which agents work fail, with this as the reason; such failures do not count towards
                   the limit of failed groups, and held-out prompts are asked again. Its requests are withdrawn from
                   the engines. Supervision restarts it. It listens at the same address, and sessions that waited for
                   an agent are offered again.
    a scorer's     What it held fails or is asked again, as its scorer says. Supervision restarts it, and rollouts that
    model          end meanwhile wait for it (`scoring.model_process`).
    a vLLM         Its engine worker ends, and is restarted with a new server. A server that was given by URL is
    server         waited for (`engines.vllm.server`).

Supervision (`cluster.supervision`) notices deaths, restarts processes, and puts `Died` and `Returned` on the queue. The
controller calls the methods here for them. A process that dies too often in a row ends the run.
"""

import asyncio
from collections.abc import Iterator
from contextlib import suppress

import msgspec

from headrace.buffer.recovery import UnfinishedGroup
from headrace.errors import HeadraceError, PeerDied
from headrace.gateway.base import GatewayHandle
from headrace.pipeline.attempts import Attempts
from headrace.pipeline.batches import recorded_batches, warm_start_batches
from headrace.pipeline.episodes import Episodes
from headrace.pipeline.parts import Parts
from headrace.pipeline.steps import Steps
from headrace.pipeline.versions import Versions
from headrace.pipeline.waits import EngineWatch
from headrace.rollouts.base import AnyEpisode
from headrace.scoring.base import ScorerProcess
from headrace.training.base import Checkpoint
from headrace.types import Batch, Group, Prompt


class Recovery:
    """The recovery of a run after the death of an engine, the trainer, the gateway, or a previous controller."""

    def __init__(self, parts: Parts, versions: Versions, steps: Steps, watch: EngineWatch) -> None:
        self._parts = parts
        self._versions = versions
        self._steps = steps
        self._watch = watch
        self._again: list[str] = []
        """The ids of the prompts that begin again, because their groups can no longer be trained."""
        self.unfinished = self._restore_groups()
        """The groups that a previous process had in flight, oldest first. The window holds them already."""

    # ---- an engine

    def engine_died(self, death: PeerDied) -> None:
        """Mark an engine as lost: other engines resume its requests, and it gets no new ones before it is back."""
        name = death.peer
        # The pool must know first: it then treats the requests that fail now as lost, to be resumed elsewhere.
        self._parts.pool.lose(name, death.reason)
        if name in self._parts.remote:
            self._parts.remote[name].lost(str(death))
        self._parts.recorder.restarted(name, death.reason)
        self._watch.forget(name)

    def engine_returned(self, name: str) -> None:
        """Take a restarted engine back. It gets requests again once it has proved the newest version."""
        if name in self._parts.remote:
            self._parts.remote[name].back()
        self._parts.pool.take_back(name)
        self._parts.processes.rejoined(name)
        self._parts.waits.moved()

    # ---- the gateway

    def gateway_died(self, gateway: GatewayHandle, death: PeerDied) -> None:
        """Fail the sessions of the gateway. New sessions wait until it is back."""
        gateway.lost(death.reason)
        self._parts.recorder.restarted(gateway.name, death.reason, tokens=0)

    async def gateway_returned(self, gateway: GatewayHandle) -> None:
        """Make the restarted gateway listen at its old address."""
        with suppress(PeerDied):  # It will be restarted once more.
            await gateway.back()
            self._parts.processes.rejoined(gateway.name)
            self._parts.waits.moved()

    # ---- the models of scorers

    def scorer_died(self, process: ScorerProcess, death: PeerDied) -> None:
        """Fail what the model held. Rollouts that end later wait until it is back, as long as their scorer allows."""
        process.lost(death.reason)
        self._parts.recorder.restarted(process.name, death.reason, tokens=0)

    def scorer_returned(self, process: ScorerProcess) -> None:
        """Let the restarted model score again."""
        process.back()
        self._parts.processes.rejoined(process.name)
        self._parts.waits.moved()

    # ---- the trainer

    def trainer_died(self) -> None:
        """Make steps wait until the trainer is back. Its published versions can be fetched while their bytes last."""
        self._steps.away()
        self._versions.orphan()

    async def trainer_returned(self, checkpoint: Checkpoint) -> None:
        """Train the restarted trainer from its checkpoint up to the last step that it had reported."""
        after = checkpoint.step if checkpoint.found else -self._parts.config.warm_start.steps
        # Void now, not only when the weights are republished: nothing can send the announced versions any more.
        self._versions.void_before(self._versions.announced + 1)
        self._parts.waits.ring()
        try:
            await self._bring_back(after, checkpoint.version)
        except PeerDied as death:
            self._steps.unanswered(death)  # It will be restarted once more.
            return
        self._steps.back()
        self._parts.processes.rejoined(self._parts.trainer.name)
        self._parts.waits.moved()

    async def _bring_back(self, after: int, version: int) -> None:
        parts, until = self._parts, self._steps.trained
        if after > until:
            raise HeadraceError(f"{parts.trainer.name} came back at step {after}, beyond the last one, {until}")
        parts.recorder.restarted(parts.trainer.name, "died", (after, until))
        await asyncio.to_thread(parts.recorder.journal.flush)
        boundary = self._boundary()
        if boundary == after:
            await self._publish_again(boundary, version)
        for batch in self._batches(after, until):
            await parts.trainer.train(batch)
            parts.waits.moved()
            if batch.step == boundary:
                await self._publish_again(boundary, version)

    def _boundary(self) -> int | None:
        """Return the step behind the newest version; None if no version was asked for yet."""
        first = self._parts.first_step
        if not self._versions.asked or self._steps.trained < first:
            return None
        done = self._steps.trained - first
        return first + done - done % self._parts.config.delivery.publish_every

    async def _publish_again(self, boundary: int, parent: int) -> None:
        window, batches = self._parts.window, boundary - self._parts.first_step
        known = self._versions.announced >= window.version_of(batches)
        version = window.republish(batches) if known else window.version_of(batches)
        self._versions.void_before(version)
        self._parts.waits.ring()
        await self._parts.trainer.publish(version, parent)

    def _batches(self, after: int, until: int) -> Iterator[Batch]:
        parts = self._parts
        for batch in warm_start_batches(parts.config, parts.task, parts.chat, parts.window.first_version):
            if after < batch.step <= until:
                yield batch
        if until > max(after, 0):
            yield from recorded_batches(parts.config, parts.recorder.journal.path, max(after, 0), until)

    # ---- the controller: a run is resumed

    async def train_again(self) -> None:
        """Train again, from the journal, the steps after the checkpoint. They are not recorded a second time."""
        parts = self._parts
        if parts.first_step <= parts.checkpoint.step:
            return
        path = parts.recorder.journal.path
        for batch in recorded_batches(parts.config, path, parts.checkpoint.step, parts.first_step):
            if await self._steps.train_known(batch) is None:
                return

    def _restore_groups(self) -> list[UnfinishedGroup]:
        """Give the groups of a previous process their slots back, before anything new begins.

        Every such group either continues, and is returned, or ends here with a reason. Lost tokens are counted.
        """
        before, recorder, checkpoint = self._parts.before, self._parts.recorder, self._parts.checkpoint
        if before.last_version < 0:
            return []
        prompts = set(self._prompts({left.group.prompt.id for left in before.unfinished}))
        known = [left for left in before.unfinished if left.group.prompt.id in prompts]
        refused = self._parts.window.restore([(left.group.id, left.group.version) for left in known], before.overtakers)
        self._again = [left.group.prompt.id for left in known if left.group.id in refused]
        lost, going_on = 0, []
        for left in before.unfinished:
            group = left.group
            recorder.resumed(group, left.members)
            if group.prompt.id in prompts and group.id not in refused:
                going_on.append(left)
                continue
            lost += sum(rollout.trained_tokens for rollout in group.rollouts)
            lost += sum(trace.trained_tokens for traces in left.partial.values() for trace in traces)
            recorder.group_ended(group, "dropped", refused.get(group.id, "its prompt is gone"))
        unfinished = sum(not left.complete for left in going_on)
        if going_on or refused or before.resume_step > checkpoint.step:
            recorder.note(
                f"resumed: {before.resume_step - checkpoint.step} steps are trained again from the journal, "
                f"{len(going_on) - unfinished} groups are ready, {unfinished} go on from their saved tokens"
                + (f", {len(refused)} begin again ({'; '.join(sorted({*refused.values()}))})" if refused else "")
            )
        unseen = before.unseen_tokens if unfinished else 0
        recorder.restarted("controller", "resumed", (checkpoint.step, before.resume_step), lost + unseen)
        return going_on

    def _prompts(self, ids: set[str]) -> dict[str, Prompt]:
        """Return the training prompts with these ids, by id. Others are not kept: there may be millions."""
        return {prompt.id: prompt for prompt in self._parts.task.train if prompt.id in ids} if ids else {}

    def resume_groups(self, attempts: Attempts, episodes: Episodes) -> list[tuple[Group, list[AnyEpisode]]]:
        """Judge the groups that were complete. Return the others, with episodes that use their saved tokens."""
        unfinished = []
        prompts = self._prompts({*self._again, *(left.group.prompt.id for left in self.unfinished)})
        for prompt in self._again:
            attempts.try_again(prompts[prompt])
        for left in self.unfinished:
            group = msgspec.structs.replace(left.group, prompt=prompts[left.group.prompt.id])
            if left.complete:
                attempts.settle(group)
                continue
            members = [int(member.rpartition("/")[2]) for member in left.members]
            resumed = episodes.of_group(group, members, saved=left.partial)
            attempts.started(group, resumed)
            unfinished.append((group, resumed))
        return unfinished
