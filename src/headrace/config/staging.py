"""Where an embedded engine holds a new version until it is live: pure arithmetic on bytes.

With `staging = "auto"`, a GPU holds a second copy of the weights beside the live ones, unless the KV cache needs that
memory more.
"""

from typing import Literal

import msgspec

from headrace.config.schema import Config, EngineConfig

_GIB = 2**30


class StagingChoice(msgspec.Struct, frozen=True):
    """Where new weights are staged, and why. With "none" they are copied straight into the live weights, in a pause."""

    staging: Literal["device", "host", "none"]
    why: str
    device_bytes: int = 0
    """The bytes of the GPU's memory that the KV cache must leave to staged weights."""


def chosen_staging(
    asked: Literal["auto", "device", "host", "none"],
    weights: int,
    *,
    on_gpu: bool,
    room: int = 0,
    cache: int = 0,
    exact: bool = False,
) -> StagingChoice:
    """Choose where versions of `weights` bytes are staged.

    `room` are the bytes of the GPU that are left for cache and staged weights, and `cache` those that the cache asks
    for. With `exact`, the cache must have them all. Otherwise the second copy may take up to half of the room.
    """
    if asked != "auto":
        return StagingChoice(asked, f'[engine] staging = "{asked}"', weights if asked == "device" and on_gpu else 0)
    if not on_gpu:
        return StagingChoice("device", "the engine is on a CPU")
    sizes = f"{weights / _GIB:.1f} GiB of {room / _GIB:.1f} GiB beside the live weights"
    if weights + cache <= room or (not exact and 2 * weights <= room):
        return StagingChoice("device", f"a second copy takes {sizes}", weights)
    asks = f"and the KV cache asks for {cache / _GIB:.1f} GiB"
    return StagingChoice("none", f"a second copy would take {sizes}, {asks}")


def with_second_copy(config: Config) -> EngineConfig:
    """Return the section [engine] with `auto` resolved where the configuration itself needs a second copy."""
    engine = config.engine
    if engine.staging == "auto" and needs_second_copy(config):
        return msgspec.structs.replace(engine, staging="device")
    return engine


def needs_second_copy(config: Config) -> str:
    """Return the setting that needs staged weights beside the live ones; empty if there is none."""
    if config.delivery.send == "delta" and config.lora is None:
        return '[delivery] send = "delta"'
    return '[delivery] transport = "nccl"' if config.delivery.transport == "nccl" else ""
