"""The chat format of a model converts messages to tokens and back, without torch or transformers.

Only new messages are ever rendered. `open` begins a conversation, and `continue_` gives the tokens that follow the
policy's own turn, so the tokens that the policy sampled stay in the stream unchanged.

The chat template turns messages into text exactly as Hugging Face does. Templates come with models and are foreign
code: they run in jinja's sandbox, and their errors become one `ModelError`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import numpy as np
import numpy.typing as npt
from msgspec import Struct, ValidationError, convert
from tokenizers import AddedToken, Tokenizer

from headrace.config.model_dir import read_object
from headrace.errors import ConfigError, ModelError
from headrace.types import Int32Array

Tools = Sequence[Mapping[str, Any]] | None
"""The descriptions of functions that the policy may call, as the template wants them (usually OpenAI's JSON)."""

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_OPENING = {"role": "user", "content": "Hello"}
_DUMMIES = ("QzJvTurnAlpha", "WxKpTurnBeta")
"""Stand-ins for the policy's turn. There are two, to check that the text after a turn does not depend on its words."""


class ChatFormat:
    """The tokenizer and the chat template of one model directory."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        stop_token_ids: Iterable[int] = (),
        *,
        bos_token_id: int | None = None,
        origin: str = "the model",
        digest: str = "",
    ) -> None:
        """Use `load` instead. The end of turn that the template itself writes also counts as a stop token."""
        self._tokenizer = tokenizer
        self._template = template
        self._bos_token_id = bos_token_id
        self._origin = origin
        self._opened: tuple[Any, Int32Array] | None = None
        """The last opening and its tokens: the rollouts of a group ask for the same one in a row."""
        self.digest = digest
        """The SHA-256 digest of `tokenizer.json`: the same tokens mean the same text."""
        known = list(stop_token_ids)
        if (end := self._end_of_turn()) is not None:
            known.insert(0, end)
        self.stop_token_ids = tuple(sorted(set(known)))
        """The tokens with which the model ends its turn, in ascending order."""
        self.end_token_id = known[0] if known else None
        """The token with which the template itself ends an assistant's turn, or else the first of the stop tokens."""

    @classmethod
    def load(cls, model_dir: str | Path, chat_template: str | None = None) -> ChatFormat:
        """Load the chat format of this directory. Without a chat template, it works for plain text only.

        `chat_template` is the text of a template that takes the place of the directory's own.
        """
        path = Path(model_dir)
        if not path.is_dir():
            raise ModelError(f"[model] path: {path} is not a directory")
        if not (path / "tokenizer.json").is_file():
            raise ModelError(f"[model] path: {path} has no tokenizer.json")
        settings = _read_json(path / "tokenizer_config.json")
        special = _special_tokens(settings, _read_json(path / "special_tokens_map.json"))
        tokenizer = _load_tokenizer(path, settings, special)
        source, origin = _template_source(path, settings), str(path)
        if chat_template is not None:
            source, origin = chat_template, "[model] chat_template"
        return cls(
            tokenizer,
            ChatTemplate(source, special, origin) if source is not None else None,
            _stop_token_ids(path, tokenizer, special),
            bos_token_id=_bos_token_id(tokenizer, special),
            origin=str(path),
            digest=hashlib.sha256((path / "tokenizer.json").read_bytes()).hexdigest(),
        )

    def open(self, messages: Sequence[Mapping[str, Any]], *, tools: Tools = None) -> Int32Array:
        """Return the tokens of the opening messages, up to where the policy's first turn begins."""
        asked = ([dict(message) for message in messages], tools)
        if self._opened is None or self._opened[0] != asked:
            text = self._chat_template().render(messages, add_generation_prompt=True, tools=tools)
            self._opened = (asked, self.encode(text))
        return self._opened[1].copy()

    def continue_(self, messages: Sequence[Mapping[str, Any]], *, ended: bool, tools: Tools = None) -> Int32Array:
        """Return the tokens of these messages, to append after the policy's turn, up to where its next turn begins.

        `ended` says that the policy's last token was a stop token. If it was not, the returned tokens begin with the
        end of the turn. Raises `ModelError` if the template renders a turn differently once messages follow it.
        """
        tokens = self.encode(self._following(messages, tools))
        end = self._leading(tokens, self.stop_token_ids)
        if end is None:
            return tokens
        # White space before the end token is written by the template; a policy does not end its turn with it.
        return tokens[end + 1 :] if ended else tokens[end:]

    @property
    def has_template(self) -> bool:
        """Whether messages can be rendered."""
        return self._template is not None

    def open_text(self, text: str) -> Int32Array:
        """Return the tokens of a prompt that is plain text, after the token that the tokenizer puts before a text."""
        tokens, begin = self.encode(text), self._bos_token_id
        if begin is None or begin in tokens[:1]:
            return tokens
        return np.concatenate([np.asarray([begin], np.int32), tokens])

    def encode(self, text: str) -> Int32Array:
        """Return the tokens of a text, as it is. Special tokens that are written in the text count as such."""
        try:
            return np.asarray(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)
        except Exception as error:  # the library raises bare Exceptions
            raise ModelError(f"{self._origin}/tokenizer.json cannot encode a text: {_first_line(error)}") from error

    def decode(self, token_ids: Sequence[int] | npt.NDArray[np.integer[Any]], *, skip_special: bool = True) -> str:
        """Return the text of these tokens, for scorers and people."""
        return self._tokenizer.decode([int(token) for token in token_ids], skip_special_tokens=skip_special)

    @cached_property
    def longest_token(self) -> int:
        """The number of characters of the longest token. Longer texts than so many a token are not worth encoding."""
        return max(map(len, self._tokenizer.get_vocab()), default=1)

    def token_id(self, token: str) -> int:
        """Return the id of one token by its text (for `[rollouts] stop`)."""
        found = self._tokenizer.token_to_id(token)
        if found is None:
            tokens = self.encode(token)
            if len(tokens) != 1:
                raise ConfigError(f"[rollouts] stop: {token!r} is not one token of the model but {len(tokens)}")
            found = int(tokens[0])
        return found

    def _chat_template(self) -> ChatTemplate:
        if self._template is None:
            raise ModelError(
                f"[model] path: {self._origin} has no chat template, and the prompts are messages: set [model] "
                'chat_template, or [task] format = "text" for prompts as they are'
            )
        return self._template

    def _following(self, messages: Sequence[Mapping[str, Any]], tools: Tools) -> str:
        """Return the text between the policy's turn and its next one, including the end of the turn."""
        template, found = self._chat_template(), set()
        for dummy in _DUMMIES:
            turns = [_OPENING, {"role": "assistant", "content": dummy}]
            _, before, end = template.render(turns, add_generation_prompt=False, tools=tools).partition(dummy)
            rendered = template.render([*turns, *messages], add_generation_prompt=True, tools=tools)
            _, again, following = rendered.partition(dummy)
            found.add(following if before and again and following.startswith(end) else None)
        thought, words = _DUMMIES
        thinking = {"role": "assistant", "content": f"<think>\n{thought}\n</think>\n\n{words}"}
        rendered = template.render([_OPENING, thinking, *messages], add_generation_prompt=True, tools=tools)
        rewrites, forgets = len(found) != 1 or None in found, thought not in rendered.partition(words)[0]
        if rewrites or forgets:
            what = "rewrites" if rewrites else "removes the thinking (<think>) of"
            raise ModelError(
                f"{self._origin}: the chat template {what} an assistant's turn when messages follow it; "
                "episodes of several turns need one that only appends"
            )
        return str(found.pop())

    def _end_of_turn(self) -> int | None:
        """Return the special token that the template writes right after an assistant's turn; None if it writes none."""
        if self._template is None:
            return None
        turns = [_OPENING, {"role": "assistant", "content": _DUMMIES[0]}]
        try:
            text = self._template.render(turns, add_generation_prompt=False)
        except ModelError:
            # The template may still be able to open conversations; `continue_` will report what it refuses.
            return None
        tokens = self.encode(text.partition(_DUMMIES[0])[2])
        special = {id for id, token in self._tokenizer.get_added_tokens_decoder().items() if token.special}
        end = self._leading(tokens, special)
        return None if end is None else int(tokens[end])

    def _leading(self, tokens: Int32Array, wanted: Iterable[int]) -> int | None:
        """Return the position of the first wanted token with only white space before it; None if there is none."""
        wanted = set(wanted)
        for position, token in enumerate(tokens):
            if int(token) in wanted:
                return position
            if self.decode([token], skip_special=False).strip():
                return None
        return None


def _load_tokenizer(path: Path, settings: dict[str, Any], special: Mapping[str, str]) -> Tokenizer:
    try:
        tokenizer: Tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    except Exception as error:  # the library raises bare Exceptions
        raise ModelError(f"{path}/tokenizer.json cannot be read: {_first_line(error)}") from error
    # Limits that were saved with the tokenizer would silently cut or pad prompts.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    added = _as(dict[int, _Named], settings.get("added_tokens_decoder") or {}, path, "added_tokens_decoder")
    for id, token in added.items():
        if tokenizer.token_to_id(token.content) != id:
            raise ModelError(f"{path}: tokenizer.json and tokenizer_config.json disagree about {token.content[:80]!r}")
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    written = [text for text in special.values() if tokenizer.token_to_id(text) is not None]
    missing = dict.fromkeys(text for text in written if text not in known)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in missing])
    return tokenizer


def _special_tokens(settings: dict[str, Any], older: dict[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in _SPECIAL_NAMES:
        value = settings.get(name) or older.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if value:
            found[name] = str(value)
    return found


def _template_source(path: Path, settings: dict[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ModelError(f"{file} cannot be read: {_first_line(error)}") from error
    source: str | list[_NamedTemplate] | None
    source = _as(str | list[_NamedTemplate] | None, settings.get("chat_template"), path, "chat_template")
    if isinstance(source, list):
        named = {entry.name: entry.template for entry in source}
        if "default" not in named:
            raise ModelError(f"{path}: of its chat templates ({', '.join(named)[:200]}) none is the default")
        return named["default"]
    return source


def _bos_token_id(tokenizer: Tokenizer, special: Mapping[str, str]) -> int | None:
    """Return the token that the tokenizer itself puts before every text; None if it puts none there."""
    try:
        before = tokenizer.encode("", add_special_tokens=True).ids[:1]
    except Exception as error:  # the library raises bare Exceptions
        raise ModelError(f"tokenizer.json cannot encode a text: {_first_line(error)}") from error
    begin = tokenizer.token_to_id(special["bos_token"]) if "bos_token" in special else None
    return begin if before == [begin] else None


def _stop_token_ids(path: Path, tokenizer: Tokenizer, special: Mapping[str, str]) -> list[int]:
    """Return the tokens that the model's files call an end, the tokenizer's own `eos_token` first."""
    found: list[int] = []
    if (end := special.get("eos_token")) is not None:
        id = tokenizer.token_to_id(end)
        if id is None:
            raise ModelError(f"{path}: its eos_token {end[:80]!r} is not in tokenizer.json")
        found.append(id)
    for name in ("generation_config.json", "config.json"):
        ids = _as(int | list[int] | None, _read_json(path / name).get("eos_token_id"), path, "eos_token_id", name)
        found += ids if isinstance(ids, list) else [] if ids is None else [ids]
    return found


class _Named(Struct):
    content: str


class _NamedTemplate(Struct):
    name: str
    template: str


def _as(kind: Any, value: Any, path: Path, key: str, file: str = "tokenizer_config.json") -> Any:
    """Return a value of a model's file as this type. Raises `ModelError` if it is of another type."""
    try:
        return convert(value, kind, str_keys=True)
    except ValidationError as error:
        raise ModelError(f"{path / file}: {key}: {_first_line(error)}") from error


def _read_json(path: Path) -> dict[str, Any]:
    """Read the object in this file; an empty object if there is no file."""
    return read_object(path) if path.is_file() else {}


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


# ---- the chat template


class ChatTemplate:
    """A compiled chat template with the model's special tokens."""

    def __init__(self, source: str, variables: Mapping[str, str], origin: str) -> None:
        """`variables` are the special tokens `bos_token`, `eos_token`, ...; `origin` names the model in errors."""
        self._variables = dict(variables)
        self._origin = origin
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ModelError(f"{origin}: the chat template does not compile: {_first_line(error)}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        tools: Tools = None,
    ) -> str:
        """Return the conversation as text. With the generation prompt, it ends where the assistant's turn begins."""
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                tools=None if tools is None else [dict(tool) for tool in tools],
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._variables,
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError) as error:
            roles = ", ".join(message.get("role", "?") for message in messages)
            raise ModelError(
                f"{self._origin}: the chat template refuses a conversation of ({roles}): {_first_line(error)}"
            ) from error


class _GenerationBlock(jinja2.ext.Extension):
    """The block `{% generation %}`, which marks the assistant's words. Rendering ignores the marks."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return plain JSON. jinja's own filter escapes HTML, which models have never seen."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
