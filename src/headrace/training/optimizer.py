"""The optimizer step, the learning rate schedule, and the rule that a gradient that is not finite changes nothing.

The learning rate is a pure function of the step, and all optimizer state is kept in checkpoints, so a resumed run
continues exactly where it stopped. On a GPU, fused AdamW decides on the device whether a gradient is
finite, so the host does not wait.

Every trainable parameter belongs to one group of one optimizer. Weight decay applies to matrices. It does not apply to
vectors (norms, biases), nor to stacked vectors of experts. `[training] learning_rates` multiplies a group's rate.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from headrace.config.schema import TrainingConfig
from headrace.delivery.parts import held_region
from headrace.errors import UserError
from headrace.training import eight_bits
from headrace.training.devices import upload
from headrace.training.ranks import Ranks, copies, global_norm, local_part, local_tensor, on_whole_matrices

Schedule = Literal["constant", "cosine", "linear"]
CLIP_EPSILON = 1e-6
"""The same value that torch uses when it clips gradients."""
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""The coefficients of Muon's quintic iteration. It is steep at zero, so that five steps bring all singular values near
1."""
ITERATIONS = 5
MOMENTUM = 0.95
RMS_OF_ADAMW = 0.2
MOMENTS = {"exp_avg": True, "exp_avg_sq": False}
"""The states of AdamW that are kept in 8 bits, and whether they may be negative."""
SAMPLE = 1 << 14
"""The update ratio is exact for parameters of up to this many elements, and sampled for larger ones."""


def learning_rate(step: int, *, peak: float, warmup_steps: int, schedule: Schedule, total_steps: int) -> float:
    """Return the learning rate of a step, counted from 1.

    The rate rises linearly and reaches the peak at step `warmup_steps`. Then, unless the schedule is constant, the rate
    falls so that the step after `total_steps` would have a rate of zero.
    """
    if step <= warmup_steps:
        return peak * step / warmup_steps
    if schedule == "constant":
        return peak
    progress = min(1.0, (step - warmup_steps - 1) / max(1, total_steps - warmup_steps))
    return peak * (0.5 * (1.0 + math.cos(math.pi * progress)) if schedule == "cosine" else 1.0 - progress)


class Applied(NamedTuple):
    """The result of a step."""

    norm: float
    """The norm of the gradient, before clipping."""
    finite: bool
    changed: bool
    """Whether the weights changed. They do not change without a gradient, nor if the gradient is not finite."""
    update_ratio: float
    """|change of the weights| / |weights|, see `UpdateRatio`."""


class Optimizer:
    """All optimizers of a model's trainable parameters, used as one and stepped with a given learning rate.

    Each rank steps its part of a sharded model, with its part of the moments. Muon gathers whole matrices for that.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        config: TrainingConfig,
        ranks: Ranks | None = None,
        masters: Mapping[str, torch.nn.Parameter] | None = None,
    ) -> None:
        """Build the optimizers. `masters` are the trainable parameters, if the model holds only copies of them."""
        self._ranks = ranks
        self._parameters = (
            dict(masters)
            if masters is not None
            else {name: p for name, p in model.named_parameters() if p.requires_grad}
        )
        self._named = {name: local_part(p) for name, p in self._parameters.items()}
        self._clip_norm = config.clip_norm
        self._in_eight_bits = config.optimizer == "adamw_8bit"
        self._optimizers = self._make(model, config)
        self._optimizer_of = {
            id(p): optimizer
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for p in group["params"]
        }
        # Only fused AdamW can skip a step on the device, without the host.
        self._on_device = (
            ranks is None
            and all(isinstance(optimizer, torch.optim.AdamW) for optimizer in self._optimizers)
            and all(p.device.type == "cuda" for p in self._named.values())
        )

    def _make(self, model: torch.nn.Module, config: TrainingConfig) -> list[torch.optim.Optimizer]:
        named = self._named
        for pattern in config.learning_rates:
            if not any(pattern in name for name in named):
                raise UserError(f"[training] learning_rates: no trainable parameter has {pattern!r} in its name")
        hidden = hidden_matrices(model) if config.optimizer == "muon" else set()
        betas = config.beta1, config.beta2
        made: list[torch.optim.Optimizer] = []
        if groups := _groups({name: p for name, p in named.items() if name in hidden}, config):
            made.append(Muon(groups, lr=0.0, wholes={p: self._parameters[name] for name, p in named.items()}))
        if groups := _groups({name: p for name, p in named.items() if name not in hidden}, config):
            if config.optimizer == "adamw_8bit":
                made.append(_adamw_8bit(groups, betas, sharded=self._ranks is not None))
            else:
                made.append(torch.optim.AdamW(groups, lr=0.0, betas=betas, fused=True))
        return made

    def begin(self, rate: float, loss: torch.Tensor | None = None) -> Callable[[], Applied]:
        """Clip the gradients by their global norm, make a step, and drop the gradients. On a GPU this is only enqueued.

        The returned function waits for the device and returns the result. If the norm is not finite, or the loss that
        the gradients belong to, weights and moments stay as they are.
        """
        gradients = [p.grad for p in self._parameters.values() if p.grad is not None]
        norm = global_norm(gradients, self._ranks, loss)
        for name, whole in self._parameters.items():
            part = self._named[name]
            if part is not whole:
                part.grad = None if whole.grad is None else local_tensor(whole.grad)
        ratio: torch.Tensor | None = None
        if gradients and (self._on_device or bool(torch.isfinite(norm))):
            if not self._on_device:
                torch.nn.utils.clip_grads_with_norm_(self._named.values(), self._clip_norm, norm)
            before = UpdateRatio(self._parameters.values(), self._ranks)
            for optimizer in self._optimizers:
                _set_rate(optimizer, rate)
                if self._on_device:
                    self._step_on_device(optimizer, norm)
                else:
                    optimizer.step()
            ratio = before.after()
        for p in (*self._named.values(), *self._parameters.values()):
            p.grad = None

        def read() -> Applied:
            size = float(norm)
            if ratio is None or not math.isfinite(size):
                return Applied(size, math.isfinite(size), False, 0.0)
            return Applied(size, True, True, float(ratio))

        return read

    def _step_on_device(self, optimizer: Any, norm: torch.Tensor) -> None:
        # Fused AdamW divides gradients by `grad_scale` and skips the step if `found_inf` is set, for loss scaling.
        optimizer.grad_scale = ((norm + CLIP_EPSILON) / self._clip_norm).clamp(min=1.0).float()
        optimizer.found_inf = (~torch.isfinite(norm)).float()
        try:
            optimizer.step()
        finally:
            del optimizer.grad_scale, optimizer.found_inf

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the states of the optimizers for a checkpoint, as a flat dict by `kind/parameter name`.

        A state that consists of several tensors (8-bit codes and their scales) is kept as `kind.part/parameter name`.
        On several ranks, 8-bit states have the form that `eight_bits` describes.
        """
        found: dict[str, torch.Tensor] = {}
        for name, p in self._named.items():
            state = self._optimizer_of[id(p)].state.get(p, {})
            for kind in sorted(state):
                spread = self._in_eight_bits and self._ranks is not None and kind in MOMENTS
                pieces = eight_bits.spread(state[kind], p) if spread else _pieces(state[kind])
                found |= {f"{kind}{piece}/{name}": tensor for piece, tensor in pieces.items()}
        return found

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Restore the states that `tensors` returned."""
        saved: dict[tuple[str, str], dict[str, torch.Tensor]] = {}
        for key, tensor in tensors.items():
            kind, _, name = key.partition("/")
            kind, dot, piece = kind.partition(".")
            saved.setdefault((kind, name), {})[dot + piece] = tensor
        # A step of size zero makes the optimizers create their states. It leaves the weights as they are, and the saved
        # states replace what it counted.
        for name in {name for _, name in saved} & self._named.keys():
            self._named[name].grad = torch.zeros_like(self._named[name])
        for optimizer in self._optimizers:
            _set_rate(optimizer, 0.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        for (kind, name), pieces in saved.items():
            p = self._named.get(name)
            state = {} if p is None else self._optimizer_of[id(p)].state[p]
            if kind not in state:
                raise UserError(
                    f"the checkpoint's optimizer has {kind}/{name}, which this model and optimizer have not"
                )
            if self._in_eight_bits and kind in MOMENTS and (self._ranks is not None or eight_bits.SCALES in pieces):
                eight_bits.fill(state[kind], pieces, signed=MOMENTS[kind])
                continue
            present = _pieces(state[kind])
            if pieces.keys() != present.keys():
                raise UserError(
                    f"the checkpoint's optimizer has {kind} of {name} in another form than this one: "
                    "it is of a run with another [training] optimizer"
                )
            if isinstance(state[kind], int | float):
                state[kind] = pieces[""].item()
                continue
            for piece, tensor in present.items():
                tensor.copy_(pieces[piece])


def _pieces(state: Any) -> dict[str, torch.Tensor]:
    """Return the plain tensors of a state: the state itself, or the tensors inside it."""
    if hasattr(state, "__tensor_flatten__"):
        return {f".{name}": getattr(state, name) for name in state.__tensor_flatten__()[0]}
    return {"": torch.as_tensor(state)}


def _set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate * group["factor"])
        else:
            group["lr"] = rate * group["factor"]


def hidden_matrices(model: torch.nn.Module) -> set[str]:
    """Return the names of trainable matrices, or stacks of them, except the embedding and the vocabulary projection."""
    outer = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if head is not None:
        outer.add(id(head.weight))
    return {
        name
        for name, p in model.named_parameters()
        if p.requires_grad and p.ndim <= 3 and _is_matrix(name, p) and id(p) not in outer
    }


def _is_matrix(name: str, p: torch.Tensor) -> bool:
    """Return whether a parameter is a matrix or a stack of matrices. A stack of biases is not."""
    return p.ndim >= 2 and not name.endswith("bias")


def _groups(named: Mapping[str, torch.nn.Parameter], config: TrainingConfig) -> list[dict[str, Any]]:
    groups: dict[tuple[bool, float], list[torch.nn.Parameter]] = {}
    for name, p in named.items():
        factor = next((rate for pattern, rate in config.learning_rates.items() if pattern in name), 1.0)
        groups.setdefault((_is_matrix(name, p), factor), []).append(p)
    return [
        {"params": members, "weight_decay": config.weight_decay if decays else 0.0, "factor": factor}
        for (decays, factor), members in groups.items()
    ]


def _adamw_8bit(groups: list[dict[str, Any]], betas: tuple[float, float], *, sharded: bool) -> torch.optim.Optimizer:
    # The states of shards are torchao's: `eight_bits` knows how they are cut and put together.
    if not sharded and all(p.device.type == "cuda" for group in groups for p in group["params"]):
        try:
            from bitsandbytes.optim import AdamW8bit as Blockwise
        except ImportError:
            pass
        else:
            blockwise: torch.optim.Optimizer = Blockwise(groups, lr=0.0, betas=betas)
            return blockwise
    try:
        from torchao.optim import AdamW8bit
    except ImportError as error:
        raise UserError(
            '[training] optimizer = "adamw_8bit" needs the package torchao, or bitsandbytes on one GPU '
            '(pip install torchao, or take optimizer = "adamw")'
        ) from error
    optimizer: torch.optim.Optimizer = AdamW8bit(groups, lr=0.0, betas=betas)
    return optimizer


class Muon(torch.optim.Optimizer):
    """Momentum whose matrices are orthogonalised, so that a step moves every direction of a matrix equally.

    Nesterov momentum, with decoupled weight decay. Updates have the size of AdamW's updates, whatever the shape, so one
    learning rate serves both. The iteration runs in bfloat16 on a GPU and in float32 on a CPU, or in float64 if the
    weights are float64. In a stack of matrices (experts), each matrix is orthogonalised separately. For sharded
    matrices, each rank keeps its shard of the momentum, and the matrices are gathered to be orthogonalised.

    `torch.optim.Muon` is no substitute: it refuses stacks of matrices, and always iterates in bfloat16. After four
    steps on float64 matrices, its change of the weights differed from this one by up to 0.9 %. Its results for sharded
    matrices differed from its results for whole ones, too.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        *,
        weight_decay: float = 0.0,
        wholes: Mapping[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        """Build the optimizer. `wholes` maps a rank's part of a parameter to the sharded parameter itself."""
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self._wholes = wholes or {}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            rate = group["lr"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(p)
                momentum = state["momentum_buffer"].lerp_(p.grad, 1.0 - MOMENTUM)
                whole = self._wholes.get(p, p)
                direction = on_whole_matrices(orthogonalised, p.grad.lerp(momentum, MOMENTUM), whole)
                size = RMS_OF_ADAMW * math.sqrt(max(whole.shape[-2:]))
                p.mul_(1.0 - rate * group["weight_decay"])
                p.add_(direction.to(p.dtype), alpha=-rate * size)


def orthogonalised(matrices: torch.Tensor) -> torch.Tensor:
    """Turn U S V^T into about U V^T, for each matrix of a stack [..., m, n], by Newton-Schulz iteration."""
    a, b, c = COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x: torch.Tensor = matrices.mT if tall else matrices
    if x.dtype != torch.float64:
        x = x.to(torch.float32 if x.device.type == "cpu" else torch.bfloat16)
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class UpdateRatio:
    """The comparison of weights before a step with the same weights after it: |change| / |weights|.

    An exact ratio would need a copy of all weights, so only evenly spaced elements of each parameter are compared. The
    choice of elements depends on the whole parameter, so the ratio is the same however a parameter is cut into shards.
    """

    @torch.no_grad()
    def __init__(self, parameters: Iterable[torch.Tensor], ranks: Ranks | None = None) -> None:
        self._ranks = ranks
        self._views, self._scales = [], []
        for parameter in parameters:
            strides = _strides(parameter.shape)
            starts = held_region(parameter).start
            slices = (slice(-start % stride, None, stride) for start, stride in zip(starts, strides, strict=True))
            self._views.append(local_tensor(parameter).detach()[tuple(slices)])
            seen = math.prod(-(-size // stride) for size, stride in zip(parameter.shape, strides, strict=True))
            held = 1 if ranks is None else copies(parameter, ranks)
            self._scales.append(parameter.numel() / max(1, seen) / held)
        self._before = [view.clone() for view in self._views]

    @torch.no_grad()
    def after(self) -> torch.Tensor:
        """Return the ratio for what the step changed, as a tensor on the device of the weights."""
        if not self._views:
            return torch.zeros(())
        changes = [view - before for view, before in zip(self._views, self._before, strict=True)]
        squares = torch.stack([self._square(tensors) for tensors in (changes, self._before)])
        if self._ranks is not None:
            squares = squares.new_tensor(self._ranks.sum_over_all(squares.tolist()))
        moved, whole = squares
        return torch.sqrt(moved / whole.clamp(min=torch.finfo(whole.dtype).tiny))

    def _square(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        squares = torch.stack([norm.square() for norm in torch._foreach_norm(tensors)])
        return (squares * upload(np.array(self._scales), squares.device, squares.dtype)).sum()


def _strides(shape: Sequence[int]) -> list[int]:
    """Return the strides that leave about `SAMPLE` elements. The first dimensions are thinned first."""
    strides, left = [], math.prod(shape) // SAMPLE
    for size in shape:
        strides.append(max(1, min(size, left)))
        left //= strides[-1]
    return strides


class HalfWeights:
    """Two copies of a model's weights: a 16-bit copy that the passes read, and masters that the optimizer updates.

    Making this object casts the model's parameters to bfloat16 in place. Call `collect` after each pass, and `refresh`
    after each optimizer step. Then the gradients of all passes are added up in the dtype of the masters, and between
    two steps the 16-bit copy always equals the rounded masters. The masters keep the memory of the model's original
    weights, so code that holds those tensors sees every step.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.masters: dict[str, torch.nn.Parameter] = {}
        """The master weights of the trainable parameters, by name. The optimizer updates these."""
        self._copies: dict[str, torch.nn.Parameter] = {}
        for name, parameter in model.named_parameters():
            whole = parameter.data
            parameter.data = whole.to(torch.bfloat16)
            if parameter.requires_grad:
                self.masters[name] = torch.nn.Parameter(whole)
                self._copies[name] = parameter

    @torch.no_grad()
    def collect(self) -> None:
        """Add the gradients of the last pass to those of the masters, and drop them from the 16-bit copy."""
        for name, copy in self._copies.items():
            if copy.grad is None:
                continue
            master = self.masters[name]
            if master.grad is None:
                master.grad = copy.grad.to(master.dtype)
            else:
                master.grad.add_(copy.grad)
            copy.grad = None

    @torch.no_grad()
    def refresh(self) -> None:
        """Round the masters into the 16-bit copy."""
        if self._copies:
            copies: list[torch.Tensor] = list(self._copies.values())
            torch._foreach_copy_(copies, [self.masters[name].data for name in self._copies])

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Make the model's trainable parameters the masters inside this context: for saving, not for computing."""
        held = {name: copy.data for name, copy in self._copies.items()}
        for name, copy in self._copies.items():
            copy.data = self.masters[name].data
        try:
            yield
        finally:
            for name, copy in self._copies.items():
                copy.data = held[name]
