"""Answers in OpenAI's formats: whole, or as the chunks of a stream.

These are pure functions from answers to JSON values.
"""

from __future__ import annotations

import secrets
import time
from typing import Any

from headrace.gateway.base import Chat
from headrace.gateway.completions import Answered
from headrace.gateway.requests import CompletionRequest
from headrace.gateway.streamed_answer import StreamedAnswer


class ResponseShape:
    """The answers to one request, as JSON values."""

    def __init__(self, want: CompletionRequest, chat: Chat) -> None:
        self._want = want
        self._chat = chat
        self._created = int(time.time())
        self._id = ("chatcmpl-" if want.kind == "chat" else "cmpl-") + secrets.token_hex(12)
        self._told: dict[int, int] = {}
        """Choice -> how many of its tokens have their log-probabilities in chunks already."""

    def whole(self, answered: Answered) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""
        chat = self._want.kind == "chat"
        choices = [self._choice(number, streamed) for number, streamed in enumerate(answered.choices)]
        head = self._head("chat.completion" if chat else "text_completion")
        return {**head, "choices": choices, "usage": usage(answered)}

    def first(self, number: int) -> dict[str, Any]:
        """Return the first chunk of a choice of a chat."""
        return self._chunk(number, {"role": "assistant", "content": ""}, None, None)

    def piece(self, number: int, text: str, streamed: StreamedAnswer) -> list[dict[str, Any]]:
        """Return the chunks for a piece of text. The last piece of a choice also carries its finish reason."""
        logprobs = self._logprobs(streamed, self._told.get(number, 0)) if self._want.logprobs else None
        self._told[number] = len(streamed)
        if self._want.kind == "text":
            choice = {"index": number, "text": text, "logprobs": logprobs, "finish_reason": streamed.finish}
            return [{**self._head("text_completion"), "choices": [choice]}]
        chunks = [self._chunk(number, {"content": text}, logprobs, None)] if text or logprobs else []
        if streamed.calls:
            calls = [{"index": index, **call.as_openai()} for index, call in enumerate(streamed.calls)]
            chunks.append(self._chunk(number, {"tool_calls": calls}, None, None))
        if streamed.finish is not None:
            chunks.append(self._chunk(number, {}, None, _finish(streamed)))
        return chunks

    def last(self, answered: Answered) -> dict[str, Any]:
        """Return the last chunk, which holds only the usage."""
        kind = "chat.completion.chunk" if self._want.kind == "chat" else "text_completion"
        return {**self._head(kind), "choices": [], "usage": usage(answered)}

    def _choice(self, number: int, streamed: StreamedAnswer) -> dict[str, Any]:
        logprobs = self._logprobs(streamed, 0) if self._want.logprobs else None
        if self._want.kind == "text":
            return {"index": number, "text": streamed.text, "logprobs": logprobs, "finish_reason": streamed.finish}
        message = streamed.message()
        if streamed.calls and not streamed.text:
            message["content"] = None
        return {"index": number, "message": message, "logprobs": logprobs, "finish_reason": _finish(streamed)}

    def _chunk(self, number: int, delta: dict[str, Any], logprobs: Any, finish: str | None) -> dict[str, Any]:
        choice = {"index": number, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return {**self._head("chat.completion.chunk"), "choices": [choice]}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._want.model}

    def _logprobs(self, streamed: StreamedAnswer, start: int) -> dict[str, Any]:
        """Return the log-probabilities of the tokens from `start` on, including an end token."""
        ids, values = streamed.token_ids[start:], streamed.logprobs[start:]
        texts = [self._chat.decode([int(token)]) for token in ids]
        if self._want.kind == "text":
            offsets, at = [], 0 if not start else len(self._chat.decode(streamed.token_ids[:start]))
            for text in texts:
                offsets.append(at)
                at += len(text)
            numbers = [float(value) for value in values]
            return {"tokens": texts, "token_logprobs": numbers, "top_logprobs": None, "text_offset": offsets}
        return {
            "content": [
                {"token": text, "logprob": float(value), "bytes": list(text.encode()), "top_logprobs": []}
                for text, value in zip(texts, values, strict=True)
            ],
            "refusal": None,
        }


def usage(answered: Answered) -> dict[str, int]:
    """Return the numbers of prompt tokens and sampled tokens."""
    return {
        "prompt_tokens": answered.prompt_tokens,
        "completion_tokens": answered.completion_tokens,
        "total_tokens": answered.prompt_tokens + answered.completion_tokens,
    }


def _finish(streamed: StreamedAnswer) -> str | None:
    return "tool_calls" if streamed.calls else streamed.finish
