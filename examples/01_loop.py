"""The whole asynchronous loop in one file, on the public API.

    prompts ─▶ GROUP ─▶ engine (a thread) ─▶ reward ─▶ window ─▶ TRAIN ─▶ trainer (a thread)
                 ▲                                                           │
                 └── slots freed ◀── DELIVER: prove and swap ◀── shared memory ◀── publish

A small Llama with random weights learns to answer every letter with vowels. Generation never stops for training, nor
training for generation: while one version is trained, answers for the next are under way, some of them under weights
that change half-way. Each token carries the version and the log-probability that it was sampled with.

    python examples/01_loop.py [VERSIONS]

`headrace train` runs the same parts, with engines and trainer in processes of their own.
"""

from __future__ import annotations

import asyncio
import string
import sys
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import torch

from headrace import (
    Batch,
    ChatFormat,
    Config,
    EmbeddedEngine,
    Group,
    Manifest,
    Prompt,
    Publisher,
    Request,
    Rollout,
    Sampling,
    ShmSender,
    Trace,
    Trainer,
    Window,
    assemble,
    load_config,
    load_model,
)

HERE = Path(__file__).parent
SETTINGS = [
    "engine.slots=64",
    "rollouts.group_size=8",
    "rollouts.max_tokens=12",
    "buffer.groups=8",  # groups in a batch
    "buffer.depth=1",  # how many versions generation may run ahead
    "training.learning_rate=1e-3",
]
DEADLINE = 120.0
"""Seconds. No wait is without one."""


def reward(answer: str, max_tokens: int) -> float:
    """The share of an answer's tokens that are vowels; stopping early earns nothing."""
    return sum(letter in "aeiou" for letter in answer) / max_tokens


class Loop:
    """The state that the three activities share. Everything here runs in one event loop, so it needs no locks."""

    def __init__(self, config: Config, engine: EmbeddedEngine, trainer: Trainer, publisher: Publisher) -> None:
        self.config = config
        self.engine = engine
        self.trainer = trainer
        self.publisher = publisher
        self.chat = ChatFormat.load(config.model.path)
        self.window = Window(config.buffer.groups, config.buffer.depth, versions=config.run.versions)
        self.batch_ready = asyncio.Event()
        self.started = 0

    async def run(self) -> None:
        """Publish version 0, then train one version after the other."""
        first = self.publisher.publish(0, -1, 0, self.trainer.weights(), self.trainer.score)
        async with asyncio.TaskGroup() as tasks:
            await self.deliver(first, tasks)
            for version in range(self.config.run.versions):
                groups = await self.next_batch()
                batch = self.assemble(groups, version)
                published = await asyncio.to_thread(self.train, batch)
                # Not awaited: the next step begins while the engine still fetches and proves these weights.
                tasks.create_task(self.deliver(published, tasks))
                report(groups, batch)

    # GROUP: takes a slot, generates and judges its answers, and waits in the window for a batch.

    def start_groups(self, tasks: asyncio.TaskGroup) -> None:
        """Start a group in every free slot. A slot is charged before generation: that is what bounds the lag."""
        for _ in range(self.window.free):
            letter = string.ascii_lowercase[self.started % 26]
            prompt = Prompt(id=letter, messages=[{"role": "user", "content": letter}])
            group = Group(id=self.started, prompt=prompt, version=self.window.proved)
            self.window.admit(group.id, group.version)
            self.started += 1
            tasks.create_task(self.run_group(group))

    async def run_group(self, group: Group) -> None:
        """All answers to one prompt, generated side by side; they are compared with each other, not with a critic."""
        size = self.config.rollouts.group_size
        async with asyncio.timeout(DEADLINE):
            group.rollouts = list(await asyncio.gather(*(self.rollout(group, index) for index in range(size))))
        self.window.complete(group)
        if self.window.batch_ready():
            self.batch_ready.set()

    async def rollout(self, group: Group, index: int) -> Rollout:
        """One answer: what the engine reports is kept token by token, and never tokenised again."""
        limit, name = self.config.rollouts.max_tokens, f"{group.id}/{index}"
        sampling = Sampling(max_tokens=limit, seed=group.id * 1000 + index, stop_token_ids=self.chat.stop_token_ids)
        prompt_ids = self.chat.open(group.prompt.messages or [])
        trace = Trace.of_context(prompt_ids)
        request = Request(id=name, token_ids=prompt_ids, sampling=sampling, group=str(group.id))
        async for delta in self.engine.generate(request):
            trace = trace.extended(delta.token_ids, delta.logprobs, delta.versions, trained=True)
            last = delta
        return Rollout(
            id=name,
            index=index,
            traces=[trace],
            # A failure is a value, not an exception: the batch leaves such a rollout out.
            ending="failed" if last.error else "finished" if last.finish == "stop" else "truncated",
            reason=last.error,
            reward=reward(self.chat.decode(trace.token_ids[trace.trained]), limit),
        )

    # TRAIN: the oldest complete groups become one optimizer step and one version.

    async def next_batch(self) -> list[Group]:
        """Wait for a batch. `take` checks the lag of every token against the window's bound."""
        async with asyncio.timeout(DEADLINE):
            while (groups := self.window.take()) is None:
                self.batch_ready.clear()
                await self.batch_ready.wait()
        return groups

    def assemble(self, groups: list[Group], version: int) -> Batch:
        """Rewards become advantages, token by token."""
        return assemble(
            groups,
            step=version + 1,
            version=version,
            advantage=self.config.algorithm.advantage,
            normalize=self.config.algorithm.normalize,
            group_size=self.config.rollouts.group_size,
            max_tokens=self.config.rollouts.max_tokens,
            temperature=1.0,
        )

    def train(self, batch: Batch) -> Future[Manifest]:
        """One step, and a snapshot of its weights into shared memory; the manifest follows when it is digested."""
        self.trainer.step(batch)
        version = batch.version + 1
        return self.publisher.publish(version, batch.version, batch.step, self.trainer.weights(), self.trainer.score)

    # DELIVER: the engine proves the weights it fetched, swaps them in between two decode steps, and proves them live.

    async def deliver(self, published: Future[Manifest], tasks: asyncio.TaskGroup) -> None:
        """Bring a version to the engine; once it is proved, the slots of what it was trained on are free."""
        async with asyncio.timeout(DEADLINE):
            manifest = await asyncio.wrap_future(published)
            proof = await self.engine.load(manifest)
        if not proof.accepted:
            raise RuntimeError(f"version {proof.version} was refused: {proof.reason}")
        self.publisher.acknowledged(manifest.version)
        self.window.release(manifest.version)
        self.start_groups(tasks)


def report(groups: list[Group], batch: Batch) -> None:
    """A line per version."""
    rewards = [rollout.reward for group in groups for rollout in group.rollouts if rollout.reward is not None]
    lags = batch.lags()
    print(f"version {batch.version + 1:3}  reward {np.mean(rewards):.3f}  lag mean {lags.mean():.2f} max {lags.max()}")


async def main(versions: int) -> None:
    torch.set_num_threads(1)  # of the engine's thread and of the trainer's, each
    config = load_config(
        HERE / "quickstart" / "quickstart.toml",
        [*SETTINGS, f"run.versions={versions}", f"model.path={HERE / 'quickstart' / 'model'}"],
    )
    model = load_model(config.model.path, weights="random", seed=0)
    trainer = Trainer(model, config.algorithm, config.training, total_steps=versions, warm_start=config.warm_start)
    canary = np.arange(16, dtype=np.int32)  # any fixed tokens: the engine must score them as the trainer did
    publisher = Publisher(ShmSender("loop"), dtype="float32", tolerance=1e-3, canary_token_ids=canary)
    # Other random weights than the trainer's, on purpose: the engine answers nothing before version 0 is proved.
    engine = EmbeddedEngine.from_path(config.model.path, config.engine, max_length=64, weights="random", seed=1)
    try:
        await Loop(config, engine, trainer, publisher).run()
    finally:
        await engine.close()
        publisher.close()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 40))
