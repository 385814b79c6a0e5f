"""The Triton kernels of paged attention, for single tokens and for chunks.

A program computes one tile: some queries of one sequence, with all heads that share one KV head. It
reads only slots of its own sequence.
"""

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634


@triton.jit
def attend_tiles(
    query,  # (T, num_heads, k_dim), any strides but the last
    keys,  # (num_slots, kv_heads, k_dim), contiguous
    values,  # (num_slots, kv_heads, v_dim), contiguous
    out,  # (T, num_heads, v_dim), contiguous
    tiles,  # int32 (num_tiles, 3): first row, number of queries (0: no work), row of the tables
    positions,  # int64 (T,)
    tables,  # integers (num_tables, table_stride): block ids
    sinks,  # float32 (num_heads,), or anything where HAS_SINKS is not set
    part_out,  # float32 (num_tiles, num_splits, num_heads, v_dim)
    part_max,  # float32 (num_tiles, num_splits, num_heads), in powers of two
    part_sum,  # likewise
    query_row_stride,
    query_head_stride,
    table_stride,
    scale_log2,  # the softmax's scale times log2(e), or the scale alone where SOFTCAP > 0
    NUM_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    K_PAD: tl.constexpr,  # the next power of two
    V_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_QUERIES: tl.constexpr,
    TILE_ROWS: tl.constexpr,  # at least TILE_QUERIES times the heads of a group
    TILE_KEYS: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
    SOFTCAP: tl.constexpr,  # 0.0: none
    HAS_SINKS: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,  # 0: one program sees the whole context
    FACTOR_TYPE: tl.constexpr,  # of the factors of matrix products
    PRECISION: tl.constexpr,
):
    """Grid (num_tiles, kv_heads, num_splits). With splits, tiles have one query each and the
    partial results are combined by `join_splits`."""
    GROUP: tl.constexpr = NUM_HEADS // KV_HEADS
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_queries = tl.load(tiles + tile * 3 + 1)
    if num_queries == 0:
        return
    first_row = tl.load(tiles + tile * 3).to(tl.int64)
    table = tables + tl.load(tiles + tile * 3 + 2).to(tl.int64) * table_stride
    start = tl.load(positions + first_row)
    # Positions that some query of the tile sees.
    begin = start * 0
    end = start + num_queries
    if WINDOW > 0:
        begin = tl.maximum(start - (WINDOW - 1), 0)
    if SPLIT_TOKENS > 0:
        if split * SPLIT_TOKENS >= end:
            return
        begin = tl.maximum(begin, split * SPLIT_TOKENS)
        end = tl.minimum(end, (split + 1) * SPLIT_TOKENS)

    rows = tl.arange(0, TILE_ROWS)
    row_query = rows // GROUP
    row_head = kv_head * GROUP + rows % GROUP
    row_seen = (row_query < num_queries) & (row_query < TILE_QUERIES)
    row_position = start + row_query
    k_dims, v_dims = tl.arange(0, K_PAD), tl.arange(0, V_PAD)
    query_at = (first_row + row_query) * query_row_stride + row_head * query_head_stride
    q = tl.load(
        query + query_at[:, None] + k_dims[None, :],
        mask=row_seen[:, None] & (k_dims < K_DIM)[None, :],
        other=0.0,
    ).to(FACTOR_TYPE)

    largest = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([TILE_ROWS], tl.float32)
    if HAS_SINKS and SPLIT_TOKENS == 0:  # otherwise join_splits adds it
        largest = tl.load(sinks + row_head, mask=row_seen, other=0.0) * 1.4426950408889634
        total += 1.0
    mixed = tl.zeros([TILE_ROWS, V_PAD], tl.float32)
    key_steps = tl.arange(0, TILE_KEYS)
    for first_key in range(begin, end, TILE_KEYS):
        key_position = first_key + key_steps
        inside = key_position < end
        block = tl.load(table + key_position // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        slot = (block * BLOCK_SIZE + key_position % BLOCK_SIZE) * KV_HEADS + kv_head
        k = tl.load(
            keys + slot[None, :] * K_DIM + k_dims[:, None],
            mask=inside[None, :] & (k_dims < K_DIM)[:, None],
            other=0.0,
        ).to(FACTOR_TYPE)
        scores = tl.dot(q, k, input_precision=PRECISION) * scale_log2
        if SOFTCAP > 0:  # softcap * tanh(scores / softcap)
            faded = tl.exp2(tl.abs(scores) * (-2.0 / SOFTCAP * 1.4426950408889634))
            capped = (1.0 - faded) / (1.0 + faded) * (SOFTCAP * 1.4426950408889634)
            scores = tl.where(scores < 0, -capped, capped)
        seen = inside[None, :] & (key_position[None, :] <= row_position[:, None])
        if WINDOW > 0:
            seen = seen & (key_position[None, :] > row_position[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        # Avoid -inf - -inf for a row that has seen nothing yet.
        base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(largest - base)
        v = tl.load(
            values + slot[:, None] * V_DIM + v_dims[None, :],
            mask=inside[:, None] & (v_dims < V_DIM)[None, :],
            other=0.0,
        ).to(FACTOR_TYPE)
        mixed = mixed * shrink[:, None]
        mixed += tl.dot(weights.to(FACTOR_TYPE), v, input_precision=PRECISION)
        total = total * shrink + tl.sum(weights, 1)
        largest = new_largest

    shown = row_seen[:, None] & (v_dims < V_DIM)[None, :]
    if SPLIT_TOKENS > 0:
        part = (tile.to(tl.int64) * tl.num_programs(2) + split) * NUM_HEADS + row_head
        tl.store(part_max + part, largest, mask=row_seen)
        tl.store(part_sum + part, total, mask=row_seen)
        tl.store(part_out + part[:, None] * V_DIM + v_dims[None, :], mixed, mask=shown)
    else:
        mixed = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
        out_at = ((first_row + row_query) * NUM_HEADS + row_head) * V_DIM
        tl.store(
            out + out_at[:, None] + v_dims[None, :], mixed.to(out.dtype.element_ty), mask=shown
        )


@triton.jit
def join_splits(
    out,  # (T, num_heads, v_dim), contiguous
    tiles,  # see attend_tiles; one query each
    positions,
    sinks,
    part_out,
    part_max,
    part_sum,
    num_splits,  # of the grid of attend_tiles
    NUM_HEADS: tl.constexpr,
    V_DIM: tl.constexpr,
    V_PAD: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
):
    """Grid (num_tiles, num_heads): combines the splits of one query's head."""
    tile, head = tl.program_id(0), tl.program_id(1)
    if tl.load(tiles + tile * 3 + 1) == 0:
        return
    row = tl.load(tiles + tile * 3).to(tl.int64)
    num_used = tl.load(positions + row) // SPLIT_TOKENS + 1
    dims = tl.arange(0, V_PAD)
    largest = float("-inf")
    total = 0.0
    mixed = tl.zeros([V_PAD], tl.float32)
    if HAS_SINKS:
        largest = tl.load(sinks + head) * 1.4426950408889634
        total = 1.0
    for split in range(0, num_used):
        part = (tile.to(tl.int64) * num_splits + split) * NUM_HEADS + head
        part_largest = tl.load(part_max + part)
        new_largest = tl.maximum(largest, part_largest)
        base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        shrink, weight = tl.exp2(largest - base), tl.exp2(part_largest - base)
        found = tl.load(part_out + part * V_DIM + dims, mask=dims < V_DIM, other=0.0)
        mixed = mixed * shrink + found * weight
        total = total * shrink + tl.load(part_sum + part) * weight
        largest = new_largest
    mixed = mixed / tl.where(total == 0.0, 1.0, total)
    tl.store(
        out + (row * NUM_HEADS + head) * V_DIM + dims,
        mixed.to(out.dtype.element_ty),
        mask=dims < V_DIM,
    )
