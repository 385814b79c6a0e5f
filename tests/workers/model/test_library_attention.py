"""What other libraries' kernels are called with: stand-ins do what the documentation says of them.

The kernels themselves need a GPU: with one and with the libraries, the last tests run them.
"""

import inspect
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from tests.workers.model.test_attention import BLOCK_SIZE, CPU, NUM_BLOCKS, make_spans
from workers.engine.model import ModelRefused
from workers.model.attention.interface import AttentionFlags
from workers.model.attention.libraries import (
    FlashAttention,
    FlashInfer,
    Library,
    LibraryAttention,
    load_flash_attention,
    load_flashinfer,
)
from workers.model.attention.reference import ReferenceAttention, attend_dense, causal_mask
from workers.model.backend import choose_backend

DTYPE = torch.bfloat16
CHUNKS = {"decode": [(150, 1), (3, 1), (16, 1)], "mixed": [(40, 30), (0, 5), (9, 1), (15, 1)]}
FLAGS = {
    "plain": AttentionFlags(0.2),
    "window": AttentionFlags(0.2, window=20),
    "softcap": AttentionFlags(0.2, softcap=3.0),
    "sinks": AttentionFlags(0.2, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0])),
}


def attend_paged(
    query: Tensor, keys: Tensor, values: Tensor, tables: list[list[int]], **about: Any
) -> Tensor:
    """Causal attention of queries at the ends of their contexts, block by block from tables."""
    parts = []
    firsts, lengths = about["firsts"], about["lengths"]
    for row, (table, length) in enumerate(zip(tables, lengths, strict=True)):
        part = query[firsts[row] : firsts[row + 1]]
        own = [pages[table].flatten(0, 1)[:length] for pages in (keys, values)]
        start = length - len(part)
        seen = causal_mask(start, len(part), 0, length, about["window"], CPU)
        q, k, v = (x.transpose(0, 1)[None] for x in (part, *own))
        flags = AttentionFlags(about["scale"], softcap=about["softcap"])
        parts.append(attend_dense(q, k, v, seen, flags)[0].transpose(0, 1))
    return torch.cat(parts)


def stand_in_for_varlen(*args: Any, **kwargs: Any) -> Tensor:
    """Takes what torch's own function takes, by its signature, and does what its help says."""
    given = inspect.signature(varlen_attn).bind(*args, **kwargs).arguments
    assert given["block_table"].dtype == given["cu_seq_q"].dtype == torch.int32
    assert given["max_q"] == int(given["cu_seq_q"].diff().max())
    assert given["max_k"] == int(given["seqused_k"].max())
    assert given["enable_gqa"] == (given["query"].shape[1] != given["key"].shape[2])
    left, right = given["window_size"]
    assert right == 0
    return attend_paged(
        given["query"],
        given["key"],
        given["value"],
        given["block_table"].tolist(),
        firsts=given["cu_seq_q"].tolist(),
        lengths=given["seqused_k"].tolist(),
        window=None if left == -1 else left + 1,
        scale=given["scale"],
        softcap=None,
    )


class StandInForFlashInfer:
    """Plans and runs as BatchPrefillWithPagedKVCacheWrapper does."""

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        **wishes: Any,
    ) -> None:
        assert wishes["causal"]
        assert (num_qo_heads, num_kv_heads, head_dim_qk, page_size) == (4, 2, 64, BLOCK_SIZE)
        ends, blocks = paged_kv_indptr.tolist(), paged_kv_indices.tolist()
        pairs = list(itertools.pairwise(ends))
        self._tables = [blocks[a:b] for a, b in pairs]
        last = paged_kv_last_page_len.tolist()
        self._lengths = [(b - a - 1) * page_size + n for (a, b), n in zip(pairs, last, strict=True)]
        self._firsts, self._wishes = qo_indptr.tolist(), wishes

    def run(self, query: Tensor, pages: tuple[Tensor, Tensor]) -> Tensor:
        left = self._wishes["window_left"]
        return attend_paged(
            query,
            *pages,
            self._tables,
            firsts=self._firsts,
            lengths=self._lengths,
            window=None if left == -1 else left + 1,
            scale=self._wishes["sm_scale"],
            softcap=self._wishes["logits_soft_cap"] or None,
        )


@pytest.mark.parametrize("name", ["fa3", "flashinfer"])
@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS.keys())
@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS.keys())
def test_the_libraries_are_told_the_step_as_it_is(
    chunks: list[tuple[int, int]], flags: AttentionFlags, name: str
) -> None:
    """Several layers of a step, of different flags; what they do not take falls to torch."""
    torch.manual_seed(0)
    library: Library = FlashAttention(stand_in_for_varlen)
    if name == "flashinfer":
        library = FlashInfer(StandInForFlashInfer)
    spans = make_spans(chunks)
    query = torch.randn(sum(n for _, n in chunks), 4, 64).to(DTYPE)
    keys, values = torch.randn(2, NUM_BLOCKS * BLOCK_SIZE, 2, 64).to(DTYPE)
    prepared = LibraryAttention(BLOCK_SIZE, library).prepare(spans, CPU)

    for wanted in (FLAGS["plain"], flags, FLAGS["plain"]):
        found = prepared.attend(query, keys, values, wanted)
        expected = ReferenceAttention().prepare(spans, CPU).attend(query, keys, values, wanted)
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def test_the_libraries_take_what_they_can() -> None:
    """Otherwise the test above would hold torch against torch."""
    query, values, narrow = (
        torch.zeros(1, 4, 64).to(DTYPE),
        torch.zeros(9, 2, 64),
        torch.zeros(9, 2, 32),
    )
    by_torch, by_flashinfer = FlashAttention(stand_in_for_varlen), FlashInfer(StandInForFlashInfer)
    taken = [
        [lib.takes(query, values, f) for f in FLAGS.values()] for lib in (by_torch, by_flashinfer)
    ]
    assert taken == [[True, True, False, False], [True, True, True, False]]
    assert not any(lib.takes(query, narrow, FLAGS["plain"]) for lib in (by_torch, by_flashinfer))
    assert not by_torch.takes(query.float(), values, FLAGS["plain"])


@pytest.mark.parametrize("name", ["fa3", "flashinfer"])
def test_a_library_that_cannot_run_is_refused(name: str) -> None:
    """With one sentence, before anything is served."""
    with pytest.raises(ModelRefused, match=f"attention {name} needs a CUDA device"):
        choose_backend(name, DTYPE, CPU, BLOCK_SIZE, print, fused=True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["fa3", "flashinfer"])
def test_the_libraries_equal_the_reference_on_a_gpu(name: str) -> None:
    """The kernels themselves, where they are installed."""
    device = torch.device("cuda")
    try:
        backend = (
            load_flash_attention(BLOCK_SIZE)
            if name == "fa3"
            else load_flashinfer(BLOCK_SIZE, device)
        )
    except ModelRefused as reason:
        pytest.skip(str(reason))
    spans = make_spans(CHUNKS["mixed"])
    query = torch.randn(37, 4, 64).to(device, DTYPE)
    keys, values = torch.randn(2, NUM_BLOCKS * BLOCK_SIZE, 2, 64).to(device, DTYPE)

    for flags in (FLAGS["plain"], FLAGS["window"]):
        found = backend.prepare(spans, device).attend(query, keys, values, flags)
        expected = ReferenceAttention().prepare(spans, device).attend(query, keys, values, flags)
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
