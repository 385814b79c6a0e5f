"""The CPU kernels, compared with torch: attention with every flag, norms, rotation, gates, and
products with plain and with int8 weights."""

import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.workers.model.processors import ISAS
from tests.workers.model.test_attention import BATCHES, BLOCK_SIZE, CPU, NUM_BLOCKS, make_spans
from workers.model.attention.interface import AttentionFlags
from workers.model.attention.reference import ReferenceAttention
from workers.model.native import library
from workers.model.native.kernels import Kernels, NativeAttention
from workers.model.native.library import CannotBuild, Isa, load_library
from workers.model.quantization import QuantizedWeight, rounded
from workers.model.sampler import argmax

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
HEADS = {"multi-head": (4, 4), "grouped": (6, 2), "one for all": (8, 1)}
SHAPES = {"equal": (64, 64), "unequal": (32, 48), "wide": (256, 16)}


def make_flags(name: str, num_heads: int) -> AttentionFlags:
    sinks = torch.linspace(-2.0, 2.0, num_heads)
    return {
        "plain": AttentionFlags(0.25),
        "window": AttentionFlags(0.25, window=20),
        "long window": AttentionFlags(0.25, window=100),
        "softcap": AttentionFlags(0.25, softcap=3.0),
        "sinks": AttentionFlags(0.25, sinks=sinks),
        "all": AttentionFlags(0.3, 20, 3.0, sinks),
    }[name]


@pytest.fixture(params=list(DTYPES.values()), ids=list(DTYPES))
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    found: torch.dtype = request.param
    return found


@pytest.fixture(params=ISAS, ids=str)
def isa(request: pytest.FixtureRequest) -> Isa:
    found: Isa = request.param
    return found


@pytest.fixture
def kernels(isa: Isa, dtype: torch.dtype) -> Kernels:
    return Kernels(load_library(isa), dtype)


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """bfloat16 keeps 8 bits; both sides compute in float32 and round once."""
    is_exact = expected.dtype == torch.float32
    rtol, atol = (1e-4, 1e-5) if is_exact else (1e-2, 1e-2)
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS.keys())
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("flags", ["plain", "window", "long window", "softcap", "sinks", "all"])
@pytest.mark.each_pair
def test_the_attention_kernel_equals_the_reference(
    flags: str,
    shape: tuple[int, int],
    heads: tuple[int, int],
    dtype: torch.dtype,
    kernels: Kernels,
) -> None:
    """For all kinds of groups and head sizes, with queries, keys and values in one tensor."""
    torch.manual_seed(0)
    (num_heads, kv_heads), (k_dim, v_dim) = heads, shape
    num_slots = NUM_BLOCKS * BLOCK_SIZE
    keys = torch.randn(num_slots, kv_heads, k_dim).to(dtype)
    values = torch.randn(num_slots, kv_heads, v_dim).to(dtype)
    for chunks in BATCHES.values():
        spans = make_spans(chunks)
        beside = torch.randn(sum(n for _, n in chunks), num_heads * k_dim + 32).to(dtype)
        query = beside[:, : num_heads * k_dim].view(-1, num_heads, k_dim)

        arguments = (query, keys, values, make_flags(flags, num_heads))
        expected = ReferenceAttention().prepare(spans, CPU).attend(*arguments)
        found = NativeAttention(kernels).prepare(spans, CPU).attend(*arguments)

        assert_close(found, expected)


def test_heads_of_odd_sizes_are_left_to_packed_attention() -> None:
    """The kernel processes 16 numbers at once."""
    torch.manual_seed(0)
    spans = make_spans(BATCHES["mixed"])
    query, keys = torch.randn(102, 4, 24), torch.randn(NUM_BLOCKS * BLOCK_SIZE, 2, 24)
    arguments = (query, keys, torch.randn_like(keys), AttentionFlags(0.25))

    expected = ReferenceAttention().prepare(spans, CPU).attend(*arguments)
    backend = NativeAttention(Kernels(load_library(), torch.float32))
    found = backend.prepare(spans, CPU).attend(*arguments)

    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_nan_stays_in_its_own_row(dtype: torch.dtype, kernels: Kernels) -> None:
    """The sampler then fails that job; a kernel that hid the NaN would invent tokens."""
    spans = make_spans([(40, 1), (40, 1), (0, 20)])
    query = torch.randn(22, 4, 32).to(dtype)
    keys = torch.randn(NUM_BLOCKS * BLOCK_SIZE, 2, 32).to(dtype)
    query[1, 2, 5] = float("nan")

    found = (
        NativeAttention(kernels)
        .prepare(spans, CPU)
        .attend(query, keys, keys.clone(), AttentionFlags(0.2))
    )

    assert found[1, 2].isnan().all()
    found[1, 2] = 0
    assert found.isfinite().all()


@pytest.mark.parametrize("num_rows", [1, 3, 200])
def test_norms_equal_torch_s(num_rows: int, dtype: torch.dtype, kernels: Kernels) -> None:
    """Of one row, which uses one thread, and of many."""
    x, weight = torch.randn(1, num_rows, 96).to(dtype), torch.randn(96).to(dtype)

    found = kernels.rms_norm(x, weight, 1e-5)

    expected = F.rms_norm(x.float(), (96,), weight.float(), 1e-5).to(dtype)
    assert_close(found, expected)


@pytest.mark.parametrize("num_rows", [1, 3, 200])
def test_gates_equal_torch_s(num_rows: int, dtype: torch.dtype, kernels: Kernels) -> None:
    """silu(gate) * up, also for large numbers of either sign."""
    gate_up = torch.randn(num_rows, 2 * 48).to(dtype) * 30

    found = kernels.silu_gate(gate_up)

    gate, up = gate_up.float().chunk(2, dim=-1)
    assert_close(found, (F.silu(gate) * up).to(dtype))


@pytest.mark.parametrize("rotary", [64, 32], ids=["whole", "partial"])
@pytest.mark.parametrize("has_norms", [False, True], ids=["plain", "normed"])
def test_queries_and_keys_are_rotated_and_stored(
    has_norms: bool, rotary: int, dtype: torch.dtype, kernels: Kernels
) -> None:
    """As by transformers' rotate_half. Keys and values are stored in their slots; no other slot
    changes."""
    torch.manual_seed(0)
    num_tokens, num_heads, kv_heads, dim = 5, 4, 2, 64
    qkv = torch.randn(num_tokens, (num_heads + 2 * kv_heads) * dim).to(dtype)
    cos, sin = torch.randn(2, num_tokens, rotary).to(dtype)
    norms = (torch.randn(dim).to(dtype), torch.randn(dim).to(dtype), 1e-6) if has_norms else None
    slots = torch.tensor([7, 3, 11, 0, 4])
    keys, values = torch.full((2, 12, kv_heads, dim), 5.0).to(dtype)
    heads = qkv.float().view(num_tokens, -1, dim).clone()

    kernels.rotate_and_keep(qkv, num_heads, cos, sin, norms, slots, keys, values)

    query, key, value = torch.split(heads, [num_heads, kv_heads, kv_heads], dim=1)
    if norms is not None:
        query = F.rms_norm(query, (dim,), norms[0].float(), 1e-6)
        key = F.rms_norm(key, (dim,), norms[1].float(), 1e-6)
    query, key = turned(query, cos, sin), turned(key, cos, sin)
    found = qkv.view(num_tokens, -1, dim)[:, :num_heads]
    assert_close(found, query.to(dtype))
    assert_close(keys[slots], key.to(dtype))
    assert_close(values[slots], value.to(dtype))
    untouched = sorted(set(range(12)) - set(slots.tolist()))
    assert (keys[untouched] == 5).all()
    assert (values[untouched] == 5).all()


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x (T, heads, dim), cos and sin (T, rotary)."""
    rotary = cos.shape[-1]
    part, rest = x[..., :rotary], x[..., rotary:]
    low, high = part.chunk(2, dim=-1)
    halves = torch.cat([-high, low], dim=-1)
    whole = part * cos.float()[:, None] + halves * sin.float()[:, None]
    return torch.cat([whole, rest], dim=-1)


@pytest.mark.campaign
def test_a_compiled_kernel_is_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second start compiles nothing. Compiled without optimisation, which is faster."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(library, "_FLAGS", ("-O0", *library._FLAGS[1:]))
    load_library.__wrapped__()
    [built] = (tmp_path / "batchway").iterdir()
    made = built.stat().st_mtime_ns

    load_library.__wrapped__()

    assert [entry.stat().st_mtime_ns for entry in (tmp_path / "batchway").iterdir()] == [made]


def test_a_missing_compiler_and_foreign_code_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each in one sentence; the engine then uses torch alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", str(tmp_path / "none"))
    with pytest.raises(CannotBuild, match=r"no C\+\+ compiler"):
        load_library.__wrapped__()

    monkeypatch.delenv("CXX")
    folder = tmp_path / "batchway"
    folder.mkdir()
    folder.chmod(stat.S_IRWXU | stat.S_IRWXO)
    with pytest.raises(CannotBuild, match="others may write"):
        load_library.__wrapped__()


def test_a_compiler_s_first_error_is_quoted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No partial output remains."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    broken = tmp_path / "broken.cpp"
    broken.write_text("this is not C++\n")
    monkeypatch.setattr(library, "_SOURCE", broken)

    with pytest.raises(CannotBuild, match=r"refused the kernels: .*error"):
        load_library.__wrapped__()

    assert list((tmp_path / "batchway").iterdir()) == []


@pytest.mark.parametrize("vocab_size", [5, 16, 37, 4096])
@pytest.mark.parametrize("find", ["kernel", "torch"])
@pytest.mark.each_pair
def test_the_likeliest_token_is_the_first_of_the_highest(
    find: str, vocab_size: int, dtype: torch.dtype, kernels: Kernels
) -> None:
    """In every lane of a vector and after the last whole vector, among equal values and among
    -inf."""
    find_argmax = kernels.argmax if find == "kernel" else argmax
    logits = torch.randn(vocab_size, vocab_size).to(dtype)
    logits.fill_diagonal_(100.0)
    assert find_argmax(logits).tolist() == list(range(vocab_size))

    equal = torch.full((1, vocab_size), -3.0, dtype=dtype)
    assert find_argmax(equal).tolist() == [0]
    equal[0, :-1] = float("-inf")
    assert find_argmax(equal).tolist() == [vocab_size - 1]


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize("find", ["kernel", "torch"])
def test_a_row_with_nan_has_no_likeliest_token(
    find: str, number: float, dtype: torch.dtype, kernels: Kernels
) -> None:
    """Wherever the NaN is; nor has a row in which every token is impossible."""
    find_argmax = kernels.argmax if find == "kernel" else argmax
    vocab_size = 37
    logits = torch.randn(vocab_size + 1, vocab_size).to(dtype)
    logits[:vocab_size].fill_diagonal_(number)
    logits[vocab_size] = float("-inf")

    assert find_argmax(logits).tolist() == [-1] * (vocab_size + 1)


@pytest.mark.parametrize("num_threads", [2, 3, 8])
def test_results_do_not_depend_on_the_threads_that_take_the_pieces(
    isa: Isa, kernels: Kernels, dtype: torch.dtype, num_threads: int
) -> None:
    """Bit for bit, also where several callers share the threads: the later one works alone."""
    x, weight = torch.randn(40, 64).to(dtype), torch.randn(64 * 23, 64).to(dtype)
    panels = kernels.lay_out(weight)
    norm = torch.rand(64).to(dtype), 1e-5

    def multiply(_: int) -> torch.Tensor:
        return kernels.linear(x, panels, len(weight), norm=norm)

    expected = multiply(0)
    load_library(isa).set_num_threads(num_threads)
    try:
        with ThreadPoolExecutor(3) as callers:
            found = list(callers.map(multiply, range(60)))
    finally:
        load_library(isa).set_num_threads(1)

    assert all(torch.equal(each, expected) for each in found)


def make_weight(
    dtype: torch.dtype, num_out: int, num_in: int, is_int8: bool
) -> tuple[torch.Tensor | QuantizedWeight, torch.Tensor]:
    """A weight, and its numbers (num_out, num_in) in float64. Scales differ widely between
    outputs."""
    weight = (torch.randn(num_out, num_in) * (torch.rand(num_out, 1) + 0.01)).to(dtype)
    if not is_int8:
        return weight, weight.double()
    small = rounded(weight)
    return small, small.values.double() * small.scales.double()[:, None]


@pytest.mark.parametrize("is_int8", [False, True], ids=["plain", "int8"])
@pytest.mark.parametrize(("num_in", "num_out"), [(64, 64), (96, 16), (48, 272), (16, 1040)])
def test_the_matrix_product_is_exact(
    num_in: int, num_out: int, is_int8: bool, dtype: torch.dtype, kernels: Kernels
) -> None:
    """For whole and partial panels, one block of rows and more, with and without an addend, on a
    part of a row."""
    torch.manual_seed(0)
    weight, exact = make_weight(dtype, num_out, num_in, is_int8)
    panels = kernels.lay_out(weight)
    assert panels.weights.dtype == (torch.int8 if is_int8 else dtype)
    for num_rows in (0, 1, 5, 6, 7, 9, 10, 11, 13, 32, 100):
        x = torch.randn(num_rows, num_in + 32).to(dtype)[:, :num_in]
        to = torch.randn(num_rows, num_out).to(dtype)
        expected = x.double() @ exact.T

        assert_close(kernels.linear(x, panels, num_out), expected.to(dtype))
        assert_close(kernels.linear(x, panels, num_out, to), (expected + to).to(dtype))


@pytest.mark.parametrize("is_int8", [False, True], ids=["plain", "int8"])
@pytest.mark.parametrize("num_rows", [1, 7, 100])
@pytest.mark.parametrize("num_out", [32, 48, 256])
def test_gates_and_a_norm_are_part_of_the_product(
    num_out: int, num_rows: int, is_int8: bool, dtype: torch.dtype, kernels: Kernels
) -> None:
    """For whole and partial panels, each half of which has scales of its own; in bfloat16 gates
    are rounded once, at the end."""
    torch.manual_seed(0)
    (gate, exact_gate), (up, exact_up) = (
        make_weight(dtype, num_out, 96, is_int8) for _ in range(2)
    )
    x, weight = torch.randn(num_rows, 96).to(dtype), torch.randn(96).to(dtype)
    normed = kernels.rms_norm(x, weight, 1e-5).double()
    expected = F.silu(normed @ exact_gate.T) * (normed @ exact_up.T)
    panels = kernels.lay_out_gated(gate, up)

    found = kernels.linear(x, panels, num_out, norm=(weight, 1e-5), is_gated=True)

    assert_close(found, expected.to(dtype))


@pytest.mark.parametrize("is_int8", [False, True], ids=["plain", "int8"])
def test_a_row_s_product_does_not_depend_on_its_neighbours(
    is_int8: bool, dtype: torch.dtype, kernels: Kernels
) -> None:
    """Bit for bit: neighbours in a batch change no sum, although with many rows an int8 panel is
    widened once and kept."""
    weight, _ = make_weight(dtype, 320, 192, is_int8)
    x = torch.randn(100, 192).to(dtype)
    panels = kernels.lay_out(weight)
    together = kernels.linear(x, panels, 320)

    for num_rows in range(1, 14):
        assert torch.equal(kernels.linear(x[:num_rows], panels, 320), together[:num_rows])


@pytest.mark.each_value
def test_every_byte_is_made_wide_exactly(kernels: Kernels) -> None:
    """All of -127 … 127 at every place of a panel, by rows of x that select one input each."""
    num_in = 256
    numbers = torch.arange(64)[:, None] * 5 + torch.arange(num_in)[None] * 3
    values = (numbers % 255 - 127).to(torch.int8)
    assert len(set(values.flatten().tolist())) == 255
    weight = QuantizedWeight(values, torch.ones(64), kernels.dtype)

    found = kernels.linear(torch.eye(num_in).to(kernels.dtype), kernels.lay_out(weight), 64)

    assert torch.equal(found, values.T.to(kernels.dtype))


def test_a_wider_product_may_follow_a_narrower_one(dtype: torch.dtype, kernels: Kernels) -> None:
    """The buffer of a widened panel grows."""
    for num_in in (16, 4096, 32):
        weight, exact = make_weight(dtype, 80, num_in, is_int8=True)
        x = torch.randn(9, num_in).to(dtype) / num_in**0.5
        found = kernels.linear(x, kernels.lay_out(weight), 80)
        assert_close(found, (x.double() @ exact.T).to(dtype))
