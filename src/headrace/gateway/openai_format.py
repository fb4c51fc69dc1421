"""OpenAI's formats: the bodies of requests are checked, answers grow token by token, and they become JSON values.

A parameter that would change what is sampled, and that the engines do not support, is refused and never ignored. A
parameter that changes nothing (`user`, `store`, ...) is accepted. Answers are sent whole, or as the chunks of a stream.

Text that was passed on never changes. Text that a later token could still change (half a character, the beginning of a
stop string) is held back, so the pieces of a stream joined together are the text of the whole answer.

Function calls are read as many models write them: `<tool_call>{"name": ..., "arguments": ...}</tool_call>`. Text that
cannot be read as a call stays text, for the agent to judge. Nothing is repaired.
"""

import re
import secrets
import time
from collections.abc import Sequence
from itertools import accumulate
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

from headrace.engines.base import Delta
from headrace.gateway.base import ApiError, Chat, Message

LONGEST_STOP = 1000
HALF = "\N{REPLACEMENT CHARACTER}"
"""The character that a decoder returns for bytes that do not form a complete character yet."""
OPEN_CALL = "<tool_call>"
_CALLS = re.compile(r"(?:\s*<tool_call>(.*?)</tool_call>)+\s*$", re.DOTALL)
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


class _Written(msgspec.Struct, kw_only=True):
    name: str
    arguments: dict[str, Any] = {}


def split_calls(text: str) -> tuple[str, list[dict[str, Any]]]:
    """Split an answer into its text and its final calls, as in OpenAI's messages. An unreadable call stays text."""
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
        ended = delta.finish == "stop" and not {*self.token_ids[-1:]}.isdisjoint(self._chat.stop_token_ids)
        spoken = self.token_ids[:-1] if ended else self.token_ids
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


class Answered(NamedTuple):
    """All answers to one request."""

    prompt_tokens: int
    choices: list[StreamedAnswer]

    def usage(self) -> dict[str, int]:
        """Return the numbers of prompt tokens and sampled tokens, as OpenAI names them."""
        prompt, sampled = self.prompt_tokens, sum(len(choice) for choice in self.choices)
        return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


Body = TypeVar("Body")
LARGEST = 2**31 - 1
"""The largest number that engines can read."""
Count = Annotated[int, Meta(ge=1, le=LARGEST)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]


class _StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool = False
    include_obfuscation: bool = False


class CompletionRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields that the request bodies of both endpoints have."""

    model: str
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=LARGEST)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    max_tokens: Count | None = None
    stop: str | Annotated[list[str], Meta(max_length=16)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, float] | None = None
    user: str | None = None

    @property
    def choices(self) -> int:
        """The number of answers that the client asks for."""
        return self.n or 1

    @property
    def stops(self) -> list[str]:
        """The texts that end an answer."""
        return [stop for stop in ([self.stop] if isinstance(self.stop, str) else self.stop or []) if stop]

    def check(self) -> None:
        """Raise `ApiError` if the engines cannot do what the client asks for."""
        if self.presence_penalty or self.frequency_penalty:
            name = "presence_penalty" if self.presence_penalty else "frequency_penalty"
            raise _refused(name, "the engines sample without penalties")
        if self.logit_bias:
            raise _refused("logit_bias", "the engines sample without biases")
        if any(len(stop) > LONGEST_STOP for stop in self.stops):
            raise _refused("stop", f"a stop string has at most {LONGEST_STOP} characters")


class ChatRequest(CompletionRequest, kw_only=True, forbid_unknown_fields=True):
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

    @property
    def characters(self) -> int:
        """The number of characters that the policy would have to read, at least."""
        return sum(len(message["content"]) for message in self.messages)

    def check(self) -> None:
        """See `CompletionRequest`. Messages lose their empty fields, and tools that may not be used are removed."""
        super().check()
        if self.top_logprobs:
            raise _refused("top_logprobs", "the log-probability of the sampled token is recorded, not those of others")
        if self.response_format is not None and self.response_format.get("type") != "text":
            raise _refused("response_format", "answers are sampled freely: only {'type': 'text'} is possible")
        if self.tool_choice not in (None, "auto", "none"):
            raise _refused("tool_choice", "the policy chooses: only 'auto' and 'none' are possible")
        self.messages = [_message(message, number) for number, message in enumerate(self.messages)]
        if not self.messages:
            raise ApiError(400, "messages: there is none", param="messages")
        self.max_tokens = self.max_completion_tokens or self.max_tokens
        if not self.tools or self.tool_choice == "none":
            self.tools = None


class TextRequest(CompletionRequest, kw_only=True, forbid_unknown_fields=True):
    """The body of `/v1/completions`."""

    prompt: str | list[Any]
    logprobs: int | None = None
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None

    @property
    def characters(self) -> int:
        """The number of characters or token ids that the policy would have to read."""
        return len(self.prompt)

    def check(self) -> None:
        """See `CompletionRequest`. The prompt becomes one text or one list of token ids."""
        super().check()
        if self.logprobs:
            raise _refused(
                "logprobs", "the log-probability of the sampled token is recorded, not those of others: take 0"
            )
        if self.echo or self.suffix or self.best_of not in (None, 1):
            name = "echo" if self.echo else "suffix" if self.suffix else "best_of"
            raise _refused(name, "it is not supported")
        prompt = self.prompt
        if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
            prompt = prompt[0]
        ids = isinstance(prompt, list) and all(type(token) is int and 0 <= token <= LARGEST for token in prompt)
        if not prompt or not (ids or isinstance(prompt, str)):
            raise ApiError(400, "prompt: give one text, or one list of token ids", param="prompt")
        self.prompt = prompt


def read_body(raw: bytes, kind: type[Body]) -> Body:
    """Read the body of a request. Raises `ApiError`."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the request's body: {str(error)[:1].lower()}{str(error)[1:]}") from error


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


def _refused(name: str, why: str) -> ApiError:
    return ApiError(400, f"{name}: {why}", code="unsupported_parameter", param=name)


# ---- responses


class ResponseShape:
    """The answers to one request, as JSON values."""

    def __init__(self, want: ChatRequest | TextRequest, chat: Chat) -> None:
        self._chat = chat
        self._is_chat = isinstance(want, ChatRequest)
        self._logprobs_wanted = bool(want.logprobs) if isinstance(want, ChatRequest) else want.logprobs is not None
        chat_object = "chat.completion.chunk" if want.stream else "chat.completion"
        self._head = {
            "id": ("chatcmpl-" if self._is_chat else "cmpl-") + secrets.token_hex(12),
            "object": chat_object if self._is_chat else "text_completion",
            "created": int(time.time()),
            "model": want.model,
        }
        self._told: dict[int, int] = {}
        """Choice -> how many of its tokens have their log-probabilities in chunks already."""

    def whole(self, answered: Answered) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""
        choices = []
        for number, streamed in enumerate(answered.choices):
            logprobs = self._logprobs(streamed, 0)
            if not self._is_chat:
                choices.append(_text_choice(number, streamed.text, logprobs, streamed))
                continue
            message = streamed.message()
            if streamed.calls and not streamed.text:
                message["content"] = None
            finish = _finish(streamed)
            choices.append({"index": number, "message": message, "logprobs": logprobs, "finish_reason": finish})
        return {**self._head, "choices": choices, "usage": answered.usage()}

    def first(self, number: int) -> dict[str, Any]:
        """Return the first chunk of a choice of a chat."""
        return self._chunk(number, {"role": "assistant", "content": ""})

    def piece(self, number: int, text: str, streamed: StreamedAnswer) -> list[dict[str, Any]]:
        """Return the chunks for a piece of text. The last piece of a choice also carries its finish reason."""
        logprobs = self._logprobs(streamed, self._told.get(number, 0))
        self._told[number] = len(streamed)
        if not self._is_chat:
            return [{**self._head, "choices": [_text_choice(number, text, logprobs, streamed)]}]
        chunks = [self._chunk(number, {"content": text}, logprobs)] if text or logprobs else []
        if streamed.calls:
            calls = [{"index": index, **call} for index, call in enumerate(streamed.calls)]
            chunks.append(self._chunk(number, {"tool_calls": calls}))
        if streamed.finish is not None:
            chunks.append(self._chunk(number, {}, finish=_finish(streamed)))
        return chunks

    def last(self, answered: Answered) -> dict[str, Any]:
        """Return the last chunk, which holds only the usage."""
        return {**self._head, "choices": [], "usage": answered.usage()}

    def _chunk(
        self, number: int, delta: dict[str, Any], logprobs: Any = None, finish: str | None = None
    ) -> dict[str, Any]:
        choice = {"index": number, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return {**self._head, "choices": [choice]}

    def _logprobs(self, streamed: StreamedAnswer, start: int) -> dict[str, Any] | None:
        """Return the log-probabilities of the tokens from `start` on, including an end token, if they are wanted."""
        if not self._logprobs_wanted:
            return None
        values = streamed.logprobs[start:]
        texts = [self._chat.decode([token]) for token in streamed.token_ids[start:]]
        if self._is_chat:
            entries = [
                {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}
                for text, value in zip(texts, values, strict=True)
            ]
            return {"content": entries, "refusal": None}
        begin = len(self._chat.decode(streamed.token_ids[:start])) if start else 0
        offsets = list(accumulate((len(text) for text in texts), initial=begin))[:-1]
        return {"tokens": texts, "token_logprobs": values, "top_logprobs": None, "text_offset": offsets}


def _text_choice(number: int, text: str, logprobs: Any, streamed: StreamedAnswer) -> dict[str, Any]:
    return {"index": number, "text": text, "logprobs": logprobs, "finish_reason": streamed.finish}


def _finish(streamed: StreamedAnswer) -> str | None:
    return "tool_calls" if streamed.calls else streamed.finish
