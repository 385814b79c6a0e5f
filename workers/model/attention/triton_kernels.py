"""The Triton kernels of paged attention, for short spans and for chunks.

A program computes items of work, each of them some queries of one sequence, with all heads that
share one KV head, over the whole context or over one part of it. It reads only slots of the item's
own sequence, and an item's numbers do not depend on the program that computes it.
"""

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634
# An item of work, int64: first row, number of queries, row of the tables, number of the part,
# first of the item's partial results, number of parts of its context.
ITEM_FIELDS = 6
_ITEM: tl.constexpr = tl.constexpr(ITEM_FIELDS)
# A join of the parts of one row, int64: row, first of its partial results, number of parts.
JOIN_FIELDS = 3
_JOIN: tl.constexpr = tl.constexpr(JOIN_FIELDS)
_JOINED: tl.constexpr = tl.constexpr(16)  # parts that a program reads at once


@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["items", "num_items", "positions", "tables"],
)
def attend_items(
    query,  # (T, num_heads, k_dim), any strides but the last
    keys,  # (num_slots, kv_heads, k_dim), contiguous
    values,  # (num_slots, kv_heads, v_dim), contiguous
    out,  # (T, num_heads, v_dim), contiguous
    items,  # (num_items, ITEM_FIELDS), and any numbers behind them
    num_items,  # int64 (1,)
    positions,  # int64 (T,)
    tables,  # int64 (num_tables, table_stride): block ids
    sinks,  # float32 (num_heads,), or anything where HAS_SINKS is not set
    part_out,  # float32 (num_parts, num_heads, v_dim)
    part_max,  # float32 (num_parts, num_heads), in powers of two
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
    TILE_ROWS: tl.constexpr,  # at least the queries of an item times the heads of a group
    TILE_KEYS: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
    SOFTCAP: tl.constexpr,  # 0.0: none
    HAS_SINKS: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,  # of a part; 0: every item sees its whole context
    FACTOR_TYPE: tl.constexpr,  # of the factors of matrix products
    PRECISION: tl.constexpr,
):
    """Grid (num_programs, kv_heads), of any number of programs, which take the items in turn.
    Partial results are combined by `join_parts`."""
    GROUP: tl.constexpr = NUM_HEADS // KV_HEADS
    kv_head = tl.program_id(1)
    rows = tl.arange(0, TILE_ROWS)
    row_query = rows // GROUP
    row_head = kv_head * GROUP + rows % GROUP
    k_dims, v_dims = tl.arange(0, K_PAD), tl.arange(0, V_PAD)
    first, last, step = tl.program_id(0), tl.load(num_items), tl.num_programs(0)
    if SPLIT_TOKENS == 0:  # one each; a loop would take registers
        last, step = first + 1, 1
    for number in range(first, last, step):
        item = items + number * _ITEM
        first_row, num_queries = tl.load(item), tl.load(item + 1)
        start = tl.load(positions + first_row)
        # Positions that some query of the item sees.
        begin = start * 0
        end = start + num_queries
        if WINDOW > 0:
            begin = tl.maximum(start - (WINDOW - 1), 0)
        num_parts = begin * 0 + 1
        if SPLIT_TOKENS > 0:
            part = tl.load(item + 3)
            num_parts = tl.load(item + 5)
            begin = tl.maximum(begin, part * SPLIT_TOKENS)
            end = tl.minimum(end, (part + 1) * SPLIT_TOKENS)
        row_seen = row_query < num_queries
        query_at = (first_row + row_query) * query_row_stride + row_head * query_head_stride
        q = tl.load(
            query + query_at[:, None] + k_dims[None, :],
            mask=row_seen[:, None] & (k_dims < K_DIM)[None, :],
            other=0.0,
        ).to(FACTOR_TYPE)
        largest, total, mixed = _attend(
            q,
            keys + kv_head * K_DIM,
            values + kv_head * V_DIM,
            tables + tl.load(item + 2) * table_stride,
            begin,
            end,
            start + row_query,
            scale_log2,
            KV_HEADS,
            K_DIM,
            V_DIM,
            K_PAD,
            V_PAD,
            BLOCK_SIZE,
            TILE_ROWS,
            TILE_KEYS,
            WINDOW,
            SOFTCAP,
            FACTOR_TYPE,
            PRECISION,
        )
        shown = row_seen[:, None] & (v_dims < V_DIM)[None, :]
        if num_parts > 1:
            at = tl.load(item + 4) + row_query * num_parts + tl.load(item + 3)
            at = at * NUM_HEADS + row_head
            tl.store(part_max + at, largest, mask=row_seen)
            tl.store(part_sum + at, total, mask=row_seen)
            tl.store(part_out + at[:, None] * V_DIM + v_dims[None, :], mixed, mask=shown)
        else:
            if HAS_SINKS:  # in the order of join_parts
                sink = tl.load(sinks + row_head, mask=row_seen, other=0.0) * 1.4426950408889634
                new_largest = tl.maximum(sink, largest)
                weight = tl.exp2(largest - new_largest)
                mixed = mixed * weight[:, None]
                total = tl.exp2(sink - new_largest) + total * weight
            mixed = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
            out_at = ((first_row + row_query) * NUM_HEADS + row_head) * V_DIM
            tl.store(
                out + out_at[:, None] + v_dims[None, :], mixed.to(out.dtype.element_ty), mask=shown
            )


@triton.jit
def _attend(
    q,  # (TILE_ROWS, K_PAD)
    keys,  # of the KV head's first slot
    values,
    table,  # int64: the sequence's block ids
    begin,
    end,
    row_position,  # int64 (TILE_ROWS,)
    scale_log2,
    KV_HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    K_PAD: tl.constexpr,
    V_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    FACTOR_TYPE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The largest score of each row over positions `begin .. end - 1`, in powers of two, the sum of
    the weights relative to it, and the sum of the values by weight."""
    largest = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([TILE_ROWS], tl.float32)
    mixed = tl.zeros([TILE_ROWS, V_PAD], tl.float32)
    k_dims, v_dims = tl.arange(0, K_PAD), tl.arange(0, V_PAD)
    key_steps = tl.arange(0, TILE_KEYS)
    for first_key in range(begin, end, TILE_KEYS):
        key_position = first_key + key_steps
        inside = key_position < end
        block = tl.load(table + key_position // BLOCK_SIZE, mask=inside, other=0)
        slot = (block * BLOCK_SIZE + key_position % BLOCK_SIZE) * KV_HEADS
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
    return largest, total, mixed


@triton.jit(do_not_specialize_on_alignment=["joins", "positions"])
def join_parts(
    out,  # (T, num_heads, v_dim), contiguous
    joins,  # (num_joins, JOIN_FIELDS)
    positions,  # int64 (T,)
    sinks,
    part_out,  # see attend_items
    part_max,
    part_sum,
    NUM_HEADS: tl.constexpr,
    V_DIM: tl.constexpr,
    V_PAD: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
):
    """Grid (num_joins, num_heads): combines the parts of one row's head, in order."""
    join, head = joins + tl.program_id(0) * _JOIN, tl.program_id(1)
    if tl.load(join + 2) <= 1:
        return
    row = tl.load(join)
    position = tl.load(positions + row)
    first = position * 0
    if WINDOW > 0:
        first = tl.maximum(position - (WINDOW - 1), 0) // SPLIT_TOKENS
    parts, dims = tl.arange(0, _JOINED), tl.arange(0, V_PAD)
    largest = float("-inf")
    total = 0.0
    mixed = tl.zeros([V_PAD], tl.float32)
    if HAS_SINKS:
        largest = tl.load(sinks + head) * 1.4426950408889634
        total = 1.0
    # Starts at a multiple of _JOINED, so the order of additions depends on the row alone.
    for begin in range(first // _JOINED * _JOINED, position // SPLIT_TOKENS + 1, _JOINED):
        part = begin + parts
        inside = (part >= first) & (part <= position // SPLIT_TOKENS)
        at = (tl.load(join + 1) + part) * NUM_HEADS + head
        part_largest = tl.load(part_max + at, mask=inside, other=float("-inf"))
        new_largest = tl.maximum(largest, tl.max(part_largest, 0))
        base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        shrink, weight = tl.exp2(largest - base), tl.exp2(part_largest - base)
        found = tl.load(
            part_out + at[:, None] * V_DIM + dims[None, :],
            mask=inside[:, None] & (dims < V_DIM)[None, :],
            other=0.0,
        )
        mixed = mixed * shrink + tl.sum(found * weight[:, None], 0)
        total = total * shrink
        total += tl.sum(tl.load(part_sum + at, mask=inside, other=0.0) * weight, 0)
        largest = new_largest
    mixed = mixed / tl.where(total == 0.0, 1.0, total)
    tl.store(
        out + (row * NUM_HEADS + head) * V_DIM + dims,
        mixed.to(out.dtype.element_ty),
        mask=dims < V_DIM,
    )


@triton.jit(
    do_not_specialize=["num_rows", "most_items"],
    do_not_specialize_on_alignment=["tables_of"],
)
def list_parts(
    positions,  # int64 (num_rows,)
    tables_of,  # int64 (num_rows,): each row's row of the tables
    items,  # (most_items, ITEM_FIELDS), written
    num_items,  # int64 (1,), written
    joins,  # (num_rows, JOIN_FIELDS), written
    num_rows,
    most_items,  # no fewer than the parts of all rows
    SPLIT_TOKENS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Grid (num_rows,): the items and the join of one row of one token; the last program writes
    the number of all items too."""
    row = tl.program_id(0).to(tl.int64)
    steps = tl.arange(0, TILE)
    first = row * 0  # parts of the rows before
    for begin in range(0, row, TILE):
        others = begin + steps
        position = tl.load(positions + others, mask=others < row, other=0)
        first += tl.sum(tl.where(others < row, position // SPLIT_TOKENS + 1, 0), 0)
    count = tl.load(positions + row) // SPLIT_TOKENS + 1
    table = tl.load(tables_of + row)
    for begin in range(0, count, TILE):
        part = begin + steps
        inside = (part < count) & (first + part < most_items)
        item = items + (first + part) * _ITEM
        tl.store(item, part * 0 + row, mask=inside)
        tl.store(item + 1, part * 0 + 1, mask=inside)
        tl.store(item + 2, part * 0 + table, mask=inside)
        tl.store(item + 3, part, mask=inside)
        tl.store(item + 4, part * 0 + first, mask=inside)
        tl.store(item + 5, part * 0 + count, mask=inside)
    tl.store(joins + row * _JOIN, row)
    tl.store(joins + row * _JOIN + 1, first)
    tl.store(joins + row * _JOIN + 2, count)
    if row == num_rows - 1:
        tl.store(num_items, tl.minimum(first + count, most_items))
