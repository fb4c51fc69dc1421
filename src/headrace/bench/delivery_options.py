"""What the delivery benchmark is asked for, checked once. No torch here: a mistake is answered at once."""

from __future__ import annotations

import msgspec

from headrace.delivery.base import Kind
from headrace.delivery.transports import NAMES, WITHOUT_GPU
from headrace.errors import UserError

KINDS: tuple[Kind, ...] = ("full", "delta", "adapter")
RANK = 16
"""Of the adapter that is sent."""


class DeliveryBench(msgspec.Struct, frozen=True, kw_only=True):
    """The options of `headrace bench delivery`, as they were given."""

    model: str
    """A named shape, or a model directory."""
    transports: tuple[str, ...] = ("shm",)
    sends: tuple[str, ...] = ("full",)
    engines: int = 1
    versions: int = 5
    """That are measured, after `WARM_UP` others."""
    changed: float = 0.01
    """The share of words in which a version differs from the one before."""
    per_parameter: bool = False
    decode: int = 0
    """Sequences that each engine decodes meanwhile; 0: engines only hold weights."""
    dtype: str = ""
    device: str = "auto"
    threads: int = 1
    """Of torch, in each process."""
    seed: int = 0


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the comparison."""

    transport: str
    send: Kind
    per_parameter: bool = False

    def __str__(self) -> str:
        return f"{self.transport}, {self.send}{', per parameter' if self.per_parameter else ''}"


def check_options(options: DeliveryBench) -> None:
    """Raise a one-line `UserError` for the first option that makes no sense."""
    for name, value in (
        ("--engines", options.engines),
        ("--versions", options.versions),
        ("--threads", options.threads),
    ):
        if value < 1:
            raise UserError(f"{name} {value}: must be at least 1")
    if options.decode < 0:
        raise UserError(f"--decode {options.decode}: must not be negative")
    if not 0 <= options.changed <= 1:
        raise UserError(f"--changed {options.changed:g}: a share of the words, from 0 to 1")
    if options.dtype not in ("", "float32", "bfloat16"):
        raise UserError(f"--dtype {options.dtype}: float32 or bfloat16")
    if options.device not in ("auto", "cpu", "cuda"):
        raise UserError(f"--device {options.device}: auto, cpu or cuda")
    if unknown := [name for name in options.transports if name not in NAMES]:
        raise UserError(f"--transport {unknown[0]}: one of {', '.join(NAMES)}")
    if unknown := [name for name in options.sends if name not in KINDS]:
        raise UserError(f"--send {unknown[0]}: one of {', '.join(KINDS)}")
    if options.per_parameter and "nccl" not in options.transports:
        raise UserError("--per-parameter is for --transport nccl: the others have no such way to send")


def rows(options: DeliveryBench, device: str) -> list[Row]:
    """What is measured, in order, on this device."""
    if device == "cpu" and (unable := [name for name in options.transports if name not in WITHOUT_GPU]):
        raise UserError(f"--transport {unable[0]}: needs --device cuda")
    found = []
    for transport in dict.fromkeys(options.transports):
        for send in (kind for kind in KINDS if kind in options.sends):
            found.append(Row(transport=transport, send=send))
            if options.per_parameter and transport == "nccl":
                found.append(Row(transport=transport, send=send, per_parameter=True))
    return found
