"""The chat template of a model turns messages into text, exactly as Hugging Face does, without importing its libraries.

Templates come with models and are foreign code. They run in jinja's sandbox, and their errors become one `ModelError`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from headrace.errors import ModelError


class ChatTemplate:
    """A compiled chat template with the model's special tokens."""

    def __init__(self, source: str, variables: Mapping[str, str], origin: str) -> None:
        """`variables` are the special tokens `bos_token`, `eos_token`, ...; `origin` names the model in errors."""
        self._variables = dict(variables)
        self._origin = origin
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ModelError(f"{origin}: the chat template does not compile: {_first_line(error)}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Return the conversation as text. With the generation prompt, it ends where the assistant's next turn begins.

        `tools` holds descriptions of functions, in the form that the template wants (usually OpenAI's JSON).
        """
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
    """The block `{% generation %}...{% endgeneration %}`, which marks the assistant's words.

    Rendering ignores the marks.
    """

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


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


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
