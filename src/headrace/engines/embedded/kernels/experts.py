"""Triton kernels for a mixture-of-experts layer whose experts get few tokens each: sort, gate and up, down, sum.

A pair is a token and one of its experts. Pairs are sorted by expert on the device, and the pairs of one expert are cut
into tiles. A product computes one tile of pairs with some rows of the expert's weights, so weights of experts without
pairs are not read. Shapes and grids depend only on the number of tokens, nothing is read back to the host, and no
order depends on atomics: a launch may be captured in a CUDA graph, and equal inputs give equal outputs.

The weights are the left operand of every product, and the tokens the right one. The tensor cores of Hopper take at
least 64 rows of the left operand, but as few as 8 columns of the right one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from headrace.engines.embedded.kernels.attention import dot
from headrace.models.experts import ExpertWeights

UNLIMITED = 3.0e38
"""The limit of an activation that is not clamped."""
_CHUNK = 1024
"""The number of pairs that the sort looks at together."""
_LISTED = 32
"""The number of tiles that the sort lists together."""


class Swish(NamedTuple):
    """The activation of gated experts: `(up + shift) * gate * sigmoid(alpha * gate)`, after clamping to `limit`.

    The gate is clamped from above, and `up` from both sides.
    """

    alpha: float = 1.0
    limit: float = UNLIMITED
    shift: float = 0.0
    interleaved: bool = False
    """Whether the columns of gate and up alternate. Otherwise all columns of the gate come first."""


class Blocks(NamedTuple):
    """The sizes of what one program computes."""

    tokens: int
    """The pairs of one tile."""
    up_rows: int
    """The rows of gate and up together."""
    down_rows: int
    depth: int
    """The length of the part of a row that is in fast memory at once."""
    warps: int = 4
    stages: int = 4


def choose_blocks(pairs: int, experts: int, itemsize: int) -> Blocks:
    """Return tile sizes for this many pairs over this many experts, chosen so that most experts need one tile."""
    if itemsize > 2:
        # Numbers wider than 16 bits are multiplied outside of the tensor cores, from registers.
        return Blocks(tokens=16, up_rows=64, down_rows=64, depth=32, stages=2)
    wanted = triton.next_power_of_2(-(-5 * pairs // (4 * experts)))
    tokens = min(64, max(16, int(wanted)))
    if tokens == 64:
        return Blocks(tokens, up_rows=128, down_rows=128, depth=64)
    return Blocks(tokens, up_rows=64, down_rows=64, depth=128)


def most_tiles(pairs: int, experts: int, tokens: int) -> int:
    """Return the largest number of tiles that this many pairs can need."""
    return min(pairs, experts + pairs // tokens)


def expert_products(
    experts: ExpertWeights,
    swish: Swish,
    hidden: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    blocks: Blocks | None = None,
) -> torch.Tensor:
    """Return the weighted sum of each token's experts, `[T, H]`. `index` and `weights` are `[T, k]`."""
    tokens, per_token = index.shape
    count, width = experts.up.shape[0], hidden.shape[1]
    inner = experts.down.shape[1 if experts.transposed else 2]
    pairs = tokens * per_token
    assert hidden.stride(1) == 1 and hidden.dtype == experts.up.dtype == experts.down.dtype
    blocks = blocks or choose_blocks(pairs, count, hidden.element_size())
    order, starts, tiles = sort_pairs(index, count, blocks.tokens)
    active = torch.empty(pairs, inner, dtype=hidden.dtype, device=hidden.device)
    parts = torch.empty(tokens, per_token, width, dtype=hidden.dtype, device=hidden.device)
    how = {"num_warps": blocks.warps, "num_stages": blocks.stages}
    listed = tiles.shape[0]
    _up_kernel[(listed, triton.cdiv(2 * inner, blocks.up_rows))](
        *(hidden, order, starts, tiles, experts.up, experts.up_bias, active),
        *(hidden.stride(0), experts.up.stride(0), *_row_and_column(experts.up, experts)),
        *(swish.alpha, swish.limit, swish.shift),
        PER_TOKEN=per_token,
        WIDTH=width,
        INNER=inner,
        INTERLEAVED=swish.interleaved,
        TOKENS=blocks.tokens,
        ROWS=blocks.up_rows,
        DEPTH=blocks.depth,
        **how,
    )
    _down_kernel[(listed, triton.cdiv(width, blocks.down_rows))](
        *(active, order, starts, tiles, experts.down, experts.down_bias, weights.contiguous(), parts),
        *(experts.down.stride(0), *_row_and_column(experts.down, experts)),
        WIDTH=width,
        INNER=inner,
        TOKENS=blocks.tokens,
        ROWS=blocks.down_rows,
        DEPTH=blocks.depth,
        **how,
    )
    # A sum in the order of a token's experts, whatever the order of the tiles was.
    return parts.sum(1)


def _row_and_column(weight: torch.Tensor, experts: ExpertWeights) -> tuple[int, int]:
    """Return the strides of a weight: from one output feature to the next, and from one input feature to the next."""
    _, first, second = weight.stride()
    return (second, first) if experts.transposed else (first, second)


def sort_pairs(index: torch.Tensor, experts: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sort the pairs of `index`, `[T, k]`, by expert. Pairs of one expert keep their order.

    Returns the pairs in their new order, where the pairs of each expert start (`[E + 1]`), and the list of tiles, `[n,
    2]`: the expert, and the place of the tile's first pair. A tile of expert -1 is unused.
    """
    pairs, device = index.numel(), index.device
    order = torch.empty(pairs, dtype=torch.int32, device=device)
    starts = torch.empty(experts + 1, dtype=torch.int32, device=device)
    tiles = torch.empty(most_tiles(pairs, experts, tokens), 2, dtype=torch.int32, device=device)
    _sort_kernel[(experts,)](
        *(index.contiguous(), order, starts, tiles, pairs, tiles.shape[0]),
        EXPERTS=experts,
        EXPERTS_PAD=triton.next_power_of_2(experts + 1),
        TOKENS=tokens,
        CHUNK=_CHUNK,
        LISTED=_LISTED,
    )
    return order, starts, tiles


@triton.jit(do_not_specialize=["pairs", "listed"])
def _sort_kernel(
    index,
    order,
    starts,
    tiles,
    pairs,
    listed,
    EXPERTS: tl.constexpr,
    EXPERTS_PAD: tl.constexpr,
    TOKENS: tl.constexpr,
    CHUNK: tl.constexpr,
    LISTED: tl.constexpr,
):
    expert, numbers = tl.program_id(0), tl.arange(0, EXPERTS_PAD)
    counts = tl.zeros([EXPERTS_PAD], tl.int32)
    for first in range(0, pairs, CHUNK):
        pair = first + tl.arange(0, CHUNK)
        # Beyond the last pair, the number of experts takes the place of an expert.
        chosen = tl.load(index + pair, mask=pair < pairs, other=EXPERTS).to(tl.int32)
        counts += tl.histogram(chosen, EXPERTS_PAD)
    counts = tl.where(numbers < EXPERTS, counts, 0)
    needed = (counts + TOKENS - 1) // TOKENS
    start = tl.sum(tl.where(numbers < expert, counts, 0), 0)
    tile = tl.sum(tl.where(numbers < expert, needed, 0), 0)
    mine = tl.sum(tl.where(numbers == expert, needed, 0), 0)
    tl.store(starts + expert, start)
    for first in range(0, mine, LISTED):
        behind = first + tl.arange(0, LISTED)
        tl.store(tiles + 2 * (tile + behind), tl.zeros([LISTED], tl.int32) + expert, mask=behind < mine)
        tl.store(tiles + 2 * (tile + behind) + 1, start + behind * TOKENS, mask=behind < mine)
    if expert == EXPERTS - 1:
        tl.store(starts + EXPERTS, pairs)
        for first in range(tile + mine, listed, LISTED):
            unused = first + tl.arange(0, LISTED)
            tl.store(tiles + 2 * unused, tl.full([LISTED], -1, tl.int32), mask=unused < listed)
    for first in range(0, pairs, CHUNK):
        pair = first + tl.arange(0, CHUNK)
        chosen = tl.load(index + pair, mask=pair < pairs, other=EXPERTS).to(tl.int32)
        hit = (chosen == expert).to(tl.int32)
        tl.store(order + start + tl.cumsum(hit, 0) - 1, pair, mask=hit != 0)
        start += tl.sum(hit, 0)


@triton.jit
def _weight_tile(weight, rows, columns, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr, EVEN: tl.constexpr):
    """Return `[rows, columns]` of a weight, with zeros past its ends. If `EVEN`, nothing is past them."""
    addresses = weight + rows[:, None] * row + columns[None, :] * column
    if EVEN:
        return tl.load(addresses)
    else:  # noqa: RET505 (the compiler takes one branch; after a return it would still read the other)
        return tl.load(addresses, mask=(rows < ROWS)[:, None] & (columns < COLUMNS)[None, :], other=0.0)


@triton.jit
def _token_tile(source, inside, columns, COLUMNS: tl.constexpr, DEPTH: tl.constexpr):
    """Return vectors, `[tokens, columns]`, with zeros for tokens that are not inside and past the end of a vector."""
    addresses = source[:, None] + columns[None, :]
    if COLUMNS % DEPTH == 0:
        return tl.load(addresses, mask=inside[:, None], other=0.0)
    else:  # noqa: RET505
        return tl.load(addresses, mask=inside[:, None] & (columns < COLUMNS)[None, :], other=0.0)


@triton.jit(do_not_specialize=["alpha", "limit", "shift"])
def _up_kernel(
    hidden,
    order,
    starts,
    tiles,
    up,
    up_bias,
    active,
    hidden_token,
    up_expert,
    up_row,
    up_column,
    alpha,
    limit,
    shift,
    PER_TOKEN: tl.constexpr,
    WIDTH: tl.constexpr,
    INNER: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    expert = tl.load(tiles + 2 * tl.program_id(0)).to(tl.int64)
    if expert < 0:
        return
    places = tl.load(tiles + 2 * tl.program_id(0) + 1) + tl.arange(0, TOKENS)
    inside = places < tl.load(starts + expert + 1)
    token = tl.load(order + places, mask=inside, other=0) // PER_TOKEN
    # Rows of gate and up alternate in a program, however they are stored.
    number = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    if INTERLEAVED:  # noqa: SIM108 (the compiler knows no such expression of a tile)
        rows = number
    else:
        rows = tl.where(number < 2 * INNER, number % 2 * INNER + number // 2, number)
    weight, source = up + expert * up_expert, hidden + token.to(tl.int64) * hidden_token
    even: tl.constexpr = (2 * INNER) % ROWS == 0 and WIDTH % DEPTH == 0
    total = tl.zeros([ROWS, TOKENS], tl.float32)
    for first in range(0, WIDTH, DEPTH):
        columns = first + tl.arange(0, DEPTH)
        w = _weight_tile(weight, rows, columns, up_row, up_column, 2 * INNER, WIDTH, even)
        x = _token_tile(source, inside, columns, WIDTH, DEPTH)
        total = dot(w, tl.trans(x), total)
    if up_bias is not None:
        bias = tl.load(up_bias + expert * (2 * INNER) + rows, mask=rows < 2 * INNER, other=0.0)
        total += bias.to(tl.float32)[:, None]
    gate, linear = tl.split(tl.permute(tl.reshape(total, [ROWS // 2, 2, TOKENS]), [0, 2, 1]))
    gate = tl.minimum(gate, limit)
    linear = tl.minimum(tl.maximum(linear, -limit), limit)
    result = (linear + shift) * gate / (1.0 + tl.exp(-alpha * gate))
    inner = tl.program_id(1) * (ROWS // 2) + tl.arange(0, ROWS // 2)
    addresses = active + places.to(tl.int64)[None, :] * INNER + inner[:, None]
    tl.store(addresses, result.to(active.dtype.element_ty), mask=inside[None, :] & (inner < INNER)[:, None])


@triton.jit
def _down_kernel(
    active,
    order,
    starts,
    tiles,
    down,
    down_bias,
    weights,
    parts,
    down_expert,
    down_row,
    down_column,
    WIDTH: tl.constexpr,
    INNER: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    expert = tl.load(tiles + 2 * tl.program_id(0)).to(tl.int64)
    if expert < 0:
        return
    places = tl.load(tiles + 2 * tl.program_id(0) + 1) + tl.arange(0, TOKENS)
    inside = places < tl.load(starts + expert + 1)
    pair = tl.load(order + places, mask=inside, other=0)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    weight, source = down + expert * down_expert, active + places.to(tl.int64) * INNER
    even: tl.constexpr = WIDTH % ROWS == 0 and INNER % DEPTH == 0
    total = tl.zeros([ROWS, TOKENS], tl.float32)
    for first in range(0, INNER, DEPTH):
        columns = first + tl.arange(0, DEPTH)
        w = _weight_tile(weight, rows, columns, down_row, down_column, WIDTH, INNER, even)
        x = _token_tile(source, inside, columns, INNER, DEPTH)
        total = dot(w, tl.trans(x), total)
    if down_bias is not None:
        total += tl.load(down_bias + expert * WIDTH + rows, mask=rows < WIDTH, other=0.0).to(tl.float32)[:, None]
    total *= tl.load(weights + pair, mask=inside, other=0.0).to(tl.float32)[None, :]
    addresses = parts + pair.to(tl.int64)[None, :] * WIDTH + rows[:, None]
    tl.store(addresses, total.to(parts.dtype.element_ty), mask=inside[None, :] & (rows < WIDTH)[:, None])
