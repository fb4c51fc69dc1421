"""OpenAI's formats: requests are checked and become one `CompletionRequest`, and answers become JSON values.

A parameter that would change what is sampled, and that the engines do not support, is refused and never ignored. A
parameter that changes nothing (`user`, `store`, ...) is accepted. Answers are sent whole, or as the chunks of a stream.
"""

from __future__ import annotations

import secrets
import time
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from headrace.gateway.answers import Answered, StreamedAnswer
from headrace.gateway.base import ApiError, Chat, Message

Count = Annotated[int, Meta(ge=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]


class StreamOptions(msgspec.Struct, kw_only=True):
    """The value of `stream_options`."""

    include_usage: bool = False
    include_obfuscation: bool = False


class _Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields that both request bodies have."""

    model: str
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    max_tokens: Count | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, float] | None = None
    user: str | None = None


class ChatBody(_Body, kw_only=True, forbid_unknown_fields=True):
    """The body of `/v1/chat/completions`."""

    messages: list[Message]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    metadata: Any = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class CompletionBody(_Body, kw_only=True, forbid_unknown_fields=True):
    """The body of `/v1/completions`."""

    prompt: str | list[Any]
    logprobs: int | None = None
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None


class CompletionRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request, whichever endpoint it came from."""

    kind: Literal["chat", "text"]
    model: str
    messages: list[Message] = []
    tools: list[dict[str, Any]] | None = None
    text: str | None = None
    token_ids: list[int] | None = None
    n: int = 1
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_tokens: int | None = None
    seed: int | None = None
    stops: list[str] = []
    logprobs: bool = False
    stream: bool = False
    include_usage: bool = False


Body = TypeVar("Body", bound=_Body)


def chat_request(raw: bytes) -> CompletionRequest:
    """Read a body of `/v1/chat/completions`. Raises `ApiError`."""
    body = _decode(raw, ChatBody)
    _refuse_what_cannot_be(body)
    if body.top_logprobs:
        raise _refused("top_logprobs", "the log-probability of the sampled token is recorded, not those of others")
    if body.response_format is not None and body.response_format.get("type") != "text":
        raise _refused("response_format", "answers are sampled freely: only {'type': 'text'} is possible")
    if body.tool_choice not in (None, "auto", "none"):
        raise _refused("tool_choice", "the policy chooses: only 'auto' and 'none' are possible")
    messages = [_message(message, number) for number, message in enumerate(body.messages)]
    if not messages:
        raise ApiError(400, "messages: there is none", param="messages")
    return CompletionRequest(
        kind="chat",
        messages=messages,
        tools=body.tools if body.tools and body.tool_choice != "none" else None,
        logprobs=bool(body.logprobs),
        **_common(body) | {"max_tokens": body.max_completion_tokens or body.max_tokens},
    )


def completion_request(raw: bytes) -> CompletionRequest:
    """Read a body of `/v1/completions`. Raises `ApiError`."""
    body = _decode(raw, CompletionBody)
    _refuse_what_cannot_be(body)
    if body.logprobs:
        raise _refused("logprobs", "the log-probability of the sampled token is recorded, not those of others: take 0")
    if body.echo or body.suffix or body.best_of not in (None, 1):
        name = "echo" if body.echo else "suffix" if body.suffix else "best_of"
        raise _refused(name, "it is not supported")
    text, token_ids = _prompt(body.prompt)
    return CompletionRequest(
        kind="text", text=text, token_ids=token_ids, logprobs=body.logprobs is not None, **_common(body)
    )


def _common(body: _Body) -> dict[str, Any]:
    return {
        "model": body.model,
        "n": body.n or 1,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "min_p": body.min_p,
        "max_tokens": body.max_tokens,
        "seed": body.seed,
        "stops": [body.stop] if isinstance(body.stop, str) else [stop for stop in body.stop or [] if stop],
        "stream": bool(body.stream),
        "include_usage": body.stream_options is not None and body.stream_options.include_usage,
    }


def _decode(raw: bytes, kind: type[Body]) -> Body:
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the request's body: {str(error)[:1].lower()}{str(error)[1:]}") from error


def _refuse_what_cannot_be(body: _Body) -> None:
    if body.presence_penalty or body.frequency_penalty:
        name = "presence_penalty" if body.presence_penalty else "frequency_penalty"
        raise _refused(name, "the engines sample without penalties")
    if body.logit_bias:
        raise _refused("logit_bias", "the engines sample without biases")


def _message(message: Message, number: int) -> Message:
    """Return a message without empty fields, with its content as text. Raises `ApiError`."""
    where = f"messages[{number}]"
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise ApiError(400, f"{where}: role must be text", param="messages")
    if isinstance(content, list):
        odd = [part for part in content if not isinstance(part, dict) or not isinstance(part.get("text"), str)]
        if odd:
            raise ApiError(400, f"{where}: only text can be read, not images, audio or files", param="messages")
        content = "".join(part["text"] for part in content)
    if content is None and (role == "assistant" or message.get("tool_calls")):
        content = ""
    if not isinstance(content, str):
        raise ApiError(400, f"{where}: content must be text", param="messages")
    kept = {name: value for name, value in message.items() if value not in (None, [], {})}
    return {**kept, "role": role, "content": content}


def _prompt(prompt: str | list[Any]) -> tuple[str | None, list[int] | None]:
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, str) and prompt:
        return prompt, None
    if isinstance(prompt, list) and prompt and all(type(token) is int and token >= 0 for token in prompt):
        return None, prompt
    raise ApiError(400, "prompt: give one text, or one list of token ids", param="prompt")


def _refused(name: str, why: str) -> ApiError:
    return ApiError(400, f"{name}: {why}", code="unsupported_parameter", param=name)


# ---- answers


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
