"""The Triton kernels for norms, gates and rotary embedding with the cache write, which compute in
float32 and round once; and those that choose next tokens, with the noise of `noise` and the sets
of `sampler`.

Each row's parameters are int64 cells, float64 where a parameter is a fraction (`request_state`).
Masses are sums of integers, which no order of additions changes: a job that is resumed elsewhere
draws the same tokens.

Over 300 lines: all that a step compiles beside attention.
"""

import triton
import triton.language as tl

from workers.model.gpu.request_state import (
    MIN_P,
    NOISE,
    OUTPUT_SHIFT,
    POSITION,
    TEMPERATURE,
    TOP_K,
    TOP_P,
)
from workers.model.noise import GOLDEN, LARGEST_BELOW_ONE, MULTIPLIER_1, MULTIPLIER_2
from workers.model.sampler import LOWEST_TEMPERATURE


@triton.jit
def normalise(x, weight, out, eps, DIM: tl.constexpr, PAD: tl.constexpr):
    """Grid (num_rows,): x and out (num_rows, DIM), weight (DIM,); x / rms(x) * weight."""
    row = tl.program_id(0).to(tl.int64) * DIM
    dims = tl.arange(0, PAD)
    found = tl.load(x + row + dims, mask=dims < DIM, other=0.0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(found * found, 0) / DIM + eps)
    weights = tl.load(weight + dims, mask=dims < DIM, other=0.0).to(tl.float32)
    tl.store(out + row + dims, (found * factor * weights).to(out.dtype.element_ty), mask=dims < DIM)


@triton.jit
def gate_silu(gate_up, out, DIM: tl.constexpr, TILE: tl.constexpr):
    """Grid (num_rows, tiles): gate_up (num_rows, 2 * DIM) -> out (num_rows, DIM)."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dims = tile * TILE + tl.arange(0, TILE)
    gate = tl.load(gate_up + row * 2 * DIM + dims, mask=dims < DIM, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * DIM + DIM + dims, mask=dims < DIM, other=0.0).to(tl.float32)
    # 1 / (1 + e^-x) without overflow at either end.
    faded = tl.exp(-tl.abs(gate))
    share = tl.where(gate >= 0, 1.0, faded) / (1.0 + faded)
    tl.store(out + row * DIM + dims, (gate * share * up).to(out.dtype.element_ty), mask=dims < DIM)


@triton.jit
def turn_and_keep(
    qkv,  # (T, NUM_HEADS + 2 * KV_HEADS, DIM), queries turned in place
    cos,  # (T, ROTARY)
    sin,
    q_norm,  # (DIM,), or anything where HAS_NORMS is not set
    k_norm,
    slots,  # int64 (T,)
    keys,  # (num_slots, KV_HEADS, DIM)
    values,
    eps,
    NUM_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    HALF_PAD: tl.constexpr,  # next power of two of half of ROTARY
    REST_PAD: tl.constexpr,  # likewise of DIM - ROTARY; 0 if they are equal
    HAS_NORMS: tl.constexpr,
):
    """Grid (T, NUM_HEADS + 2 * KV_HEADS): one head of one token."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    source = qkv + (token * (NUM_HEADS + 2 * KV_HEADS) + head) * DIM
    slot = tl.load(slots + token)
    halves = tl.arange(0, HALF_PAD)
    HALF: tl.constexpr = ROTARY // 2
    is_half = halves < HALF
    low = tl.load(source + halves, mask=is_half, other=0.0).to(tl.float32)
    high = tl.load(source + HALF + halves, mask=is_half, other=0.0).to(tl.float32)
    if REST_PAD > 0:
        dims = ROTARY + tl.arange(0, REST_PAD)
        rest = tl.load(source + dims, mask=dims < DIM, other=0.0).to(tl.float32)
    if head >= NUM_HEADS + KV_HEADS:
        target = values + (slot * KV_HEADS + head - NUM_HEADS - KV_HEADS) * DIM
    else:
        target = source
        norm = q_norm
        if head >= NUM_HEADS:
            target = keys + (slot * KV_HEADS + head - NUM_HEADS) * DIM
            norm = k_norm
        if HAS_NORMS:
            squares = tl.sum(low * low, 0) + tl.sum(high * high, 0)
            if REST_PAD > 0:
                squares += tl.sum(rest * rest, 0)
            factor = tl.rsqrt(squares / DIM + eps)
            low = low * factor * tl.load(norm + halves, mask=is_half, other=0.0).to(tl.float32)
            weights = tl.load(norm + HALF + halves, mask=is_half, other=0.0).to(tl.float32)
            high = high * factor * weights
            if REST_PAD > 0:
                rest = rest * factor * tl.load(norm + dims, mask=dims < DIM, other=0.0)
        turn = token * ROTARY + halves
        cos_low = tl.load(cos + turn, mask=is_half, other=0.0).to(tl.float32)
        sin_low = tl.load(sin + turn, mask=is_half, other=0.0).to(tl.float32)
        cos_high = tl.load(cos + turn + HALF, mask=is_half, other=0.0).to(tl.float32)
        sin_high = tl.load(sin + turn + HALF, mask=is_half, other=0.0).to(tl.float32)
        turned_low = low * cos_low - high * sin_low
        high = high * cos_high + low * sin_high
        low = turned_low
    # Another thread may still read the query that is overwritten next.
    tl.debug_barrier()
    kind = qkv.dtype.element_ty
    tl.store(target + halves, low.to(kind), mask=is_half)
    tl.store(target + HALF + halves, high.to(kind), mask=is_half)
    if REST_PAD > 0:
        tl.store(target + dims, rest.to(kind), mask=dims < DIM)


_POSITION, _OUTPUT_SHIFT = tl.constexpr(POSITION), tl.constexpr(OUTPUT_SHIFT)
_NOISE, _TOP_K = tl.constexpr(NOISE), tl.constexpr(TOP_K)
_TEMPERATURE, _TOP_P, _MIN_P = tl.constexpr(TEMPERATURE), tl.constexpr(TOP_P), tl.constexpr(MIN_P)
_GOLDEN = tl.constexpr(GOLDEN)
_MULTIPLIER_1, _MULTIPLIER_2 = tl.constexpr(MULTIPLIER_1), tl.constexpr(MULTIPLIER_2)
_LARGEST_BELOW_ONE = tl.constexpr(LARGEST_BELOW_ONE)
_LOWEST_TEMPERATURE = tl.constexpr(LOWEST_TEMPERATURE)
# A probability of the likeliest token's, as an integer. 2^23 tokens do not overflow an int64.
_WHOLE = tl.constexpr(2.0**40)


@triton.jit
def _fraction(cell):
    """Reads a float64 from an int64 cell."""
    return tl.load(cell).to(tl.float64, bitcast=True)


@triton.jit
def _mix(bits):
    """SplitMix64's finaliser of uint64; see `noise`."""
    bits = (bits ^ (bits >> 30)) * _MULTIPLIER_1
    bits = (bits ^ (bits >> 27)) * _MULTIPLIER_2
    return bits ^ (bits >> 31)


@triton.jit
def _logits(logits, first, VOCAB: tl.constexpr, TILE: tl.constexpr):
    """Loads a tile as float32: infinite where it is not a number, -inf behind the vocabulary."""
    ids = first + tl.arange(0, TILE)
    found = tl.load(logits + ids, mask=ids < VOCAB, other=float("-inf")).to(tl.float32)
    return tl.where(found == found, found, float("inf"))


@triton.jit
def _weigh(
    logits,
    pivot,
    least,
    best,
    sharpness,
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
    MASS: tl.constexpr,
):
    """Among a row's logits from `least` on: returns the number or mass of those above the pivot,
    the largest up to it, and the smallest above it."""
    weight = tl.zeros([TILE], tl.int64)
    below = tl.full([TILE], float("-inf"), tl.float32)
    above = tl.full([TILE], float("inf"), tl.float32)
    for first in range(0, VOCAB, TILE):
        found = _logits(logits, first, VOCAB, TILE)
        is_above = (found > pivot) & (found >= least)
        if MASS:
            share = tl.exp2((found - best) * sharpness) * _WHOLE
            weight += tl.where(is_above, share, 0.0).to(tl.int64)
        else:
            weight += is_above.to(tl.int64)
        below = tl.maximum(below, tl.where(found > pivot, float("-inf"), found))
        above = tl.minimum(above, tl.where(is_above, found, float("inf")))
    return tl.sum(weight, 0), tl.max(below, 0), tl.min(above, 0)


@triton.jit
def _lowest_kept(
    logits,
    least,
    best,
    sharpness,
    limit,
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
    MASS: tl.constexpr,
):
    """Returns the smallest logit, from `least` on, above which the number or mass is below `limit`,
    by bisecting the values. `least` and `best` are logits of the row."""
    low, high = least, best
    while low < high:
        pivot = tl.maximum(low * 0.5 + high * 0.5, low)
        pivot = tl.where(pivot < high, pivot, low)
        weight, below, above = _weigh(logits, pivot, least, best, sharpness, VOCAB, TILE, MASS)
        is_enough = weight.to(tl.float64) < limit
        high = tl.where(is_enough, below, high)
        low = tl.where(is_enough, low, above)
    return high


@triton.jit(do_not_specialize_on_alignment=["rows"])
def find_lowest(
    logits,  # (num_rows, VOCAB), contiguous
    cells,  # int64, CELLS for each row of the state
    rows,  # int64 (num_rows,): row of the state
    lowest,  # float32 (num_rows,), written
    CELLS: tl.constexpr,
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
):
    """Grid (num_rows,): the lowest logit over temperature that the row may draw."""
    number = tl.program_id(0).to(tl.int64)
    cell = cells + tl.load(rows + number) * CELLS
    logits += number * VOCAB
    temperature = _fraction(cell + _TEMPERATURE).to(tl.float32)
    top_k = tl.load(cell + _TOP_K)
    top_p = _fraction(cell + _TOP_P).to(tl.float32).to(tl.float64)
    min_p = _fraction(cell + _MIN_P).to(tl.float32)
    score = tl.full([], float("-inf"), tl.float32)
    limits_k = (top_k > 0) & (top_k < VOCAB)
    is_limited = limits_k | (top_p < 1.0) | (min_p > 0.0)
    if is_limited & (temperature >= _LOWEST_TEMPERATURE):
        highest = tl.full([TILE], float("-inf"), tl.float32)
        smallest = tl.full([TILE], float("inf"), tl.float32)
        for first in range(0, VOCAB, TILE):
            found = _logits(logits, first, VOCAB, TILE)
            highest = tl.maximum(highest, found)
            smallest = tl.minimum(smallest, tl.where(found == float("-inf"), float("inf"), found))
        best, least = tl.max(highest, 0), tl.min(smallest, 0)
        if tl.abs(best) < float("inf"):
            sharpness = tl.div_rn(1.4426950408889634, temperature)
            kept = least
            if limits_k:
                limit = top_k.to(tl.float64)
                kept = _lowest_kept(logits, least, best, sharpness, limit, VOCAB, TILE, False)
            if top_p < 1.0:
                below = float("-inf")
                mass, _, _ = _weigh(logits, below, kept, best, sharpness, VOCAB, TILE, True)
                limit = top_p * mass.to(tl.float64)
                kept = _lowest_kept(logits, kept, best, sharpness, limit, VOCAB, TILE, True)
            score = tl.div_rn(kept, temperature)
            if min_p > 0.0:
                score = tl.maximum(score, tl.div_rn(best, temperature) + tl.log(min_p))
    tl.store(lowest + number, score)


@triton.jit(do_not_specialize_on_alignment=["rows"])
def draw_tiles(
    logits,  # (num_rows, VOCAB), contiguous
    cells,
    rows,
    lowest,  # float32 (num_rows,), or anything where IS_LIMITED is not set
    part_score,  # float32 (num_rows, tiles), written
    part_id,  # int32, likewise
    CELLS: tl.constexpr,
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
    IS_LIMITED: tl.constexpr,
):
    """Grid (num_rows, tiles): the best token of each tile; of equals the first."""
    number, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cell = cells + tl.load(rows + number) * CELLS
    scores = _logits(logits + number * VOCAB, tile * TILE, VOCAB, TILE)
    ids = tile * TILE + tl.arange(0, TILE)
    temperature = _fraction(cell + _TEMPERATURE).to(tl.float32)
    if temperature >= _LOWEST_TEMPERATURE:
        scores = tl.div_rn(scores, temperature)
        if IS_LIMITED:
            scores = tl.where(scores < tl.load(lowest + number), float("-inf"), scores)
        if tl.max(scores, 0) > float("-inf"):
            base = tl.load(cell + _NOISE).to(tl.uint64, bitcast=True)
            output = tl.load(cell + _POSITION) + tl.load(cell + _OUTPUT_SHIFT)
            key = _mix(base + output.to(tl.uint64, bitcast=True) + _GOLDEN)
            bits = _mix(key + (ids + 1).to(tl.uint64) * _GOLDEN)
            fraction = (bits >> 11).to(tl.float32) * (2.0**-53)
            fraction = tl.minimum(tl.maximum(fraction, 2.0**-54), _LARGEST_BELOW_ONE)
            # -log1p(-fraction): 1 - rest is exact, and makes up for the rounding of rest.
            rest = 1.0 - fraction
            lost = 1.0 - rest
            exponential = tl.where(
                lost > 0.0, -tl.log(rest) * (fraction / tl.where(lost > 0.0, lost, 1.0)), fraction
            )
            scores -= tl.log(exponential)
    best = tl.max(scores, 0)
    at = number * tl.num_programs(1) + tile
    tl.store(part_score + at, best)
    tl.store(part_id + at, tl.min(tl.where(scores == best, ids, VOCAB), 0))


@triton.jit
def join_draws(
    part_score,
    part_id,
    token_ids,  # int64 (num_rows,), written
    TILES: tl.constexpr,
    TILES_PAD: tl.constexpr,
    OPEN: tl.constexpr,
):
    """Grid (num_rows,): the best token of a row; OPEN if its score is not finite."""
    number = tl.program_id(0).to(tl.int64)
    tiles = tl.arange(0, TILES_PAD)
    at = number * TILES + tiles
    scores = tl.load(part_score + at, mask=tiles < TILES, other=float("-inf"))
    ids = tl.load(part_id + at, mask=tiles < TILES, other=2**31 - 1)
    best = tl.max(scores, 0)
    token_id = tl.min(tl.where(scores == best, ids, 2**31 - 1), 0).to(tl.int64)
    tl.store(token_ids + number, tl.where(tl.abs(best) < float("inf"), token_id, OPEN))
