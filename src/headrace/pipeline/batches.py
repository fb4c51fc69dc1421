"""This module alone makes batches from groups, so a batch that is made again from the journal is identical.

A batch is a function of the configuration, the step and the recorded groups alone.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np

from headrace.algorithms.assemble import assemble, assemble_demonstrations
from headrace.algorithms.credit import Credit
from headrace.buffer.admission import oldest_on_time
from headrace.buffer.filters import masked
from headrace.buffer.reader import open_readonly
from headrace.config import Config
from headrace.errors import ConfigError, HeadraceError
from headrace.rollouts.base import ChatFormat
from headrace.tasks.base import Task
from headrace.tasks.mixture import make_source
from headrace.types import Batch, Group, Int32Array, Prompt


def make_batch(
    config: Config,
    groups: Sequence[Group],
    *,
    step: int,
    version: int,
    republished: Sequence[int] = (),
    unrecorded: float | None = None,
) -> Batch:
    """Make the batch of a policy step. The order of `groups` does not matter.

    `unrecorded` is the temperature of tokens that an older release recorded without one. By default it is that of the
    configuration.
    """
    groups = sorted(groups, key=lambda group: group.id)
    if config.buffer.on_stale == "salvage" and config.buffer.max_lag is not None:
        # The window has masked its groups already, but groups from the journal are as they were sampled.
        oldest = oldest_on_time(version, config.buffer.max_lag, republished)
        groups = [masked(group, oldest) for group in groups]
    if config.scoring.shuffle:
        groups = shuffle_rewards(groups, config.run.seed, step)
    return assemble(
        groups,
        step=step,
        version=version,
        advantage=config.algorithm.advantage,
        normalize=config.algorithm.normalize,
        group_size=config.rollouts.group_size,
        max_tokens=config.rollouts.max_tokens,
        temperature=unrecorded or config.rollouts.temperature,
        overlong_buffer=config.algorithm.overlong_buffer,
        overlong_penalty=config.algorithm.overlong_penalty,
        length_penalty=config.algorithm.length_penalty,
        mask_overlong=config.algorithm.mask_overlong,
        credit=credit_of(config),
        critic=config.algorithm.critic,
        minibatches=config.algorithm.minibatches,
        epochs=config.algorithm.epochs,
        republished=republished,
    )


def credit_of(config: Config) -> Credit:
    """Return how rewards and finer scores become advantages."""
    algorithm = config.algorithm
    weight = algorithm.outcome_weight
    if weight is None:
        # States are rarely met twice, and a turn whose state nobody else met has no advantage by itself.
        weight = 1.0 if algorithm.baseline in ("state", "prefix") else 0.0
    return Credit(
        of=algorithm.credit,
        discount=algorithm.discount,
        baseline=algorithm.baseline,
        outcome_weight=weight,
        scorers={name: scorer.weight for name, scorer in config.scorers.items()},
    )


def shuffle_rewards(groups: Sequence[Group], seed: int, step: int) -> list[Group]:
    """Return the same groups, with the rewards of all rollouts permuted at random over the whole batch.

    This is a control experiment: such rewards say nothing about the answers that get them.
    """
    rewards = np.array([rollout.reward for group in groups for rollout in group.usable], np.float64)
    shuffled = iter(np.random.default_rng([seed, step]).permutation(rewards).tolist())
    return [
        msgspec.structs.replace(
            group,
            rollouts=[
                rollout if rollout.ending == "failed" else msgspec.structs.replace(rollout, reward=next(shuffled))
                for rollout in group.rollouts
            ],
        )
        for group in groups
    ]


def recorded_batches(config: Config, journal: Path, after: int, until: int) -> Iterator[Batch]:
    """Yield the batches of the policy steps after < step <= until, as they were trained. They are read one by one."""
    policy = config.policy_name
    with open_readonly(journal) as reader:
        republished, unrecorded = reader.republished(policy), reader.meta().get("temperature")
    for step in range(after + 1, until + 1):
        # One reader per step: while a reader is open, the write-ahead log of a live journal cannot be emptied.
        with open_readonly(journal) as reader:
            found, groups = reader.step(step, policy), reader.trained_groups(step, policy)
        if found is None or len(groups) != found.groups:
            raise HeadraceError(f"{journal}: step {step} cannot be trained again, not all of its tokens were kept")
        yield make_batch(
            config, groups, step=step, version=found.version, republished=republished, unrecorded=unrecorded
        )


def warm_start_batches(config: Config, task: Task, chat: ChatFormat, version: int) -> Iterator[Batch]:
    """Yield the batches of the supervised steps before the first version. The last of these steps has number 0."""
    source = make_source(task, config.run.seed + 1)
    for step in range(1 - config.warm_start.steps, 1):
        pairs = [_demonstration(task, chat, source.draw()) for _ in range(config.warm_start.batch)]
        yield assemble_demonstrations(pairs, step=step, version=version, policy=config.policy_name)


def _demonstration(task: Task, chat: ChatFormat, prompt: Prompt) -> tuple[Int32Array, Int32Array]:
    """Return the tokens of a prompt, and the tokens of a right answer with the token that ends it."""
    answer = task.demonstration(prompt)
    if answer is None:
        raise ConfigError(f"[warm_start] steps: the task has no demonstration for prompt {prompt.id}")
    if chat.end_token_id is None:
        raise ConfigError("[warm_start] steps: neither the chat template nor the model's files name an end of turn")
    opening = chat.open(prompt.messages) if prompt.messages else chat.open_text(prompt.text or "")
    return opening, np.append(chat.encode(answer), chat.end_token_id).astype(np.int32)
