"""The Triton kernels other than attention, compared with torch: compiled on a GPU, otherwise
interpreted."""

import math
import random

import pytest
import torch
import torch.nn.functional as F

from tests.marks import LONG
from tests.workers.model.test_native import turned
from tests.workers.model.test_thresholds import allowed_by_reference
from tests.workers.model.test_triton_attention import DEVICE, DTYPES, assert_close
from workers.model.gpu.request_state import (
    MIN_P,
    NOISE,
    NUM_FIELDS,
    OUTPUT_SHIFT,
    POSITION,
    TEMPERATURE,
    TOP_K,
    TOP_P,
)
from workers.model.noise import gumbel, row_base, row_key, uniform

triton = pytest.importorskip("triton")
gpu_kernels = pytest.importorskip("workers.model.gpu.kernels")
triton_kernels = pytest.importorskip("workers.model.gpu.triton_kernels")

pytestmark = pytest.mark.campaign  # Triton's interpreter is slow


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [64, 96, 1000])
@pytest.mark.parametrize("num_rows", [1, 5])
def test_norms_equal_torch_s(num_rows: int, dim: int, dtype: torch.dtype) -> None:
    """For sizes that are powers of two, and for others."""
    torch.manual_seed(0)
    x = torch.randn(1, num_rows, dim).to(DEVICE, dtype)
    weight = torch.randn(dim).to(DEVICE, dtype)

    found = gpu_kernels.TritonKernels(dtype).rms_norm(x, weight, 1e-5)

    expected = F.rms_norm(x.float(), (dim,), weight.float(), 1e-5)
    assert_close(found, expected.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [48, 1500])
def test_gates_equal_torch_s(dim: int, dtype: torch.dtype) -> None:
    """silu(gate) * up, also for large numbers of either sign; in one tile and in several."""
    torch.manual_seed(0)
    gate_up = (torch.randn(3, 2 * dim) * 30).to(DEVICE, dtype)

    found = gpu_kernels.TritonKernels(dtype).silu_gate(gate_up)

    gate, up = gate_up.float().chunk(2, dim=-1)
    assert_close(found, (F.silu(gate) * up).to(dtype))


@pytest.mark.parametrize("seed", [pytest.param(n, marks=LONG if n % 3 else ()) for n in range(30)])
def test_queries_and_keys_are_rotated_and_stored(seed: int) -> None:
    """As by transformers' rotate_half. Keys and values are stored in their slots; no other slot
    changes."""
    generator = random.Random(seed)
    torch.manual_seed(seed)
    dtype = DTYPES[seed % 3]
    dim = generator.choice([64, 80, 96, 128, 256])
    rotary = generator.choice([dim, dim // 2, dim // 4])
    kv_heads = generator.choice([1, 2, 3])
    num_heads, num_tokens = kv_heads * generator.choice([1, 2, 3]), generator.randint(1, 5)
    qkv = torch.randn(num_tokens, (num_heads + 2 * kv_heads) * dim).to(DEVICE, dtype)
    cos, sin = torch.randn(2, num_tokens, rotary).to(DEVICE, dtype)
    norms = None
    if generator.random() < 0.5:
        norms = (*torch.randn(2, dim).to(DEVICE, dtype), 1e-6)
    slots = torch.tensor(generator.sample(range(12), num_tokens), device=DEVICE)
    keys, values = torch.full((2, 12, kv_heads, dim), 5.0).to(DEVICE, dtype)
    heads = qkv.float().view(num_tokens, -1, dim).clone()

    kernels = gpu_kernels.TritonKernels(dtype)
    kernels.rotate_and_keep(qkv, num_heads, cos, sin, norms, slots, keys, values)

    query, key, value = torch.split(heads, [num_heads, kv_heads, kv_heads], dim=1)
    if norms is not None:
        query = F.rms_norm(query, (dim,), norms[0].float(), 1e-6)
        key = F.rms_norm(key, (dim,), norms[1].float(), 1e-6)
    query, key = turned(query, cos, sin), turned(key, cos, sin)
    assert_close(qkv.view(num_tokens, -1, dim)[:, :num_heads], query.to(dtype))
    assert_close(keys[slots], key.to(dtype))
    assert_close(values[slots], value.to(dtype))
    untouched = sorted(set(range(12)) - set(slots.tolist()))
    assert (keys[untouched] == 5).all()
    assert (values[untouched] == 5).all()


def settings(*, is_whole: bool) -> list[tuple[int, float, float]]:
    """Each top-k with each top-p, and each of both with each min-p; or all triples."""
    min_ps = (0.0, 0.02, 0.5, 1.0)
    return [
        (k, p, m)
        for i, k in enumerate((0, 1, 7, 40, 2000))
        for j, p in enumerate((1.0, 0.99, 0.7, 0.05))
        for m in (min_ps if is_whole else (min_ps[(i + j) % 4],))
    ]


def cells_of(parameters: list[tuple[int, float, float]], temperature: float) -> torch.Tensor:
    """RequestState's cells for rows with these top-k, top-p and min-p."""
    cells = torch.zeros(len(parameters), NUM_FIELDS + 3, dtype=torch.int64)
    fractions = cells.view(torch.float64)
    for row, (top_k, top_p, min_p) in enumerate(parameters):
        cells[row, TOP_K], cells[row, NOISE] = top_k, row_base(row, 0)
        fractions[row, TOP_P], fractions[row, MIN_P] = top_p, min_p
        fractions[row, TEMPERATURE] = temperature
    return cells.to(DEVICE)


@pytest.mark.parametrize(
    "is_whole",
    [False, pytest.param(True, marks=(pytest.mark.campaign, pytest.mark.long))],
    ids=["pairs", "all"],
)
@pytest.mark.parametrize("scale", [0.3, 4.0])
@pytest.mark.parametrize("vocab_size", [50, 2500])
@pytest.mark.each_value
def test_the_sets_to_draw_from_are_exact(vocab_size: int, scale: float, is_whole: bool) -> None:
    """As `sampler` has them, also of rows whose nucleus is wide."""
    torch.manual_seed(0)
    parameters, temperature = settings(is_whole=is_whole), 0.7
    logits = torch.randn(len(parameters), vocab_size) * scale
    lowest = torch.empty(len(parameters), device=DEVICE)
    rows = torch.arange(len(parameters), device=DEVICE)
    cells = cells_of(parameters, temperature)

    triton_kernels.find_lowest[(len(parameters),)](
        logits.to(DEVICE), cells, rows, lowest, cells.stride(0), vocab_size, TILE=1024
    )

    scores = logits / temperature
    for row, setting in enumerate(parameters):
        found = set((scores[row] >= lowest[row].cpu()).nonzero().flatten().tolist())
        assert found == allowed_by_reference(scores[row], *setting), setting


def test_all_that_equal_the_last_allowed_are_kept() -> None:
    """For top-k and for top-p."""
    logits = torch.tensor([[5.0, 3.0, 3.0, 3.0, 1.0, 1.0, -math.inf, 0.0]] * 2)
    lowest = torch.empty(2, device=DEVICE)
    cells = cells_of([(2, 1.0, 0.0), (0, 0.85, 0.0)], 1.0)
    rows = torch.arange(2, device=DEVICE)

    triton_kernels.find_lowest[(2,)](
        logits.to(DEVICE), cells, rows, lowest, cells.stride(0), 8, TILE=8
    )

    assert lowest.tolist() == [3.0, 3.0]


def test_noise_is_that_of_the_reference() -> None:
    """The same bits of the hash; the logarithms may differ in the last place."""
    token_ids = torch.tensor([0, 1, 4095, 4096, 77_777, 119_999], device=DEVICE)
    num_rows, vocab_size, tile = len(token_ids), 120_000, 4096
    cells = cells_of([(0, 1.0, 0.0)] * num_rows, 1.0)
    cells[:, POSITION], cells[:, OUTPUT_SHIFT] = 9, -2
    rows = torch.arange(num_rows, device=DEVICE)
    logits = torch.full((num_rows, vocab_size), -math.inf, device=DEVICE)
    logits[rows, token_ids] = 0.0
    scores = torch.empty(num_rows, triton.cdiv(vocab_size, tile), device=DEVICE)
    ids = torch.empty_like(scores, dtype=torch.int32)

    triton_kernels.draw_tiles[scores.shape](
        logits, cells, rows, scores, scores, ids, cells.stride(0), vocab_size, tile, False
    )

    keys = torch.tensor([row_key(row, 0, 7) for row in range(num_rows)], device=DEVICE)
    expected = gumbel(uniform(keys[:, None], token_ids)).diagonal()
    best, tiles = scores.max(-1)
    torch.testing.assert_close(best, expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(ids[rows, tiles].long(), token_ids)
