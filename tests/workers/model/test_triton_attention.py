"""The Triton attention kernels, compared with the reference: compiled on a GPU, otherwise
interpreted.

Over 300 lines: one kernel, with all shapes and flags.
"""

import itertools
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.marks import LONG
from tests.tiny_models import VOCAB_SIZE, save_tiny_model
from tests.workers.model.conftest import paged
from tests.workers.model.driver import make_prompts, make_sequence, run_to_end
from tests.workers.model.test_attention import BLOCK_SIZE, NUM_BLOCKS, make_spans
from workers.engine.interface import ModelRefused
from workers.ipc.messages import EngineOptions
from workers.model import proof
from workers.model.ahead.self_test import wrong_prompts
from workers.model.attention import varlen
from workers.model.attention.interface import AttentionFlags, Span
from workers.model.attention.reference import ReferenceAttention, RowsStep
from workers.model.backend import choose_backend
from workers.model.loader import load_model
from workers.model.probe import AttentionShape

triton_attention = pytest.importorskip("workers.model.attention.triton_attention")
triton_plan = pytest.importorskip("workers.model.attention.triton_attention")

pytestmark = pytest.mark.campaign  # Triton's interpreter is slow

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# (query heads, KV heads)
HEADS = [(1, 1), (2, 2), (4, 2), (6, 2), (8, 1), (3, 1), (10, 2), (20, 1)]
DIMS = [64, 72, 80, 96, 112, 128, 192, 256]
# Models with every kernel interpreted; the slow ones run in the campaigns.
OTHER_FAMILIES = ["qwen3", "gemma2", "gpt2"]


@dataclass(frozen=True)
class Case:
    """One random batch and the parameters of its layer."""

    chunks: list[tuple[int, int]]
    heads: tuple[int, int]
    dims: tuple[int, int]
    flags: AttentionFlags
    dtype: torch.dtype


def random_case(seed: int) -> Case:
    """A third of the batches decode alone, a third are chunks, a third are both."""
    generator = random.Random(seed)
    singles = [(generator.randrange(250), 1) for _ in range(generator.randint(1, 4))]
    longer = [
        (generator.choice([0, 16, generator.randrange(150)]), generator.randint(2, 70))
        for _ in range(generator.randint(1, 2))
    ]
    chunks = [singles, longer, singles[:2] + longer][seed % 3]
    generator.shuffle(chunks)
    heads = generator.choice(HEADS)
    k_dim = generator.choice(DIMS)
    v_dim = generator.choice([k_dim, generator.choice(DIMS)])
    sinks = torch.randn(heads[0], generator=torch.Generator().manual_seed(seed)) * 2
    flags = AttentionFlags(
        scale=k_dim**-0.5,
        window=generator.choice([None, None, 1, generator.randint(2, 200)]),
        softcap=generator.choice([None, None, 3.0, 30.0]),
        sinks=generator.choice([None, sinks.to(DEVICE)]),
    )
    return Case(chunks, heads, (k_dim, v_dim), flags, generator.choice(DTYPES))


def attend_both(
    spans: list[Span], query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, case: Case
) -> tuple[torch.Tensor, torch.Tensor]:
    """The results of the kernels and of the reference."""
    backends = (triton_attention.TritonAttention(BLOCK_SIZE), ReferenceAttention())
    found, expected = (
        backend.prepare(spans, DEVICE).attend(query, keys, values, case.flags)
        for backend in backends
    )
    return found, expected


def random_tensors(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values; queries are part of a wider tensor, as in a merged projection."""
    torch.manual_seed(0)
    num_heads, kv_heads = case.heads
    k_dim, v_dim = case.dims
    num_tokens, num_slots = sum(n for _, n in case.chunks), NUM_BLOCKS * BLOCK_SIZE
    beside = torch.randn(num_tokens, num_heads * k_dim + 32)
    query = beside.to(DEVICE, case.dtype)[:, : num_heads * k_dim].view(-1, num_heads, k_dim)
    keys = torch.randn(num_slots, kv_heads, k_dim).to(DEVICE, case.dtype)
    values = torch.randn(num_slots, kv_heads, v_dim).to(DEVICE, case.dtype)
    return query, keys, values


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """The kernels round the softmax's weights to the tensors' type before they are added up."""
    rtol, atol = {
        torch.float32: (1e-4, 1e-5),
        torch.float16: (4e-3, 4e-3),
        torch.bfloat16: (3e-2, 3e-2),
    }[expected.dtype]
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)


NUM_SEEDS = 60
# Of cases that together have every size and type, and every flag in every kind of batch.
IN_THE_SUITE = [2, 3, 4, 18, 22, 25, 29, 31, 34, 36, 42, 43, 56, 57, 59]


@pytest.mark.parametrize("split_tokens", [64, pytest.param(512, marks=pytest.mark.campaign)])
@pytest.mark.parametrize(
    "seed",
    [pytest.param(n, marks=() if n in IN_THE_SUITE else LONG) for n in range(NUM_SEEDS)],
)
def test_the_kernels_equal_the_reference(
    seed: int, split_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random heads, sizes, flags and batches; contexts in one part (short ones) and in several,
    and again with all in one."""
    monkeypatch.setattr(triton_attention, "SPLIT_TOKENS", split_tokens)
    case = random_case(seed)
    spans = make_spans(case.chunks, seed)

    found, expected = attend_both(spans, *random_tensors(case), case)

    assert_close(found, expected)


def _varlen_attn(
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
    enable_gqa: bool,
) -> torch.Tensor:
    """Stands in for torch's FlashAttention, which no CPU has: by the formula."""
    assert enable_gqa
    bounds = ends.tolist()
    assert bounds[-1] == len(query) == len(key)
    assert max(np.diff(bounds)) == max_q == max_k
    window = window_size[0] + 1 or None
    out = torch.empty_like(query)
    for first, last in itertools.pairwise(bounds):
        span = Span(0, last - first, 0, np.arange(last - first))
        rows = slice(first, last)
        step = ReferenceAttention().prepare([span], DEVICE)
        flags = AttentionFlags(scale, window)
        out[rows] = step.attend(query[rows], key[rows], value[rows], flags)
    return out


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize(
    "chunks",
    [
        [(0, 70)],
        [(0, 70), (0, 33)],
        [(9, 1), (0, 70), (0, 33)],
        [(0, 70), (9, 40), (0, 5), (0, 33)],
    ],
)
def test_whole_prompts_are_torch_s(
    chunks: list[tuple[int, int]], window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, together, and beside tokens and parts that the kernels attend; short ones are theirs
    too."""
    if DEVICE.type == "cpu":
        monkeypatch.setattr(varlen, "varlen_attn", _varlen_attn)
    backend = triton_attention.TritonAttention(BLOCK_SIZE, torch_prompts=True)
    case = Case(chunks, (4, 2), (64, 64), AttentionFlags(0.1, window), torch.bfloat16)
    spans, tensors = make_spans(chunks), random_tensors(case)

    found = backend.prepare(spans, DEVICE).attend(*tensors, case.flags)

    assert_close(found, ReferenceAttention().prepare(spans, DEVICE).attend(*tensors, case.flags))


def test_the_self_test_tells_right_prompts_from_wrong_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And from a torch without this attention."""

    def wrong(*arguments: Any, **options: Any) -> torch.Tensor:
        return _varlen_attn(*arguments, **options) * 1.5

    def lacking(*arguments: Any, **options: Any) -> torch.Tensor:
        raise RuntimeError("no kernel")

    shape = AttentionShape(4, 2, 64, 64, AttentionFlags(0.1))
    reasons = []
    for stand_in in (_varlen_attn, wrong, lacking):
        monkeypatch.setattr(varlen, "varlen_attn", stand_in)
        reasons.append(wrong_prompts(shape, BLOCK_SIZE, torch.bfloat16, DEVICE))

    assert reasons[0] is None
    assert reasons[1] is not None
    assert "fails at prompts: off by" in reasons[1]
    assert reasons[2] == "it raises RuntimeError: no kernel"


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
def test_what_torch_lacks_is_the_kernels_(
    dtype: torch.dtype, dims: tuple[int, int], flags: AttentionFlags, can: bool
) -> None:
    """FlashAttention has no float32, no two sizes of heads, no capped scores and no sinks."""
    case = Case([(0, 40)], (4, 2), dims, flags, dtype)

    assert varlen.takes(*random_tensors(case), flags) == can


def test_the_random_cases_cover_every_flag() -> None:
    """Otherwise a change of the generator could leave a flag untested."""
    cases = [random_case(seed) for seed in IN_THE_SUITE]
    assert {case.heads for case in cases} == set(HEADS)
    assert {dim for case in cases for dim in case.dims} == set(DIMS)
    assert {case.dtype for case in cases} == set(DTYPES)
    assert any(case.dims[0] != case.dims[1] for case in cases)
    assert {1} < {case.flags.window for case in cases if case.flags.window is not None}
    for kind in range(3):
        flags = [random_case(seed).flags for seed in IN_THE_SUITE if seed % 3 == kind]
        for name in ("window", "softcap", "sinks"):
            assert len({getattr(each, name) is None for each in flags}) == 2


@pytest.mark.parametrize("chunks", [[(150, 1), (3, 1)], [(40, 30), (0, 5), (9, 1)]])
def test_nothing_of_another_sequence_can_be_read(
    chunks: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All other slots contain NaN, which even a mask would not stop."""
    monkeypatch.setattr(triton_attention, "SPLIT_TOKENS", 64)
    case = Case(chunks, (4, 2), (64, 64), AttentionFlags(0.2), torch.float32)
    query, keys, values = random_tensors(case)
    spans = make_spans(chunks)
    is_foreign = torch.ones(len(keys), dtype=torch.bool)
    is_foreign[np.concatenate([span.slots for span in spans])] = False
    keys[is_foreign] = values[is_foreign] = float("nan")

    backend = triton_attention.TritonAttention(BLOCK_SIZE)
    found = backend.prepare(spans, DEVICE).attend(query, keys, values, case.flags)

    assert found.isfinite().all()


def test_nan_stays_in_its_own_row() -> None:
    """The sampler then fails that job; a kernel that hid the NaN would invent tokens."""
    chunks = [(40, 1), (40, 1), (0, 20)]
    case = Case(chunks, (4, 2), (64, 64), AttentionFlags(0.2), torch.float32)
    query, keys, values = random_tensors(case)
    query[1, 2, 5] = float("nan")

    backend = triton_attention.TritonAttention(BLOCK_SIZE)
    found = backend.prepare(make_spans(chunks), DEVICE).attend(query, keys, values, case.flags)

    assert found[1, 2].isnan().all()
    found[1, 2] = 0
    assert found.isfinite().all()


@pytest.mark.parametrize("window", [None, 90])
def test_a_row_s_numbers_do_not_depend_on_its_neighbours(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit: a row is split into parts by its own length, alone, beside a chunk, and with
    the next tokens of its sequence."""
    monkeypatch.setattr(triton_attention, "SPLIT_TOKENS", 64)
    flags = AttentionFlags(0.2, window, sinks=torch.ones(4, device=DEVICE))
    case = Case([(63, 2), (230, 1), (9, 40)], (4, 2), (64, 64), flags, torch.float32)
    query, keys, values = random_tensors(case)
    spans = make_spans(case.chunks)
    backend = triton_attention.TritonAttention(BLOCK_SIZE)

    together = backend.prepare(spans, DEVICE).attend(query, keys, values, case.flags)

    for first, start, slots in ((0, 63, spans[0].slots[:64]), (2, 230, spans[1].slots)):
        row = query[first : first + 1]
        alone = backend.prepare([Span(0, 1, start, slots)], DEVICE)
        assert torch.equal(together[first : first + 1], alone.attend(row, keys, values, case.flags))


def test_the_work_is_bounded_by_the_parts_of_all_contexts() -> None:
    """One long context among many short ones adds its own parts only; a chunk, its tiles."""
    chunks = [(5_000, 1), *[(20, 1)] * 30, (40, 100)]
    spans, first = [], 0
    for start, num_tokens in chunks:
        spans.append(Span(first, num_tokens, start, np.arange(start + num_tokens)))
        first += num_tokens

    tiles, parts = triton_plan.plan_spans(spans, 4, 32, 512, BLOCK_SIZE, DEVICE).works

    assert (len(tiles.items), tiles.num_items.tolist(), tiles.joins) == (4, [4], None)
    assert len(parts.items) == parts.num_parts == 10 + 30
    assert parts.num_items.tolist() == [10 + 30]
    assert parts.joins is not None
    assert parts.joins.tolist() == [[0, 0, 10]]


@pytest.mark.parametrize(("most_parts", "few_programs"), [(9, 1024), (40, 1024), (40, 4)])
def test_tables_on_the_device_give_what_spans_give(
    most_parts: int, few_programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, with room for the exact number of parts and for more, and with fewer programs
    than parts, each of which computes several."""
    monkeypatch.setattr(triton_attention, "SPLIT_TOKENS", 64)
    monkeypatch.setattr(triton_attention, "_FEW_PROGRAMS", few_programs)
    chunks = [(230, 1), (3, 1), (64, 1), (63, 1), (5, 1)]
    case = Case(chunks, (4, 2), (64, 64), AttentionFlags(0.2), torch.float32)
    query, keys, values = random_tensors(case)
    spans = make_spans(chunks)
    tables = torch.zeros(7, 20, dtype=torch.int64, device=DEVICE)
    rows = torch.tensor([6, 2, 3, 0, 5], device=DEVICE)
    for row, span in zip(rows.tolist(), spans, strict=True):
        blocks = span.slots[::BLOCK_SIZE] // BLOCK_SIZE
        tables[row, : len(blocks)] = torch.from_numpy(blocks)
    positions = torch.tensor([start for start, _ in chunks], device=DEVICE)
    backend = triton_attention.TritonAttention(BLOCK_SIZE)

    step = RowsStep(rows, positions, tables, most_parts, None, BLOCK_SIZE)
    found = backend.prepare_rows(step).attend(query, keys, values, case.flags)

    expected = backend.prepare(spans, DEVICE).attend(query, keys, values, case.flags)
    assert torch.equal(found, expected)


def test_many_parts_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than the kernel reads at once, from a part in the middle of these where a window starts
    there; a row's numbers stay the same beside a longer one."""
    monkeypatch.setattr(triton_attention, "SPLIT_TOKENS", 16)
    for window in (None, 150):
        flags = AttentionFlags(0.2, window, sinks=torch.ones(2, device=DEVICE))
        case = Case([(270, 1), (560, 1)], (2, 1), (64, 64), flags, torch.float32)
        query, keys, values = random_tensors(case)
        spans = make_spans(case.chunks)

        found, expected = attend_both(spans, query, keys, values, case)
        alone, _ = attend_both(spans[:1], query[:1], keys, values, case)

        assert_close(found, expected)
        assert torch.equal(found[:1], alone)


@pytest.mark.parametrize(("start", "num_parts"), [(0, 1), (9_000, 36)])
def test_a_recorded_step_starts_no_more_programs_than_run_at_once(
    start: int, num_parts: int
) -> None:
    """A graph has room for the longest context, and its kernels read how many parts there are: what
    one row costs does not grow with what another row might have."""
    launches: list[tuple[int, ...]] = []

    class Noted:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            launches.append(grid)
            return lambda *args, **_: None

    rows = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    tables = torch.zeros(1, 4_000, dtype=torch.int64, device=DEVICE)
    positions = torch.full_like(rows, start)
    backend = triton_attention.TritonAttention(BLOCK_SIZE)
    prepared = backend.prepare_rows(RowsStep(rows, positions, tables, 2_000, None, BLOCK_SIZE))
    case = Case([(0, 1)], (8, 8), (64, 64), AttentionFlags(0.2), torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_attention, "attend_items", Noted())
        patch.setattr(triton_attention, "join_parts", Noted())
        prepared.attend(*random_tensors(case), case.flags)

    [work] = prepared._fixed.works
    assert work.num_items.tolist() == [num_parts]
    assert launches == [(128, 8), (1, 8)]


@pytest.mark.parametrize("dim", [320, 4])
def test_heads_of_other_sizes_are_left_to_packed_attention(dim: int) -> None:
    """The kernels support up to 256 numbers per head."""
    case = Case([(9, 1), (0, 4)], (4, 2), (dim, dim), AttentionFlags(0.2), torch.float32)

    found, expected = attend_both(make_spans(case.chunks), *random_tensors(case), case)

    assert_close(found, expected)


@pytest.mark.parametrize(
    ("family", "fused"),
    [
        *(("llama", False), ("gpt_oss", True)),
        # test_self_test shows the first one, with steps ahead and graphs.
        pytest.param("llama", True, marks=LONG),
        pytest.param("gpt_oss", False, marks=LONG),
        *(
            pytest.param(family, fused, marks=LONG)
            for family in OTHER_FAMILIES
            for fused in (True, False)
        ),
    ],
)
def test_a_model_gives_the_same_tokens_by_triton(
    family: str, fused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the loader's checks and the whole decoder, in chunks and token by token."""
    monkeypatch.setattr(proof, "_STREAM_TOKENS", (12, 5))  # two streams: the interpreter is slow
    folder = save_tiny_model(family, tmp_path)
    outputs: list[list[list[int]]] = []
    lines: list[str] = []
    has_stack: list[bool] = []
    for attention in ("triton", "torch"):
        options = EngineOptions(
            model_path=str(folder),
            dtype="float32",
            device=DEVICE.type,
            max_num_seqs=4,
            attention=attention,
            fused=fused and attention == "triton",
        )
        model = paged(load_model(options, lines.append))
        has_stack.append(model.stack is not None)
        sequences = [make_sequence(p, max_tokens=3) for p in make_prompts([14, 5], VOCAB_SIZE)]
        outputs.append(run_to_end(model, sequences, chunk_tokens=9))

    assert outputs[0] == outputs[1]
    merges = family in ("llama", "qwen3", "gemma2")
    assert has_stack == [fused and family in ("llama", "qwen3"), False]
    assert any("attention layers, " in text for text in lines) == (fused and merges)
    assert any("unfused" in text for text in lines) == (fused and not merges)


def test_triton_is_refused_if_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker configured to use it must not silently use something slower."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    cpu, log = torch.device("cpu"), print
    with pytest.raises(ModelRefused, match="needs a CUDA device"):
        choose_backend("triton", torch.float32, cpu, BLOCK_SIZE, log, fused=True)
    with pytest.raises(ModelRefused, match="not one of auto, torch, triton"):
        choose_backend("tritium", torch.float32, cpu, BLOCK_SIZE, log, fused=True)
