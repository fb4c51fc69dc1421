"""One growing answer: its tokens with their records, the text that is final already, and the function calls in it.

Text that was passed on never changes. Text that a later token could still change (half a character, the beginning of a
stop string) is held back, so the pieces of a stream joined together are the text of the whole answer.

Function calls are read as many models write them: `<tool_call>{"name": ..., "arguments": ...}</tool_call>`. Text that
cannot be read as a call stays text, for the agent to judge. Nothing is repaired.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from headrace.engines.base import Delta
from headrace.gateway.base import Chat, Message

HALF = "\N{REPLACEMENT CHARACTER}"
"""The character that a decoder returns for bytes that do not form a complete character yet."""
OPEN_CALL = "<tool_call>"
_CALLS = re.compile(r"(?:\s*<tool_call>(.*?)</tool_call>)+\s*$", re.DOTALL)
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


class _Written(msgspec.Struct, kw_only=True):
    name: str
    arguments: dict[str, Any] = {}


def split_calls(text: str) -> tuple[str, list[dict[str, Any]]]:
    """Split an answer into the text before its final calls, and the calls as they stand in OpenAI's messages.

    If a call cannot be read, everything is text and there are no calls.
    """
    found = _CALLS.search(text)
    if found is None or text.index(OPEN_CALL) < found.start():
        return text, []
    try:
        written = [msgspec.json.decode(call.strip(), type=_Written) for call in _CALL.findall(found.group())]
    except msgspec.DecodeError:
        return text, []
    calls = []
    for call in written:
        function = {"name": call.name, "arguments": msgspec.json.encode(call.arguments).decode()}
        calls.append({"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function})
    return text[: text.index(OPEN_CALL)], calls


class StreamedAnswer:
    """The policy's answer to one request."""

    def __init__(self, chat: Chat, stops: Sequence[str] = (), *, tools: bool = False) -> None:
        """Start an answer. `stops` are texts that end the answer; they are not part of its text.

        The tokens of a stop text were sampled and stay. With `tools`, function calls are taken out of the text when the
        answer is complete.
        """
        self._chat = chat
        self._stops = stops
        self._tools = tools
        self.token_ids: list[int] = []
        """The token ids as they were sampled, including an end token."""
        self.logprobs: list[float] = []
        """The log-probability of each token, as the engine recorded it."""
        self.versions: list[int] = []
        """The policy version behind each token, as the engine recorded it."""
        self.text = ""
        """The text that is final."""
        self.calls: list[dict[str, Any]] = []
        self.finish: Literal["stop", "length"] | None = None
        """Why the answer ended. It is None while the answer grows, and stays None if the answer is cut off."""

    def __len__(self) -> int:
        return len(self.token_ids)

    def hear(self, delta: Delta) -> str:
        """Add a delta, and return the text that has become final."""
        self.token_ids += [int(token) for token in delta.token_ids]
        self.logprobs += [float(logprob) for logprob in delta.logprobs]
        self.versions += [int(version) for version in delta.versions]
        spoken = self.token_ids[:-1] if delta.finish == "stop" else self.token_ids
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
            message["tool_calls"] = self.calls
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
        kept = len(self.token_ids)
        while kept > 1:
            text = self._chat.decode(self.token_ids[: kept - 1])
            if not any(stop in text for stop in self._stops):
                break
            kept -= 1
        del self.token_ids[kept:], self.logprobs[kept:], self.versions[kept:]

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


@dataclass(frozen=True)
class Answered:
    """All answers to one request."""

    prompt_tokens: int
    choices: list[StreamedAnswer]

    def usage(self) -> dict[str, int]:
        """Return the numbers of prompt tokens and sampled tokens, as OpenAI names them."""
        sampled = sum(len(choice) for choice in self.choices)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": sampled,
            "total_tokens": self.prompt_tokens + sampled,
        }
