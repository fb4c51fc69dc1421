"""The options of the delivery benchmark and their check. No torch is imported, so a mistake is reported at once."""

from __future__ import annotations

import msgspec

from headrace.delivery.base import Kind
from headrace.delivery.transports import NAMES, WITHOUT_GPU
from headrace.errors import UserError

KINDS: tuple[Kind, ...] = ("full", "delta", "adapter")
RANK = 16
"""The rank of the adapter that is sent."""


class DeliveryBench(msgspec.Struct, frozen=True, kw_only=True):
    """The options of `headrace bench delivery`, as they were given."""

    model: str
    """The name of a shape (see `models.shapes`), or a model directory."""
    transports: tuple[str, ...] = ("shm",)
    sends: tuple[str, ...] = ("full",)
    engines: int = 1
    versions: int = 5
    """The number of versions that are measured, after a few that are not."""
    changed: float = 0.01
    """The share of words (single values of a tensor) in which a version differs from the version before."""
    per_parameter: bool = False
    """Whether nccl is measured a second time, with one broadcast for each parameter."""
    decode: int = 0
    """The number of sequences that each engine decodes meanwhile; 0 if engines only hold weights."""
    dtype: str = ""
    device: str = "auto"
    threads: int = 1
    """The number of torch's threads in each process."""
    seed: int = 0


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement: a transport, and what it sends. It is one line of the printed table."""

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
    """Return the measurements in order. Raises `UserError` if a transport needs a GPU and the device is a CPU."""
    if device == "cpu" and (unable := [name for name in options.transports if name not in WITHOUT_GPU]):
        raise UserError(f"--transport {unable[0]}: needs --device cuda")
    found = []
    for transport in dict.fromkeys(options.transports):
        for send in (kind for kind in KINDS if kind in options.sends):
            found.append(Row(transport=transport, send=send))
            if options.per_parameter and transport == "nccl":
                found.append(Row(transport=transport, send=send, per_parameter=True))
    return found
