"""What every section of the configuration is made of: the types and ranges of values. It imports no torch."""

from typing import Annotated, get_args, get_type_hints

from msgspec import Meta, Struct


class Names(tuple[str, ...]):
    """The names that a key takes: `kind: Annotated[str, Names(("embedded", "vllm"))]`.

    A reference to the user's code, `module:attribute` or `path/to/file.py:attribute`, is allowed too. Only its form is
    checked here; the stage that the key belongs to imports it.
    """


Positive = Annotated[int, Meta(ge=1)]
PROCESSES = 4096
"""The most processes of one role."""
Processes = Annotated[int, Meta(ge=1, le=PROCESSES)]
NonNegative = Annotated[int, Meta(ge=0)]
PositiveFloat = Annotated[float, Meta(gt=0)]
NonNegativeFloat = Annotated[float, Meta(ge=0)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
Share = Annotated[float, Meta(gt=0, le=1)]
BelowOne = Annotated[float, Meta(ge=0, lt=1)]
Gpus = NonNegative | str | list[NonNegative]
"""A number of GPUs, a list of their indices, or a text: `"auto"`, `"0-5,7"`, `"host:0-3"`."""


class Section(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The base class of every section. A key that is not declared is an error."""


def names_of(section: type[Struct], key: str) -> Names | None:
    """Return the names that this key of a section takes beside a reference; None for a key of another type."""
    hint = get_type_hints(section, include_extras=True)[key]
    return next((each for each in get_args(hint) if isinstance(each, Names)), None)


def is_reference(value: str) -> bool:
    """Return whether a value has the form of a reference to the user's code."""
    where, _, attribute = value.rpartition(":")
    return bool(where.strip() and attribute.strip())
