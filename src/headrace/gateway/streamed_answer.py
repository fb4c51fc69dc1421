"""One answer as it grows: its tokens with their records, and the text that is certain already.

What was said never changes: text that a later token could still alter (half a character, the beginning of a stop
string) is held back, so the pieces of a stream joined are the text of the whole.
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
"""What bytes decode to that are not a character yet."""


class StreamedAnswer:
    """The policy's answer to one request."""

    def __init__(self, chat: Chat, stops: Sequence[str] = (), *, tools: bool = False) -> None:
        """`stops` are texts that end the answer and are not part of its text (their tokens were sampled and stay).

        With `tools`, calls of functions are taken out of the text when the answer is complete.
        """
        self._chat = chat
        self._stops = [stop for stop in stops if stop]
        self._tools = tools
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self.text = ""
        """What is certain."""
        self.calls: list[ToolCall] = []
        self.finish: Literal["stop", "length"] | None = None

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def token_ids(self) -> Int32Array:
        """As they were sampled, an end token included."""
        return np.array(self._ids, np.int32)

    @property
    def logprobs(self) -> Float32Array:
        """As the engine recorded them."""
        return np.array(self._logprobs, np.float32)

    @property
    def versions(self) -> Int32Array:
        """As the engine recorded them."""
        return np.array(self._versions, np.int32)

    def hear(self, delta: Delta) -> str:
        """Take a delta; the text that has become certain by it."""
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
        """What the client is given, and will send back as its history."""
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
        """Forget the tokens after the one that completed a stop string: nobody has seen them."""
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
        # A decoder may drop what it said before; nothing said is taken back.
        return max(end, len(self.text))
