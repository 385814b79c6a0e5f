"""The packed attention back end, compared with the reference for every flag on the same cache."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from workers.engine.interface import ModelRefused
from workers.model.attention import varlen
from workers.model.attention.interface import AttentionFlags, LayerShape, RowSpan
from workers.model.attention.packed import PackedAttention
from workers.model.attention.reference import ReferenceAttention
from workers.model.backend import choose_backend
from workers.model.runner import block_slots

NUM_BLOCKS, BLOCK_SIZE = 64, 16
CPU = torch.device("cpu")

FLAGS = {
    "plain": AttentionFlags(0.25),
    "window": AttentionFlags(0.25, window=20),
    "window of one": AttentionFlags(0.25, window=1),
    "softcap": AttentionFlags(0.25, softcap=3.0),
    "sinks": AttentionFlags(0.25, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0])),
    "all": AttentionFlags(0.3, 20, 3.0, torch.tensor([0.5, -1.0, 2.0, 0.0])),
}
# (start, num_tokens) of each chunk: decoding rows of very different lengths among prompt chunks
BATCHES = {
    "decode": [(0, 1), (5, 1), (127, 1), (128, 1), (255, 1)],
    "equal lengths": [(31, 1), (31, 1)],
    "prefill": [(0, 40)],
    "mixed": [(0, 1), (0, 33), (16, 17), (200, 1), (30, 50)],
}


def make_spans(chunks: list[tuple[int, int]], seed: int = 0) -> list[RowSpan]:
    """Spans with block tables in random order."""
    blocks = np.random.default_rng(seed).permutation(NUM_BLOCKS).tolist()
    spans, first = [], 0
    for start, num_tokens in chunks:
        end = start + num_tokens
        table = [blocks.pop() for _ in range(-(-end // BLOCK_SIZE))]
        spans.append(RowSpan(first, num_tokens, start, block_slots(table, end, BLOCK_SIZE)))
        first += num_tokens
    return spans


def random_cache(kv_heads: int, dim: int) -> torch.Tensor:
    return torch.randn(NUM_BLOCKS * BLOCK_SIZE, kv_heads, dim)


@pytest.mark.parametrize(
    ("kv_heads", "num_scores"), [(1, None), (2, None), (4, None), (2, 1), (2, 100), (2, 400)]
)
@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS.keys())
@pytest.mark.parametrize("chunks", BATCHES.values(), ids=BATCHES.keys())
def test_packed_attention_equals_the_reference(
    chunks: list[tuple[int, int]],
    flags: AttentionFlags,
    kv_heads: int,
    num_scores: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Values have another size than keys, so that mixing them up is noticed. Long chunks are
    computed in slices, also of one query, and of several, the last one shorter."""
    if num_scores is not None:
        monkeypatch.setattr("workers.model.attention.packed._SLICE_SCORES", num_scores)
    torch.manual_seed(0)
    spans = make_spans(chunks)
    query = torch.randn(sum(n for _, n in chunks), 4, 16)
    keys, values = random_cache(kv_heads, 16), random_cache(kv_heads, 24)

    expected = ReferenceAttention().prepare(spans, CPU).attend(query, keys, values, flags)
    found = PackedAttention().prepare(spans, CPU).attend(query, keys, values, flags)

    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_the_reference_is_softmax_attention_over_the_window() -> None:
    """Compared with the formula for one head and one query."""
    torch.manual_seed(0)
    [span] = make_spans([(9, 1)])
    query, keys, values = torch.randn(1, 1, 8), random_cache(1, 8), random_cache(1, 8)

    flags = AttentionFlags(0.5, window=4)
    found = ReferenceAttention().prepare([span], CPU).attend(query, keys, values, flags)

    last = [int(slot) for slot in span.slots[6:]]
    weights = torch.stack([0.5 * query[0, 0] @ keys[s, 0] for s in last]).softmax(0)
    expected = sum(w * values[s, 0] for w, s in zip(weights, last, strict=True))
    torch.testing.assert_close(found[0, 0], expected)


@pytest.mark.parametrize("chunks", BATCHES.values(), ids=BATCHES.keys())
def test_nothing_of_another_sequence_can_be_read(chunks: list[tuple[int, int]]) -> None:
    """All other slots contain NaN, which even a mask would not stop."""
    torch.manual_seed(0)
    spans = make_spans(chunks)
    query = torch.randn(sum(n for _, n in chunks), 4, 16)
    keys, values = random_cache(2, 16), random_cache(2, 16)
    is_foreign = torch.ones(len(keys), dtype=torch.bool)
    is_foreign[np.concatenate([span.slots for span in spans])] = False
    keys[is_foreign] = values[is_foreign] = float("nan")

    found = PackedAttention().prepare(spans, CPU).attend(query, keys, values, FLAGS["plain"])

    assert found.isfinite().all()


def flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    ends: torch.Tensor,
    _: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
) -> torch.Tensor:
    """Stands in for torch's, which no CPU has: by the formula."""
    bounds = ends.tolist()
    assert bounds[-1] == len(query) == len(key)
    assert max(np.diff(bounds)) == max_q == max_k
    flags = AttentionFlags(scale, window_size[0] + 1 or None)
    out = torch.empty_like(query)
    for first, last in itertools.pairwise(bounds):
        rows, span = slice(first, last), RowSpan(0, last - first, 0, np.arange(last - first))
        step = ReferenceAttention().prepare([span], CPU)
        out[rows] = step.attend(query[rows], key[rows], value[rows], flags)
    return out


def use(flash: Callable[..., torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen, "_flash_attention", lambda: flash)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize(
    ("chunks", "calls"),
    [
        ([(0, 70)], 1),
        ([(0, 70), (0, 33)], 1),
        ([(9, 1), (0, 70), (0, 33)], 1),
        ([(0, 70), (9, 40), (0, 5), (0, 33)], 1),
        ([(0, 1), (9, 40)], 0),
    ],
)
def test_whole_prompts_go_to_flash_attention_together(
    chunks: list[tuple[int, int]],
    calls: int,
    window: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Alone, and beside tokens and later parts of prompts, which do not."""
    called: list[object] = []

    def flash(*arguments: Any, **options: Any) -> torch.Tensor:
        called.append(arguments)
        return flash_attention(*arguments, **options)

    use(flash, monkeypatch)
    torch.manual_seed(0)
    spans, flags = make_spans(chunks), AttentionFlags(0.1, window)
    num_tokens = sum(n for _, n in chunks)
    query, keys, values = (
        part.bfloat16()
        for part in (torch.randn(num_tokens, 4, 64), random_cache(2, 64), random_cache(2, 64))
    )

    found = PackedAttention(flash=True).prepare(spans, CPU).attend(query, keys, values, flags)

    expected = ReferenceAttention().prepare(spans, CPU).attend(query, keys, values, flags)
    torch.testing.assert_close(found, expected, rtol=3e-2, atol=3e-2)
    assert len(called) == calls


PLAIN = LayerShape(4, 2, 64, 64, AttentionFlags(0.1))


def test_flash_attention_is_used_where_it_agrees_with_the_reference(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In every layer; one that is wrong, or that a build of torch lacks, is named in the log."""

    def wrong(*arguments: Any, **options: Any) -> torch.Tensor:
        return flash_attention(*arguments, **options) * 1.5

    def lacking(*_: Any, **__: Any) -> torch.Tensor:
        raise RuntimeError("no kernel")

    faults = []
    for flash in (flash_attention, wrong, lacking):
        use(flash, monkeypatch)
        faults.append(varlen.fault_of(PLAIN, torch.bfloat16, CPU))
    assert faults[0] is None
    assert faults[1] is not None
    assert faults[1].endswith(" of the largest number of a head")
    assert faults[2] == "it raises RuntimeError: no kernel"

    monkeypatch.setattr(
        "workers.model.backend.fault_of", lambda shape, *_: None if shape is PLAIN else "off"
    )
    windowed = LayerShape(4, 2, 64, 64, AttentionFlags(0.1, 20))
    gpu = torch.device("cuda")
    for attention, shapes, has_flash in (
        ("auto", [PLAIN], True),
        ("torch", [PLAIN], False),
        ("auto", [PLAIN, windowed], False),
    ):
        backend = choose_backend(attention, torch.bfloat16, gpu, print, fused=True, shapes=shapes)
        assert isinstance(backend.attention, PackedAttention)
        assert backend.attention._flash is has_flash
        assert backend.layout is None
    [record] = caplog.records
    assert record.message == "torch's FlashAttention is not used for whole prompts: off"


def test_an_unknown_attention_is_refused() -> None:
    with pytest.raises(ModelRefused, match="attention triton is not one of auto, torch"):
        choose_backend("triton", torch.float32, CPU, print, fused=True)


@pytest.mark.parametrize(
    ("dtype", "dims", "flags", "can"),
    [
        (torch.bfloat16, (128, 128), AttentionFlags(0.1, 99), True),
        (torch.float16, (96, 96), AttentionFlags(0.1), True),
        (torch.float32, (128, 128), AttentionFlags(0.1), False),
        (torch.bfloat16, (128, 64), AttentionFlags(0.1), False),
        (torch.bfloat16, (100, 100), AttentionFlags(0.1), False),
        (torch.bfloat16, (512, 512), AttentionFlags(0.1), False),
        (torch.bfloat16, (64, 64), AttentionFlags(0.1, softcap=30.0), False),
        (torch.bfloat16, (64, 64), AttentionFlags(0.1, sinks=torch.ones(4)), False),
    ],
)
def test_layers_that_flash_attention_lacks_are_left_to_others(
    dtype: torch.dtype,
    dims: tuple[int, int],
    flags: AttentionFlags,
    can: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has no float32, no two sizes of heads, no capped scores and no sinks. That is no fault."""
    use(lambda *_, **__: torch.zeros(()), monkeypatch)
    query, keys, values = (
        torch.zeros(3, n, dim, dtype=dtype) for n, dim in ((4, dims[0]), (2, dims[0]), (2, dims[1]))
    )

    assert varlen.takes(query, keys, values, flags) == can
    fault = varlen.fault_of(LayerShape(4, 2, *dims, flags), dtype, CPU)
    assert (fault is not None) == can
