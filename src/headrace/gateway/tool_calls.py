"""Function calls in an answer, as many models write them: `<tool_call>{"name": ..., "arguments": ...}</tool_call>`.

Text that cannot be read as a call stays text, for the agent to judge. Nothing is repaired.
"""

from __future__ import annotations

import re
import secrets
from typing import Any

import msgspec

OPEN_CALL = "<tool_call>"
_CALLS = re.compile(r"(?:\s*<tool_call>(.*?)</tool_call>)+\s*$", re.DOTALL)
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """One function call."""

    id: str
    name: str
    arguments: str
    """A JSON object, as text."""

    def as_openai(self) -> dict[str, Any]:
        """Return the call as it stands in a message."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class _Written(msgspec.Struct, kw_only=True):
    name: str
    arguments: dict[str, Any] = {}


def split_calls(text: str) -> tuple[str, list[ToolCall]]:
    """Split an answer into the text before its final calls, and the calls.

    If a call cannot be read, everything is text and there are no calls.
    """
    found = _CALLS.search(text)
    if found is None or text.index(OPEN_CALL) < found.start():
        return text, []
    try:
        written = [msgspec.json.decode(call.strip(), type=_Written) for call in _CALL.findall(found.group())]
    except msgspec.DecodeError:
        return text, []
    calls = [
        ToolCall(
            id=f"call_{secrets.token_hex(12)}", name=call.name, arguments=msgspec.json.encode(call.arguments).decode()
        )
        for call in written
    ]
    return text[: text.index(OPEN_CALL)], calls
