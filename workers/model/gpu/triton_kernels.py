"""The Triton kernels for norms, gates and rotary embedding with the cache write.

All compute in float32 and round once.
"""

import triton
import triton.language as tl


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
