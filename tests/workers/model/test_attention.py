"""The packed attention back end, compared with the reference for every flag on the same cache."""

import numpy as np
import pytest
import torch

from workers.engine.interface import ModelRefused
from workers.model.attention.interface import AttentionFlags, Span
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


def make_spans(chunks: list[tuple[int, int]], seed: int = 0) -> list[Span]:
    """Spans with block tables in random order."""
    blocks = np.random.default_rng(seed).permutation(NUM_BLOCKS).tolist()
    spans, first = [], 0
    for start, num_tokens in chunks:
        end = start + num_tokens
        table = [blocks.pop() for _ in range(-(-end // BLOCK_SIZE))]
        spans.append(Span(first, num_tokens, start, block_slots(table, end, BLOCK_SIZE)))
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


def test_on_a_gpu_torch_computes_all() -> None:
    backend = choose_backend("auto", torch.bfloat16, torch.device("cuda"), print, fused=True)

    assert isinstance(backend.attention, PackedAttention)
    assert backend.layout is None


def test_an_unknown_attention_is_refused() -> None:
    with pytest.raises(ModelRefused, match="attention triton is not one of auto, torch"):
        choose_backend("triton", torch.float32, CPU, print, fused=True)
