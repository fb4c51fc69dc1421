"""Sampling on the GPU inside a captured step. It follows the rules of `sampler`, without a sort and without the host.

A draw depends only on the row's own logits, parameters, seed and position. Without a filter, all logits are read once,
and one tile a second time: `_tiles` sums the masses of each tile of the vocabulary, and `_pick` finds the tile and the
token where the row's noise falls. With a filter, `_truncate` runs between the two. It searches for the smallest logit
that is kept, testing three possible values in each pass over the logits, and sums the tiles again over the kept tokens
only. Masses are relative to the row's best token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from headrace.engines.base import FORBIDDEN_LIMIT, KEPT_LIMIT, Sampling

_TILE = 2048
_BLOCK = tl.constexpr(2048)
"""The number of tokens that a program reads at a time: eight per thread, in one wide load."""
_UNROLL = tl.constexpr(4)
_REALS = tl.constexpr(3)
_WHOLES = tl.constexpr(3 + FORBIDDEN_LIMIT)
_LOG2E = tl.constexpr(1.4426950408889634)
_KEPT_LIMIT = tl.constexpr(KEPT_LIMIT)
_FORBIDDEN_LIMIT = tl.constexpr(FORBIDDEN_LIMIT)

# The bits of a logit, as a signed integer, sort like its value. A narrower type leaves this many low bits of an fp32
# unused.
_UNUSED_BITS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}


class SamplingRows:
    """The sampling parameters of every device row. A new row is greedy."""

    def __init__(self, rows: int, device: torch.device | str) -> None:
        self._pin = torch.device(device).type == "cuda"
        reals, wholes = self._pack([Sampling(max_tokens=1, temperature=0.0)])
        self.reals = reals.to(device).repeat(rows, 1)
        """[rows, 3] float64: temperature, top_p, min_p."""
        self.wholes = wholes.to(device).repeat(rows, 1)
        """[rows, 3 + FORBIDDEN_LIMIT] int64: seed, top_k, record, then forbidden ids padded with -1."""

    def set(self, rows: torch.Tensor, samplings: Sequence[Sampling]) -> None:
        """Write parameters to `rows` (int64) on the current stream. Later launches see them, earlier ones do not."""
        index = rows.to(self.reals.device, non_blocking=True)
        for store, packed in zip((self.reals, self.wholes), self._pack(samplings), strict=True):
            store.index_copy_(0, index, packed.to(index.device, non_blocking=True))

    def _pack(self, samplings: Sequence[Sampling]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the parameters in host memory, which is pinned if the rows are on a GPU."""
        reals = torch.tensor([(s.temperature, s.top_p, s.min_p) for s in samplings], dtype=torch.float64)
        wholes = torch.tensor([_wholes(s) for s in samplings], dtype=torch.int64)
        return (reals.pin_memory(), wholes.pin_memory()) if self._pin else (reals, wholes)


def _wholes(sampling: Sampling) -> list[int]:
    seed = (sampling.seed + (1 << 63)) % (1 << 64) - (1 << 63)
    # An id that is in no vocabulary forbids nothing.
    forbidden = [token for token in sampling.forbidden if 0 <= token < 1 << 31]
    padding = [-1] * (FORBIDDEN_LIMIT - len(forbidden))
    return [seed, min(sampling.top_k, 1 << 31), int(sampling.record_kept), *forbidden, *padding]


def sample(
    logits: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    params: SamplingRows,
    *,
    filtered: bool,
    kept_ids: torch.Tensor | None = None,
    kept_counts: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens (int32 [B]) and log-probabilities (fp32 [B]) for `logits` [B, V], which must be contiguous.

    Nothing is read back to the host. Entry i is drawn with the parameters of row `rows[i]` (int32) for position
    `positions[i]` (int32). Without `filtered`, truncation, forbidden tokens and recording are ignored. With `filtered`,
    the logits of forbidden tokens are overwritten with -inf. `kept_ids` (int32 [B, KEPT_LIMIT]) and `kept_counts`
    (int32 [B]) are given together. For rows that record, they receive the kept ids, ascending; for other rows the count
    is zero. A row that holds a NaN gets log-probability NaN.
    """
    batch, vocabulary = logits.shape
    tokens = torch.empty(batch, dtype=torch.int32, device=logits.device)
    logprobs = torch.empty(batch, dtype=torch.float32, device=logits.device)
    if batch == 0:
        return tokens, logprobs
    tiles = triton.cdiv(vocabulary, _TILE)
    width = max(16, triton.next_power_of_2(tiles))
    maxima = torch.empty(batch, tiles, dtype=torch.float32, device=logits.device)
    masses = torch.empty_like(maxima)
    edges = torch.empty(batch if filtered else 1, dtype=torch.float32, device=logits.device)
    places = torch.empty(batch if filtered else 1, dtype=torch.int32, device=logits.device)
    ties = torch.empty(batch if filtered else 1, tiles, dtype=torch.int32, device=logits.device)
    if filtered:
        _forbid[(batch,)](logits, rows, params.wholes, VOCABULARY=vocabulary, num_warps=1)
    shape = {"VOCABULARY": vocabulary, "TILES": tiles, "TILE": _TILE}
    _tiles[(batch, tiles)](logits, rows, params.reals, maxima, masses, **shape, num_warps=4)
    if filtered:
        recording = kept_ids is not None and kept_counts is not None
        _truncate[(batch,)](
            logits, rows, params.reals, params.wholes, maxima, masses, edges, places, ties,
            kept_ids if recording else ties, kept_counts if recording else places, **shape,
            WIDTH=width, RECORDING=recording, UNUSED=_UNUSED_BITS[logits.dtype], num_warps=8,
        )  # fmt: skip
    _pick[(batch,)](
        logits, rows, positions, params.reals, params.wholes, maxima, masses, edges, places, ties, tokens, logprobs,
        **shape, WIDTH=width, FILTERED=filtered, num_warps=4,
    )  # fmt: skip
    return tokens, logprobs


@triton.jit
def _forbid(logits, rows, wholes, VOCABULARY: tl.constexpr):
    entry = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + entry)
    slots = tl.arange(0, _FORBIDDEN_LIMIT)
    ids = tl.load(wholes + row.to(tl.int64) * _WHOLES + 3 + slots)
    tl.store(logits + entry * VOCABULARY + ids, float("-inf"), mask=(ids >= 0) & (ids < VOCABULARY))


@triton.jit
def _temperature(reals, row):
    """Return the row's temperature (1 for a greedy row), and whether the row is greedy."""
    temperature = tl.load(reals + row * _REALS).to(tl.float32)
    greedy = temperature == 0
    return tl.where(greedy, 1.0, temperature), greedy


@triton.jit
def _read(logits, start, VOCABULARY: tl.constexpr, SIZE: tl.constexpr):
    offsets = start + tl.arange(0, SIZE)
    return tl.load(logits + offsets, mask=offsets < VOCABULARY, other=float("-inf")).to(tl.float32)


@triton.jit
def _tiles(logits, rows, reals, maxima, masses, VOCABULARY: tl.constexpr, TILES: tl.constexpr, TILE: tl.constexpr):
    """Store the maximum of a tile, and the tile's mass relative to that maximum."""
    entry = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    temperature, _ = _temperature(reals, tl.load(rows + entry).to(tl.int64))
    x = _read(logits + entry * VOCABULARY, tile * TILE, VOCABULARY, TILE)
    # Devices differ in whether a maximum returns NaN, so NaN is left out here. The mass shows it.
    best = tl.max(tl.where(x == x, x, float("-inf")), axis=0)
    under = tl.where(best == float("-inf"), 0.0, best)
    tl.store(maxima + entry * TILES + tile, best)
    tl.store(masses + entry * TILES + tile, tl.sum(tl.exp2((x - under) * (_LOG2E / temperature)), axis=0))


@triton.jit
def _weigh_tiles(maxima, masses, TILES: tl.constexpr, scale, WIDTH: tl.constexpr):
    """Return the row's best logit, the tiles' maxima, and the tiles' masses relative to the best logit."""
    index = tl.arange(0, WIDTH)
    tops = tl.load(maxima + index, mask=index < TILES, other=float("-inf"))
    mass = tl.load(masses + index, mask=index < TILES, other=0.0)
    best = tl.max(tops, axis=0)
    under = tl.where(best == float("-inf"), 0.0, best)
    return best, tops, mass.to(tl.float64) * tl.exp2((tops - under) * scale).to(tl.float64)


@triton.jit
def _key(x, UNUSED: tl.constexpr):
    bits = x.to(tl.int32, bitcast=True)
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> UNUSED).to(tl.int64)


@triton.jit
def _value(key, UNUSED: tl.constexpr):
    filled = (key << UNUSED) + tl.where(key < 0, (1 << UNUSED) - 1, 0)
    bits = filled.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _search(
    logits, best, scale, target, low, floor, VOCABULARY: tl.constexpr, COUNT: tl.constexpr, UNUSED: tl.constexpr
):
    """Return the greatest key such that the tokens at or above it reach the target, and the mass above that key.

    The target is a mass or, with COUNT, a number of tokens. The tokens at `low` and above must reach it. Passes divide
    by turns the remaining values and the remaining keys into quarters, because keys are dense around zero and values
    are not. `floor` is a first guess for the lower end of the values.
    """
    high = _key(best, UNUSED) + 1
    above = tl.full((), 0.0, tl.float64)
    quarters = tl.arange(0, 4)
    passes = 0
    while high - low > 1:
        top = _value(high - 1, UNUSED)
        bottom = tl.where(passes == 0, floor, tl.maximum(_value(low, UNUSED), -1e38))
        guesses = tl.minimum(tl.maximum(_key(bottom + (top - bottom) * (quarters / 4), UNUSED), low + 1), high - 1)
        even = low + tl.maximum(((high - low) * quarters) >> 2, 1)
        keys = tl.where(quarters == 0, low, tl.where(passes % 2 == 0, guesses, even))
        values = _value(keys, UNUSED)
        first = tl.sum(tl.where(quarters == 1, values, 0.0), axis=0)
        second = tl.sum(tl.where(quarters == 2, values, 0.0), axis=0)
        third = tl.sum(tl.where(quarters == 3, values, 0.0), axis=0)
        from_first = tl.full([_BLOCK], 0.0, tl.float32)
        from_second = tl.full([_BLOCK], 0.0, tl.float32)
        from_third = tl.full([_BLOCK], 0.0, tl.float32)
        for start in range(0, VOCABULARY, _BLOCK * _UNROLL):
            for part in tl.static_range(_UNROLL):
                x = _read(logits, start + part * _BLOCK, VOCABULARY, _BLOCK)
                mass = tl.full([_BLOCK], 1.0, tl.float32) if COUNT else tl.exp2((x - best) * scale)
                from_first += tl.where(x >= first, mass, 0.0)
                from_second += tl.where(x >= second, mass, 0.0)
                from_third += tl.where(x >= third, mass, 0.0)
        masses = tl.where(quarters == 1, tl.sum(from_first.to(tl.float64), axis=0), float("inf"))
        masses = tl.where(quarters == 2, tl.sum(from_second.to(tl.float64), axis=0), masses)
        masses = tl.where(quarters == 3, tl.sum(from_third.to(tl.float64), axis=0), masses)
        reached = masses >= target
        # A lower key has a greater mass. The greatest mass that misses the target belongs to the new `high`.
        above = tl.max(tl.where(reached, above, masses), axis=0)
        low = tl.max(tl.where(reached, keys, low), axis=0)
        high = tl.min(tl.where(reached, high, keys), axis=0)
        passes += 1
    return low, above


@triton.jit
def _floor_of_best(tops, number, best):
    """Return a value that at least `number` tokens reach (-inf if unknown), and a guess where the search may begin."""
    reach = tl.sum((tops[None, :] >= tops[:, None]).to(tl.int32), axis=1)
    sure = tl.max(tl.where(reach >= number, tops, float("-inf")), axis=0)
    least = tl.min(tl.where(tops > float("-inf"), tops, best), axis=0)
    return sure, tl.where(sure > float("-inf"), sure, least - (best - least))


@triton.jit
def _mass_of_best(logits, best, scale, edge, places, VOCABULARY: tl.constexpr):
    """Return the mass of the tokens above the edge and of `places` tokens at the edge."""
    mass = tl.full([_BLOCK], 0.0, tl.float32)
    for start in range(0, VOCABULARY, _BLOCK * _UNROLL):
        for part in tl.static_range(_UNROLL):
            x = _read(logits, start + part * _BLOCK, VOCABULARY, _BLOCK)
            mass += tl.where(x > edge, tl.exp2((x - best) * scale), 0.0)
    return tl.sum(mass.to(tl.float64), axis=0) + places * tl.exp2((edge - best) * scale).to(tl.float64)


@triton.jit
def _edge(logits, best, tops, total, temperature, top_k, top_p, VOCABULARY: tl.constexpr, UNUSED: tl.constexpr):
    """Return the smallest logit that is kept, and how many tokens with exactly that logit are kept."""
    scale = _LOG2E / temperature
    edge = tl.full((), float("-inf"), tl.float32)
    places = top_k * 0 + VOCABULARY
    if top_k > 0:
        sure, floor = _floor_of_best(tops, top_k, best)
        low = _key(sure, UNUSED)
        key, above = _search(logits, best, scale, top_k.to(tl.float64), low, floor, VOCABULARY, True, UNUSED)
        edge = _value(key, UNUSED)
        places = top_k - above.to(tl.int64)
        if top_p < 1:
            total = _mass_of_best(logits, best, scale, edge, places, VOCABULARY)
    if top_p < 1:
        limit = top_p * total
        # All tokens below this floor together have less mass than may be dropped. The 0.1 allows for rounding.
        spare = tl.log((1 - top_p) * total / VOCABULARY) - 0.1
        floor = tl.maximum(best + spare.to(tl.float32) * temperature, edge)
        key, above = _search(logits, best, scale, limit, _key(floor, UNUSED), floor, VOCABULARY, False, UNUSED)
        higher = _value(key, UNUSED)
        here = tl.exp2((higher - best) * scale).to(tl.float64)
        # A token is kept if the mass before it has not reached the limit. The first token is always kept.
        fit = tl.minimum(tl.maximum(tl.ceil((limit - above) / here), 1.0), VOCABULARY).to(tl.int64)
        places = tl.where(higher == edge, tl.minimum(fit, places), fit)
        edge = higher
    return edge, places.to(tl.int32)


@triton.jit
def _truncate(
    logits, rows, reals, wholes, maxima, masses, edges, places, ties, kept_ids, kept_counts,
    VOCABULARY: tl.constexpr, TILES: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr,
    RECORDING: tl.constexpr, UNUSED: tl.constexpr,
):  # fmt: skip
    """Find the edge of a row, sum its tiles again over the kept tokens, and record the kept tokens."""
    entry = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + entry).to(tl.int64)
    temperature, greedy = _temperature(reals, row)
    top_p = tl.load(reals + row * _REALS + 1)
    min_p = tl.load(reals + row * _REALS + 2).to(tl.float32)
    top_k = tl.load(wholes + row * _WHOLES + 1)
    record = tl.load(wholes + row * _WHOLES + 2) != 0
    top_k = tl.where(record & ((top_k <= 0) | (top_k > _KEPT_LIMIT)), _KEPT_LIMIT, top_k)
    top_k = tl.where(top_k >= VOCABULARY, 0, top_k)
    logits += entry * VOCABULARY
    best, tops, mass = _weigh_tiles(maxima + entry * TILES, masses + entry * TILES, TILES, _LOG2E / temperature, WIDTH)
    total = tl.sum(mass, axis=0)
    edge = tl.full((), float("-inf"), tl.float32)
    room = tl.full((), 0, tl.int32)
    count = tl.full((), 0, tl.int32)
    # Logits that are not finite are not searched, because they have no order and the search might not end.
    sound = (total > 0) & (total < float("inf"))
    if sound & (greedy == 0) & (record | (top_k > 0) | (top_p < 1) | (min_p > 0)):
        edge, room = _edge(logits, best, tops, total, temperature, top_k, top_p, VOCABULARY, UNUSED)
        taken = tl.full((), 0, tl.int32)
        ahead = _read(logits, 0, VOCABULARY, TILE)
        for tile in range(TILES):
            x = ahead
            # The next tile is loaded while this one is summed. After the last tile, everything is masked out.
            ahead = _read(logits, (tile + 1) * TILE, VOCABULARY, TILE)
            weight = tl.exp2((x - best) * (_LOG2E / temperature))
            tied = tl.sum((x == edge).to(tl.int32), axis=0)
            keep = _keep(x, weight, edge, tied, room - taken, min_p)
            at = entry * TILES + tile
            tl.store(maxima + at, best)
            tl.store(masses + at, tl.sum(tl.where(keep, weight, 0.0), axis=0))
            tl.store(ties + at, taken)
            taken += tied
            if RECORDING:
                count = _write_down(kept_ids + entry * _KEPT_LIMIT, keep, tile * TILE, count, record, TILE)
    tl.store(edges + entry, edge)
    tl.store(places + entry, room)
    if RECORDING:
        tl.store(kept_counts + entry, count)


@triton.jit
def _keep(x, weight, edge, tied, room, min_p):
    """Return which tokens of a tile are kept. `tied` of them are at the edge, of which at most `room` are kept."""
    tie = x == edge
    # Most tiles have room for all tokens at the edge, and need no count along the ids.
    if tied > room:
        tie = tie & (tl.cumsum(tie.to(tl.int32), axis=0) <= room)
    return ((x > edge) | tie) & (x > float("-inf")) & (weight >= min_p)


@triton.jit
def _write_down(kept_ids, keep, start, count, record, SIZE: tl.constexpr):
    """Append the kept tokens of a tile, and return the new number of recorded tokens."""
    if record:
        slots = count + tl.cumsum(keep.to(tl.int32), axis=0) - 1
        tl.store(kept_ids + slots, start + tl.arange(0, SIZE), mask=keep & (slots < _KEPT_LIMIT))
        count += tl.sum(keep.to(tl.int32), axis=0)
    return count


@triton.jit
def _constant(HIGH: tl.constexpr, LOW: tl.constexpr):
    return (tl.full((), HIGH, tl.uint64) << 32) | tl.full((), LOW, tl.uint64)


@triton.jit
def _mix(x):
    x = x + _constant(0x9E3779B9, 0x7F4A7C15)
    x = (x ^ (x >> 30)) * _constant(0xBF58476D, 0x1CE4E5B9)
    x = (x ^ (x >> 27)) * _constant(0x94D049BB, 0x133111EB)
    return x ^ (x >> 31)


@triton.jit
def _uniform(seed, position):
    """Return the same noise as `sampler.uniforms`, bit for bit."""
    hashed = _mix(_mix(seed.to(tl.uint64, bitcast=True)) ^ position.to(tl.uint64))
    return (hashed >> 12).to(tl.float64) * 2.220446049250313e-16


@triton.jit
def _pick(
    logits, rows, positions, reals, wholes, maxima, masses, edges, places, ties, tokens, logprobs,
    VOCABULARY: tl.constexpr, TILES: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr, FILTERED: tl.constexpr,
):  # fmt: skip
    """Pick the first id where the cumulative mass exceeds the row's noise. A greedy row picks its best token."""
    entry = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + entry).to(tl.int64)
    temperature, greedy = _temperature(reals, row)
    scale = _LOG2E / temperature
    best, tops, mass = _weigh_tiles(maxima + entry * TILES, masses + entry * TILES, TILES, scale, WIDTH)
    total = tl.sum(mass, axis=0)
    target = _uniform(tl.load(wholes + row * _WHOLES), tl.load(positions + entry)) * total

    index = tl.arange(0, WIDTH)
    hit = tl.where(greedy, tops == best, (tl.cumsum(mass, axis=0) > target) & (mass > 0))
    first = tl.min(tl.where(hit, index, WIDTH), axis=0)
    # By rounding, the noise can lie beyond the end. Then the last tile, and the last token, with a mass is taken.
    tile = tl.where(first < WIDTH, first, tl.max(tl.where(mass > 0, index, 0), axis=0))
    before = tl.sum(tl.where(index < tile, mass, 0.0), axis=0)

    x = _read(logits + entry * VOCABULARY, tile * TILE, VOCABULARY, TILE)
    weight = tl.exp2((x - best) * scale)
    if FILTERED:
        min_p = tl.load(reals + row * _REALS + 2).to(tl.float32)
        room = tl.load(places + entry) - tl.load(ties + entry * TILES + tile)
        edge = tl.load(edges + entry)
        tied = tl.sum((x == edge).to(tl.int32), axis=0)
        weight = tl.where(_keep(x, weight, edge, tied, room, min_p), weight, 0.0)
    inner = before + tl.cumsum(weight.to(tl.float64), axis=0)
    offsets = tl.arange(0, TILE)
    hit = tl.where(greedy, x == best, (inner > target) & (weight > 0))
    first = tl.min(tl.where(hit, offsets, TILE), axis=0)
    chosen = tl.where(first < TILE, first, tl.max(tl.where(weight > 0, offsets, 0), axis=0))
    logit = tl.sum(tl.where(offsets == chosen, x, 0.0), axis=0)
    tl.store(tokens + entry, tl.minimum(tile * TILE + chosen, VOCABULARY - 1))
    tl.store(logprobs + entry, ((logit - best) / temperature - tl.log(total)).to(tl.float32))
