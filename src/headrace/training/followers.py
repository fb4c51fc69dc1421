"""Teachers that follow the policy: an average of its weights, or its weights of some versions ago.

A follower changes only when the trainer makes a step of the policy, so it is the same after a restart: a checkpoint
holds it, and steps that are trained again change it again. The weights of a follower are never those of the policy in
training: they are copies, on the same device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import torch

from headrace.config.scorers import TeacherConfig

Tensors = Mapping[str, torch.Tensor]


class Follower(Protocol):
    """A copy of the policy's weights that lags behind them."""

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the weights of the teacher now, by canonical name."""

    def begin(self, policy: Tensors) -> None:
        """Begin with these weights, which a warm start has trained."""

    def follow(self, step: int, policy: Tensors) -> None:
        """Change after a step of the policy, which has these weights now. Steps count from 1."""

    def state(self) -> dict[str, torch.Tensor]:
        """Return everything that a checkpoint must hold."""

    def restore(self, state: Tensors) -> None:
        """Continue from what a checkpoint holds. Raises `ValueError` if another kind of follower wrote it."""


class Average:
    """The exponential moving average: after every step, decay x average + (1 - decay) x policy."""

    def __init__(self, policy: Tensors, decay: float) -> None:
        self._decay = decay
        self._average = _copied(policy)

    def weights(self) -> dict[str, torch.Tensor]:
        """See `Follower.weights`."""
        return self._average

    def begin(self, policy: Tensors) -> None:
        """See `Follower.begin`."""
        self.restore(policy)

    @torch.no_grad()
    def follow(self, step: int, policy: Tensors) -> None:
        """See `Follower.follow`."""
        for name, tensor in self._average.items():
            tensor.lerp_(policy[name].detach(), 1.0 - self._decay)

    def state(self) -> dict[str, torch.Tensor]:
        """See `Follower.state`."""
        return self._average

    @torch.no_grad()
    def restore(self, state: Tensors) -> None:
        """See `Follower.restore`."""
        if state.keys() != self._average.keys():
            raise ValueError("it does not hold an average of this policy")
        for name, tensor in self._average.items():
            tensor.copy_(state[name])


class Earlier:
    """The policy's weights of `ago` versions before. Until there are so many versions, the weights it began with."""

    def __init__(self, policy: Tensors, ago: int, steps_per_version: int) -> None:
        """A version has `steps_per_version` steps."""
        self._ago = ago
        self._steps = steps_per_version
        self._versions = [_copied(policy)]
        """The weights of the latest versions, oldest first. The last entry is the newest complete version."""

    def weights(self) -> dict[str, torch.Tensor]:
        """See `Follower.weights`."""
        return self._versions[0]

    def begin(self, policy: Tensors) -> None:
        """See `Follower.begin`."""
        self._versions = [_copied(policy)]

    @torch.no_grad()
    def follow(self, step: int, policy: Tensors) -> None:
        """See `Follower.follow`."""
        if step % self._steps:
            return
        # The oldest version is no longer needed, so its memory is used again for the newest one.
        if len(self._versions) > self._ago:
            spare = self._versions.pop(0)
            for name, tensor in spare.items():
                tensor.copy_(policy[name].detach())
            self._versions.append(spare)
        else:
            self._versions.append(_copied(policy))

    def state(self) -> dict[str, torch.Tensor]:
        """See `Follower.state`."""
        return {
            f"{number}/{name}": tensor for number, held in enumerate(self._versions) for name, tensor in held.items()
        }

    def restore(self, state: Tensors) -> None:
        """See `Follower.restore`."""
        found: dict[int, dict[str, torch.Tensor]] = {}
        for key, tensor in state.items():
            number, _, name = key.partition("/")
            if not number.isdecimal() or name not in self._versions[0]:
                raise ValueError("it does not hold earlier versions of this policy")
            found.setdefault(int(number), {})[name] = tensor.to(self._versions[0][name], copy=True)
        self._versions = [found[number] for number in sorted(found)][-self._ago - 1 :]


def make_follower(section: TeacherConfig, policy: Tensors, steps_per_version: int) -> Follower:
    """Make the follower that a section of the configuration describes. It begins with the policy's weights."""
    if section.policy == "ema":
        return Average(policy, section.decay)
    return Earlier(policy, section.versions_ago, steps_per_version)


@contextmanager
def exchanged(live: Tensors, held: Tensors) -> Iterator[None]:
    """Inside this context, give the live tensors the held values. Afterwards both have their own values again."""
    _exchange(live, held)
    try:
        yield
    finally:
        _exchange(live, held)


@torch.no_grad()
def _exchange(live: Tensors, held: Tensors) -> None:
    for name, tensor in held.items():
        kept = tensor.clone()
        tensor.copy_(live[name])
        live[name].copy_(kept)


def _copied(policy: Tensors) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in policy.items()}
