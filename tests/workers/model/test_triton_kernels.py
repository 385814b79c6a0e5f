"""The Triton kernels other than attention, compared with torch: compiled on a GPU, otherwise
interpreted."""

import random

import pytest
import torch
import torch.nn.functional as F

from tests.workers.model.test_native import turned
from tests.workers.model.test_triton_attention import DEVICE, DTYPES, assert_close

gpu_kernels = pytest.importorskip("workers.model.gpu.kernels")


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


@pytest.mark.parametrize("seed", range(30))
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
