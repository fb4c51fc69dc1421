"""The process of a process-reward model: it reads the steps of all rollouts as they come.

While one pass is computed, further messages wait, and the next pass takes all of them together.
"""

import time
from collections import deque
from contextlib import nullcontext

import numpy as np
import torch

from headrace.channel.heartbeats import Stop
from headrace.channel.worker_link import Incoming, WorkerLink
from headrace.config.hub import find_model
from headrace.config.scorers import ProcessRewardConfig
from headrace.delivery.digest import digest_as
from headrace.engines.embedded.runner import pack_linears, small_products
from headrace.engines.step_values import ForgetSteps, ReadSteps, StepAnswer, StepsRead, StepTokens
from headrace.models.loading import choose_device, named_weights
from headrace.models.process_reward import Growth, ProcessRewardModel, load_process_reward_model

PASS_TOKENS = 8192
"""The most tokens of one pass, unless a single rollout has more."""

Parts = list[tuple[StepAnswer, StepTokens]]
"""Consecutive tokens of one rollout, with the answers to them."""


class StepServer:
    """Answers messages about steps with one process-reward model."""

    def __init__(self, model: ProcessRewardModel, version: str, slots: int) -> None:
        """`slots` is the number of rollouts that one pass may have."""
        self._slots = slots
        self._model = model
        self._version = version
        self._waiting: deque[Incoming] = deque()

    @property
    def waiting(self) -> int:
        """The number of messages that wait for a pass."""
        return len(self._waiting)

    def take(self, incoming: Incoming) -> None:
        """Queue a message."""
        self._waiting.append(incoming)

    def answer(self) -> list[tuple[Incoming, StepsRead]]:
        """Take messages that wait, in order, as many as one pass may have, and return the answers to them.

        Several steps of one rollout are read in one pass, if each continues where the one before it ends.
        """
        taken: list[Incoming] = []
        ends: dict[str, int] = {}
        """Where the tokens of each rollout of this pass end."""
        tokens = 0
        while self._waiting:
            message = self._waiting[0].message
            if isinstance(message, ForgetSteps):
                if taken:
                    break
                for rollout in message.rollouts:
                    self._model.forget(rollout)
                self._waiting.popleft()
                continue
            assert isinstance(message, ReadSteps)
            growths = message.growths
            count = sum(len(growth.token_ids) for growth in growths)
            rollouts = len(ends.keys() | {growth.rollout for growth in growths})
            apart = any(growth.start != ends.get(growth.rollout, growth.start) for growth in growths)
            if taken and (apart or tokens + count > PASS_TOKENS or rollouts > self._slots):
                break
            ends |= {growth.rollout: growth.start + len(growth.token_ids) for growth in growths}
            tokens += count
            taken.append(self._waiting.popleft())
        answers = iter(self._answers([growth for incoming in taken for growth in _growths(incoming)]))
        read = [(incoming, [next(answers) for _ in _growths(incoming)]) for incoming in taken]
        now = time.monotonic()
        return [(incoming, StepsRead(answers=each, version=self._version, time=now)) for incoming, each in read]

    def _answers(self, growths: list[StepTokens]) -> list[StepAnswer]:
        answers = [StepAnswer() for _ in growths]
        joined: dict[str, Parts] = {}
        for answer, growth in zip(answers, growths, strict=True):
            if growth.start == 0:
                self._model.forget(growth.rollout)
            parts = joined.setdefault(growth.rollout, [])
            known = self._model.held(growth.rollout) + sum(len(part.token_ids) for _, part in parts)
            answer.missing = growth.start != known
            if not answer.missing:
                parts.append((answer, growth))
        readable: list[tuple[Parts, Growth]] = []
        for parts in filter(None, joined.values()):
            whole = _joined([growth for _, growth in parts])
            error = self._model.refusal(whole)
            for answer, _ in parts:
                answer.error = error
            if not error:
                readable.append((parts, whole))
        for together in self._passes(readable):
            for (parts, _), values in zip(together, self._model.grow([whole for _, whole in together]), strict=True):
                found = iter(values)
                for answer, growth in parts:
                    answer.values = [next(found) for _ in growth.wanted]
        return answers

    def _passes(self, readable: list[tuple[Parts, Growth]]) -> list[list[tuple[Parts, Growth]]]:
        """Divide rollouts into passes. After a restart, one message may bring all rollouts from their first tokens."""
        passes: list[list[tuple[Parts, Growth]]] = []
        tokens = 0
        for each in readable:
            count = len(each[1].token_ids)
            if not passes or len(passes[-1]) == self._slots or tokens + count > PASS_TOKENS:
                passes.append([])
                tokens = 0
            passes[-1].append(each)
            tokens += count
        return passes


def _joined(growths: list[StepTokens]) -> Growth:
    """Return consecutive tokens of one rollout as one growth. Tokens are copied: those of a channel are read-only."""
    first = growths[0]
    wanted = [growth.start - first.start + at for growth in growths for at in growth.wanted]
    ids = np.concatenate([growth.token_ids for growth in growths]).astype(np.int32)
    return Growth(first.rollout, first.start, ids, wanted)


def serve(link: WorkerLink, section: ProcessRewardConfig) -> None:
    """Load the model and answer messages until the controller sends `Stop`."""
    path = find_model(section.model, section.revision, key="[scorers] model")
    device = choose_device("cuda" if section.gpus else "cpu", "scorers")
    if device == "cuda":
        torch.cuda.set_per_process_memory_fraction(section.memory_fraction)
    model = load_process_reward_model(
        path,
        good=section.good,
        bad=section.bad,
        max_length=section.max_length,
        dtype=section.dtype,
        device=device,
    )
    # Passes are short, so products of packed weights are much faster on a CPU.
    packed = pack_linears(model.model)
    version = f"{digest_as(named_weights(model.model), section.dtype):016x}"
    server = StepServer(model, version, section.slots)
    link.ready(parameters=sum(p.numel() for p in model.model.parameters()))
    while True:
        for incoming in link.next_messages():
            if isinstance(incoming.message, Stop):
                link.phase = "stopping"
                return
            server.take(incoming)
        while server.waiting:
            with link.spans.span("score"), small_products() if packed is not None else nullcontext():
                answered = server.answer()
            for incoming, read in answered:
                link.reply(incoming, read)


def _growths(incoming: Incoming) -> list[StepTokens]:
    assert isinstance(incoming.message, ReadSteps)
    return incoming.message.growths
