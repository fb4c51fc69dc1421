"""The process of a process-reward model: it reads the steps of all rollouts as they come.

While one pass is computed, further messages wait, and the next pass takes all of them together.
"""

import time
from collections import deque

import numpy as np
import torch

from headrace.channel.heartbeats import Stop
from headrace.channel.worker_link import Incoming, WorkerLink
from headrace.config.hub import find_model
from headrace.config.scorers import ProcessRewardConfig
from headrace.delivery.digest import digest_as
from headrace.engines.step_values import ForgetSteps, ReadSteps, StepAnswer, StepsRead, StepTokens
from headrace.models.loading import choose_device, named_weights
from headrace.models.process_reward import Growth, ProcessRewardModel, load_process_reward_model

PASS_TOKENS = 8192
"""The most tokens of one pass, unless a single message has more."""


class StepServer:
    """Answers messages about steps with one process-reward model."""

    def __init__(self, model: ProcessRewardModel, version: str, slots: int) -> None:
        """`slots` is the number of rollouts that one pass may have, beyond which messages are not joined."""
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

        Only consecutive `ReadSteps` are joined, and only as long as no rollout is in two of them.
        """
        taken: list[Incoming] = []
        rollouts, tokens = set[str](), 0
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
            own = [growth.rollout for growth in message.growths]
            count = sum(len(growth.token_ids) for growth in message.growths)
            full = tokens + count > PASS_TOKENS or len(rollouts) + len(own) > self._slots
            if taken and (full or not rollouts.isdisjoint(own)):
                break
            rollouts.update(own)
            tokens += count
            taken.append(self._waiting.popleft())
        growths = [growth for incoming in taken for growth in _growths(incoming)]
        answers = iter(self._answers(growths))
        read = [(incoming, [next(answers) for _ in _growths(incoming)]) for incoming in taken]
        now = time.monotonic()
        return [(incoming, StepsRead(answers=each, version=self._version, time=now)) for incoming, each in read]

    def _answers(self, growths: list[StepTokens]) -> list[StepAnswer]:
        answers: list[StepAnswer] = []
        readable: list[tuple[StepAnswer, Growth]] = []
        for growth in growths:
            if growth.start == 0:
                self._model.forget(growth.rollout)
            # Copied, because arrays from a channel are read-only, and torch warns about read-only arrays.
            one = Growth(growth.rollout, growth.start, np.array(growth.token_ids), growth.wanted)
            missing = growth.start != self._model.held(growth.rollout)
            answer = StepAnswer(missing=missing, error="" if missing else self._model.refusal(one))
            answers.append(answer)
            if not answer.missing and not answer.error:
                readable.append((answer, one))
        if readable:
            for (answer, _), values in zip(readable, self._model.grow([g for _, g in readable]), strict=True):
                answer.values = values
        return answers


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
            with link.spans.span("score"):
                answered = server.answer()
            for incoming, read in answered:
                link.reply(incoming, read)


def _growths(incoming: Incoming) -> list[StepTokens]:
    assert isinstance(incoming.message, ReadSteps)
    return incoming.message.growths
