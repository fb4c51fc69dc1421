"""One attention function, registered with transformers, that hands every call to the current context.

The engine's context reads and writes a paged KV cache; the trainer's context attends within packed sequences. Both use
Hugging Face's model code. The model never builds a mask: the context alone decides which tokens see each other. Under
`torch.compile` the call is one operation that the compiler does not look into, forward or backward.

One compilation serves all layers of a kind and all lengths of a pass. To a compiler, a number on a module is a
constant, so a layer with another number is compiled again. Head sizes should be constants, because the arithmetic on
them is then simple. The number of a layer should not be a constant. So where a compiled layer needs its number, the
number is in a tensor, of which the compiler knows only the shape.

Before a model is served or trained, `check_model` checks that Headrace's attention computes what the model's own code
would compute. A model that does not fit (recurrent layers, position biases, masks that only the model knows) would give
fluent but wrong answers. So such a model is refused when it is loaded, with a one-line error.
"""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol, cast
from weakref import WeakValueDictionary

import torch
from transformers import AttentionInterface

from headrace.errors import ModelError

LAYER = "layer_idx"
"""The attribute in which transformers' attention modules keep the number of their layer."""
COLUMN = "headrace_column"
"""The attribute of an experts module that says which column of a routing record belongs to the module."""
COMPILATIONS = 64
"""How often the code of one layer may be compiled. At this limit torch raises an error."""
_SUFFIX = "_as_tensor"
_STATEFUL = ("linear", "conv", "mamba", "recurrent", "ssm", "rwkv", "chunked")
_LONGEST_WINDOW = 64
"""The check's forward pass is longer than windows up to this size. Longer windows are only compared with the
configuration."""
_TOLERANCE = {torch.float32: 5e-4, torch.float64: 5e-4}
"""The largest allowed difference of log-probabilities, relative to their spread."""
_COARSE, _COARSE_MEAN = 0.3, 0.05
"""The same for 16 bits, where rounding alone makes a deep model differ by 0.15; and the largest mean difference."""


def prepare_to_compile(model: Any) -> None:
    """Put the numbers of this model's layers where `number_of` finds them. Call this before compiling."""
    # The import is here because it takes a second, and most processes compile nothing.
    import torch._dynamo

    # Kinds of layers, passes with and without gradients, and several models in one process all count for one function.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, COMPILATIONS)
    # Epsilons and scales are equal in all layers. As variables, each would cost the host a tensor in every call.
    torch._dynamo.config.specialize_float = True
    for module in model.modules():
        for name in (LAYER, COLUMN):
            if isinstance(number := getattr(module, name, None), int):
                setattr(module, name + _SUFFIX, torch.tensor(number))


def number_of(module: torch.nn.Module, name: str) -> torch.Tensor | None:
    """Return the number of this name for compiled code: a tensor in host memory, or None if there is none.

    Compiled code must not ask whether the module has the plain number: some versions of torch would guard its value.
    """
    return getattr(module, name + _SUFFIX, None)


ATTENTION = "headrace"
"""The name to load models with: `attn_implementation=ATTENTION`."""

_IGNORED = {"position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states", "is_causal"}
_IGNORED |= {"output_router_logits", "return_dict", "num_items_in_batch", "past_key_values", "cu_seq_lens_q"}

ANY_LAYER = -1
"""The layer of a call compiled for training. If compiled code read the index, each layer would be compiled alone."""


@dataclass(frozen=True)
class AttentionCall:
    """One layer's attention over packed tokens: T tokens, H query heads, K key/value heads, head size D."""

    layer: int
    """The index of the layer, or `ANY_LAYER`."""
    query: torch.Tensor  # [1, H, T, D]
    key: torch.Tensor  # [1, K, T, D], not repeated
    value: torch.Tensor  # [1, K, T, Dv]
    scaling: float
    window: int | None
    """The window size: a token sees itself and the `window - 1` tokens before it. None means no limit."""
    softcap: float | None
    sinks: torch.Tensor | None
    """The logits of one attention sink per head (GPT-OSS), [H]."""


class AttentionContext(Protocol):
    """The context of one forward pass, which decides which tokens see each other."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Return the attention output, [1, T, H, Dv]."""


class TrainedContext(AttentionContext, Protocol):
    """A context whose attention can be differentiated without autograd. The context must outlive the backward pass."""

    ticket: int
    """The number that `keep_for_backward` returned."""

    def attend_saving(self, call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the attention output, [1, T, H, Dv], and the log-sum-exp of each query's scores, float32 [H, T]."""

    def attend_backward(
        self, call: AttentionCall, output: torch.Tensor, lse: torch.Tensor, gradient: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return the gradients of queries, keys and values, [1, T, H or K, D], and of the sinks, if there are any."""


_tickets = itertools.count(1)
_kept: WeakValueDictionary[int, TrainedContext] = WeakValueDictionary()


def keep_for_backward(context: TrainedContext) -> int:
    """Return a number by which a compiled backward pass, in another thread, finds the context of its forward pass."""
    ticket = next(_tickets)
    _kept[ticket] = context
    return ticket


_context: ContextVar[AttentionContext | None] = ContextVar("headrace_attention", default=None)


@contextmanager
def attending(context: AttentionContext) -> Iterator[None]:
    """Hand every attention call inside this context manager to this context."""
    token = _context.set(context)
    try:
        yield
    finally:
        _context.reset(token)


def current_context() -> AttentionContext:
    """Return the current context. Raises outside `attending`."""
    context = _context.get()
    if context is None:
        raise RuntimeError("a model loaded for Headrace was called outside of `attending(...)`")
    return context


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    # A keyword wins over the attribute: some families set it on every layer and pass None for full attention.
    window = kwargs.pop("sliding_window") if "sliding_window" in kwargs else getattr(module, "sliding_window", None)
    softcap = kwargs.pop("softcap", None)
    sinks = kwargs.pop("s_aux", None)
    unknown = sorted(k for k, v in kwargs.items() if v is not None and k not in _IGNORED)
    if unknown:
        raise ModelError(f"{type(module).__name__} asks its attention for {', '.join(unknown)}: not supported")
    scale = float(scaling) if scaling is not None else query.shape[-1] ** -0.5
    settings = scale, int(window) if window else None, float(softcap) if softcap else None
    if (
        torch.compiler.is_compiling()
        and torch.is_grad_enabled()
        and (query.requires_grad or key.requires_grad or value.requires_grad)
    ):
        return _trained(query, key, value, sinks, *settings)[0], None
    if torch.compiler.is_compiling():
        number = number_of(module, LAYER)
        assert number is not None, "a layer is compiled before `prepare_to_compile`"
        return _opaque(query, key, value, sinks, number, *settings), None
    return _in_context(AttentionCall(int(getattr(module, LAYER)), query, key, value, *settings, sinks)), None


def _in_context(call: AttentionCall) -> torch.Tensor:
    # The output is contiguous, because the compiler was promised that layout.
    return current_context().attend(call).contiguous()


# To the compiler, attention is one opaque operation: the context is looked up when it runs, not when it is compiled.
@torch.library.custom_op("headrace::attend", mutates_args=())
def _opaque(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    layer: torch.Tensor,
    scaling: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    return _in_context(AttentionCall(int(layer), query, key, value, scaling, window, softcap, sinks))


@_opaque.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *others: Any) -> torch.Tensor:
    return _empty_output(query, value)


def _empty_output(query: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])


@torch.library.custom_op("headrace::attend_trained", mutates_args=())
def _trained(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    scaling: float,
    window: int | None,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the output, the log-sum-exps, and the number of the context, which the backward pass needs."""
    context = cast(TrainedContext, current_context())
    call = AttentionCall(ANY_LAYER, query, key, value, scaling, window, softcap, sinks)
    output, lse = context.attend_saving(call)
    return output.contiguous(), lse.contiguous(), torch.tensor(context.ticket)


@_trained.register_fake
def _(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *others: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    wide = torch.promote_types(query.dtype, torch.float32)
    lse = query.new_empty(query.shape[1], query.shape[2], dtype=wide)
    return _empty_output(query, value), lse, torch.empty((), dtype=torch.int64, device="cpu")


@torch.library.custom_op("headrace::attend_trained_backward", mutates_args=())
def _trained_backward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    output: torch.Tensor,
    lse: torch.Tensor,
    ticket: torch.Tensor,
    gradient: torch.Tensor,
    scaling: float,
    window: int | None,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    context = _kept.get(int(ticket))
    if context is None:
        raise RuntimeError("the attention context of a row was dropped before its backward pass")
    call = AttentionCall(ANY_LAYER, query, key, value, scaling, window, softcap, sinks)
    *found, of_sinks = context.attend_backward(call, output, lse, gradient)
    dq, dk, dv = (part.contiguous() for part in found)
    return dq, dk, dv, query.new_empty(0) if of_sinks is None else of_sinks


@_trained_backward.register_fake
def _(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor | None, *others: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    dq, dk, dv = (x.new_empty(1, x.shape[2], x.shape[1], x.shape[3]) for x in (query, key, value))
    return dq, dk, dv, query.new_empty(0) if sinks is None else torch.empty_like(sinks)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    query, key, value, sinks, *settings = inputs
    ctx.save_for_backward(query, key, value, sinks, *output)
    ctx.settings = settings


def _differentiate(ctx: Any, gradient: torch.Tensor, *_: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    *found, of_sinks = _trained_backward(*ctx.saved_tensors, gradient.contiguous(), *ctx.settings)
    dq, dk, dv = (part.transpose(1, 2) for part in found)
    return dq, dk, dv, None if ctx.saved_tensors[3] is None else of_sinks, None, None, None


_trained.register_autograd(_differentiate, setup_context=_save)

AttentionInterface.register(ATTENTION, _attention)


class ReferenceContext:
    """Attention within packed sequences in its plainest form: slow and obvious on purpose. It records every call."""

    def __init__(self, lengths: list[int]) -> None:
        self.layers: list[int] = []
        self.windows: dict[int, int | None] = {}
        sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        position = torch.cat([torch.arange(n) for n in lengths])
        self._distance = position[:, None] - position[None]
        self._visible = (sequence[:, None] == sequence[None]) & (self._distance >= 0)

    def visible(self, window: int | None) -> torch.Tensor:
        """Return which token (row) sees which (column): its own sequence up to itself, within the window. [T, T]."""
        return self._visible if window is None else self._visible & (self._distance < window)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Return the attention output of one layer, [1, T, H, Dv]."""
        self.layers.append(call.layer)
        self.windows[call.layer] = call.window
        visible = self.visible(call.window)
        repeat = call.query.shape[1] // call.key.shape[1]
        key, value = (x.repeat_interleave(repeat, dim=1) for x in (call.key, call.value))
        scores = (call.query @ key.transpose(-1, -2)).float() * call.scaling
        if call.softcap is not None:
            scores = torch.tanh(scores / call.softcap) * call.softcap
        scores = scores.masked_fill(~visible.to(scores.device), float("-inf"))
        if call.sinks is not None:
            sinks = call.sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
            weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        return (weights.to(value.dtype) @ value).transpose(1, 2)


def check_model(model: Any, max_length: int | None = None) -> None:
    """Raise a one-line `ModelError` unless this model, loaded with Headrace's attention, computes what it should.

    `max_length` is the longest sequence that the model will see, if known: some rotary embeddings are safe only
    below a certain length.
    """
    name = type(model).__name__
    config = model.config.get_text_config()
    _check_config(name, config, max_length)
    window = getattr(config, "sliding_window", None) or 0
    lengths = [5, max(12, window + 4) if window <= _LONGEST_WINDOW else 12]
    device = next(model.parameters()).device
    vocabulary = model.get_input_embeddings().weight.shape[0]
    # Any spread of token ids will do; a prime step keeps neighbours different.
    ids = (torch.arange(sum(lengths)) * 7919 + 11) % vocabulary
    context = ReferenceContext(lengths)
    try:
        packed = _packed_logprobs(model, ids.to(device), lengths, context)
    except ModelError as error:
        raise ModelError(f"{name} cannot be served: {error}") from error
    _check_calls(name, config, context)
    alone = _eager_logprobs(model, ids.to(device), lengths)
    differences = (packed - alone).abs() / alone.std().clamp_min(1e-6)
    error_size, mean = float(differences.max()), float(differences.mean())
    if not (error_size <= _TOLERANCE.get(model.dtype, _COARSE) and mean <= _COARSE_MEAN):
        raise ModelError(
            f"{name} cannot be served: packed sequences differ from the model's own attention"
            f" (relative error {error_size:.2g})"
        )


def _check_config(name: str, config: Any, max_length: int | None) -> None:
    stateful = sorted({t for t in _layer_types(config) if any(word in t for word in _STATEFUL)})
    if stateful:
        raise ModelError(f"{name} cannot be served: it has {', '.join(stateful)} layers, only full attention is known")
    if getattr(config, "alibi", False) or getattr(config, "position_embedding_type", None) == "alibi":
        raise ModelError(f"{name} cannot be served: ALiBi position biases are not known")
    if getattr(config, "use_bidirectional_attention", None) or getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{name} cannot be served: its attention is not causal")
    for rope_type, original in _ropes(config):
        if "dynamic" in rope_type:
            raise ModelError(f"{name} cannot be served: dynamic rotary scaling depends on the rest of the batch")
        if rope_type == "longrope" and (max_length is None or original is None or max_length > original):
            raise ModelError(
                f"{name} cannot be served: longrope depends on the rest of the batch beyond"
                f" {original} tokens (set a longest length of at most that)"
            )


def _layer_types(config: Any) -> list[str]:
    for attribute in ("layer_types", "layers_block_type", "block_types"):
        if types := getattr(config, attribute, None):
            return [str(t) for t in types]
    return []


def _ropes(config: Any) -> Iterator[tuple[str, int | None]]:
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    nested = [p for p in parameters.values() if isinstance(p, dict)]
    for rope in nested or [parameters]:
        original = rope.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", None
        )
        yield str(rope.get("rope_type") or rope.get("type") or "default"), original


def _check_calls(name: str, config: Any, context: ReferenceContext) -> None:
    layers = int(config.num_hidden_layers)
    if not context.layers:
        raise ModelError(f"{name} cannot be served: it never calls transformers' attention interface")
    if sorted(context.layers) != list(range(layers)):
        raise ModelError(
            f"{name} cannot be served: its {layers} layers made {len(context.layers)} attention calls"
            f" to {len(set(context.layers))} layers, not one each"
        )
    configured = getattr(config, "sliding_window", None) or None
    types = _layer_types(config)
    for layer, window in sorted(context.windows.items()):
        sliding = types[layer] == "sliding_attention" if types else configured is not None
        if window != (configured if sliding else None):
            raise ModelError(
                f"{name} cannot be served: layer {layer} asks for a window of {window},"
                f" its configuration for {configured if sliding else None}"
            )


@torch.no_grad()
def _packed_logprobs(model: Any, ids: torch.Tensor, lengths: list[int], context: ReferenceContext) -> torch.Tensor:
    positions = torch.cat([torch.arange(n) for n in lengths]).to(ids.device)
    with attending(context):
        logits = model(input_ids=ids[None], position_ids=positions[None], use_cache=False).logits
    return torch.log_softmax(logits[0].float(), -1)


@torch.no_grad()
def _eager_logprobs(model: Any, ids: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    model.set_attn_implementation("eager")
    try:
        logits = [model(input_ids=part[None], use_cache=False).logits[0] for part in torch.split(ids, lengths)]
    finally:
        model.set_attn_implementation(ATTENTION)
    return torch.log_softmax(torch.cat(logits).float(), -1)
