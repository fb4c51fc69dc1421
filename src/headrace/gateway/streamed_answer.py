"""One growing answer: its tokens with their records, and the text that is final already.

Text that was passed on never changes. Text that a later token could still change (half a character, the beginning of a
stop string) is held back, so the pieces of a stream joined together are the text of the whole answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from headrace.engines.base import Delta
from headrace.gateway.base import Chat, Message
from headrace.gateway.tool_calls import OPEN_CALL, ToolCall, split_calls
from headrace.types import Float32Array, Int32Array

HALF = "\N{REPLACEMENT CHARACTER}"
"""The character that a decoder returns for bytes that do not form a complete character yet."""


class StreamedAnswer:
    """The policy's answer to one request."""

    def __init__(self, chat: Chat, stops: Sequence[str] = (), *, tools: bool = False) -> None:
        """Start an answer. `stops` are texts that end the answer; they are not part of its text.

        The tokens of a stop text were sampled and stay. With `tools`, function calls are taken out of the text when the
        answer is complete.
        """
        self._chat = chat
        self._stops = [stop for stop in stops if stop]
        self._tools = tools
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self.text = ""
        """The text that is final."""
        self.calls: list[ToolCall] = []
        self.finish: Literal["stop", "length"] | None = None
        """Why the answer ended. It is None while the answer grows, and stays None if the answer is cut off."""

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def token_ids(self) -> Int32Array:
        """The token ids as they were sampled, including an end token."""
        return np.array(self._ids, np.int32)

    @property
    def logprobs(self) -> Float32Array:
        """The log-probability of each token, as the engine recorded it."""
        return np.array(self._logprobs, np.float32)

    @property
    def versions(self) -> Int32Array:
        """The policy version behind each token, as the engine recorded it."""
        return np.array(self._versions, np.int32)

    def hear(self, delta: Delta) -> str:
        """Add a delta, and return the text that has become final."""
        self._ids += [int(token) for token in delta.token_ids]
        self._logprobs += [float(logprob) for logprob in delta.logprobs]
        self._versions += [int(version) for version in delta.versions]
        spoken = self._ids[:-1] if delta.finish == "stop" else self._ids
        text = self._chat.decode(spoken)
        at = self._stop_at(text)
        if at is not None:
            self._cut()
            self.finish = "stop"
            return self._say_all(text[:at])
        if delta.finish in ("stop", "length"):
            self.finish = delta.finish
            return self._say_all(text)
        return self._say(text[: self._certain(text)])

    def message(self) -> Message:
        """Return the message that the client receives and will send back as its history."""
        message: Message = {"role": "assistant", "content": self.text}
        if self.calls:
            message["tool_calls"] = [call.as_openai() for call in self.calls]
        return message

    def _say_all(self, text: str) -> str:
        if self._tools:
            text, self.calls = split_calls(text)
        return self._say(text)

    def _say(self, text: str) -> str:
        piece = text[len(self.text) :]
        self.text += piece
        return piece

    def _stop_at(self, text: str) -> int | None:
        found = [at for stop in self._stops if (at := text.find(stop, max(0, len(self.text) - len(stop) + 1))) >= 0]
        return min(found, default=None)

    def _cut(self) -> None:
        """Remove the tokens after the one that completed a stop string. Nobody has seen them."""
        low = len(self._ids)
        while low > 1 and self._holds_stop(low - 1):
            low -= 1
        del self._ids[low:], self._logprobs[low:], self._versions[low:]

    def _holds_stop(self, tokens: int) -> bool:
        text = self._chat.decode(self._ids[:tokens])
        return any(stop in text for stop in self._stops)

    def _certain(self, text: str) -> int:
        whole = text.rstrip(HALF)
        end = len(whole)
        if self._tools and OPEN_CALL in whole:
            end = whole.index(OPEN_CALL)
        for mark in [*self._stops, *([OPEN_CALL] if self._tools else [])]:
            held = next((n for n in range(len(mark) - 1, 0, -1) if whole.endswith(mark[:n])), 0)
            end = min(end, len(whole) - held)
        # A decoder may drop text that it returned before, but text that was passed on is never taken back.
        return max(end, len(self.text))
