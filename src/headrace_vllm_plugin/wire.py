"""The messages between the plugin and the engine that drives it.

This module imports neither torch nor vLLM, because both sides import it.
"""

from typing import Annotated

import msgspec

from headrace.delivery.base import Entry, Part

BACKEND = "headrace"
PROTOCOL = 6
"""The version of these messages, increased with every change; both sides must have the same."""
TRUNCATION = "headrace_truncation"
"""A key in the `extra_args` of a request. Its value is the `Truncation` that the plugin applies instead of vLLM."""


class Facts(msgspec.Struct, kw_only=True):
    """The properties and abilities of a worker."""

    protocol: int
    vllm: str
    """The version of vLLM."""
    backend: str
    """The backend of its weight transfer; empty if there is none."""
    model: str
    dtype: str
    vocabulary: int
    max_length: int
    logprobs_mode: str
    slots: int
    blocks: int
    block_size: int
    position_noise: bool
    """Whether a token's noise is a function of (seed, position)."""
    truncation: bool
    """Whether the worker applies a request's `Truncation`."""
    kept: bool = False
    """Whether the server says which tokens truncation kept. Such a server demands a `top_k` of every request."""
    expert_layers: list[int] = []
    """The layers whose experts the server records; empty if it records none."""
    device: str = "cpu"
    """The kind of device that the worker computes on: `cpu` or `cuda`."""
    workers: int = 1
    """The number of worker processes that share one model."""
    quantization: str = ""
    """The method by which the server quantises its weights; empty if it serves them in `dtype`."""
    quantized_checkpoint: bool = False
    """Whether the files of the model hold weights that are quantised already."""
    cache_dtype: str = "auto"
    """The dtype of keys and values in the cache; `auto` means `dtype`."""


class Truncation(msgspec.Struct, frozen=True):
    """A truncation: `top_k`, then `top_p` of the mass that is left, then `min_p`. The defaults cut nothing."""

    top_k: Annotated[int, msgspec.Meta(ge=0)] = 0
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0


class FetchOrder(msgspec.Struct, kw_only=True):
    """An order to fetch a version: the part of a manifest that a worker needs."""

    version: int
    transport: str
    location: str
    entries: list[Entry]
    plan_digest: int
    digest: int
    parts: list[Part] = []
    """The parts of a version that several ranks of a trainer published. Then `location` is empty."""
    keys: str = ""
    """The file with the keys of the run, for transports that encrypt."""
    scaling: float | None = None
    """For an adapter: the factor of its product."""
    base_digest: int = 0
    """For an adapter: the digest of the weights that it is added to."""


class StagingState(msgspec.Struct, kw_only=True):
    """The state of a fetch."""

    version: int
    done: bool = False
    error: str = ""
    """Why the fetch did not begin or failed."""
    digest: int = 0
    seconds: float = 0.0


class Live(msgspec.Struct, kw_only=True):
    """The comparison of the visible part of the live weights with the staged weights."""

    visible: int = 0
    """The number of staged tensors whose live counterpart was found."""
    hidden: int = 0
    """The number of staged tensors whose live counterpart cannot be seen."""
    cut: int = 0
    """The number of visible tensors of which this worker holds only a slice."""
    digest: int = 0
    """The digest of the visible weights; if none are hidden or cut, the digest of all weights."""
    wrong: list[str] = []
    """The names of tensors whose live bytes differ from the staged bytes."""
    missing: list[str] = []
    """The names of parameters that the last version did not fill."""
    error: str = ""
    """Why the weights that were loaded may not be those that were staged."""
