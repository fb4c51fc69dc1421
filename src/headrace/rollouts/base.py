"""What rollouts need of a chat format, and the seed of a rollout.

A chat format turns *new* messages into tokens to append; it is never asked to render a conversation again, so the
tokens of an earlier turn stay the ones that were sampled.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Protocol

from headrace.types import Int32Array, Prompt, Rollout, Trace


class ChatFormat(Protocol):
    """Messages to tokens and back, for one model."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The tokens with which the model ends its turn."""
        ...

    def open(self, messages: Sequence[dict[str, str]]) -> Int32Array:
        """The tokens of the opening messages, up to where the policy's first turn begins."""
        ...

    def continue_(self, messages: Sequence[dict[str, str]], *, ended: bool) -> Int32Array:
        """The tokens to append after the policy's turn: these messages, up to where its next turn begins.

        `ended` says whether the policy closed its turn itself; if not, the end of the turn is part of the answer.
        """
        ...

    def encode(self, text: str) -> Int32Array:
        """The tokens of a text, as it is."""
        ...

    def token_id(self, token: str) -> int:
        """The id of a token that is in the vocabulary as a whole."""
        ...

    def decode(self, token_ids: Int32Array) -> str:
        """The text of these tokens, for judges and people."""
        ...


class AnyEpisode(Protocol):
    """One rollout in the making, used once: `prepare`, then `run`; whoever takes the turns (see `turns.Episode`)."""

    id: str
    index: int
    prompt: Prompt

    @property
    def partial(self) -> Trace:
        """The tokens so far."""
        ...

    @property
    def answer(self) -> str:
        """All that follows the opening, as text for people to read."""
        ...

    def since(self, start: int) -> Trace | None:
        """Its tokens after the first `start`, if there are any; always None where it cannot be continued from them."""
        ...

    async def prepare(self) -> None:
        """What may take any time and submits nothing. Idempotent."""
        ...

    async def run(self) -> Rollout:
        """Take turns until the episode ends, however it ends."""
        ...

    async def cancel(self, reason: str) -> None:
        """End it now: `run` returns what there is."""
        ...

    async def discard(self) -> None:
        """Close an episode that will not be run (any more). Idempotent."""
        ...


def derive_seed(run_seed: int, group: int | str, index: int) -> int:
    """The seed of one rollout: 63 bits, the same on every machine and in every process."""
    digest = hashlib.blake2b(f"{run_seed}/{group}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
