"""What a fast GPU gets by default, and what is left out if the self-test at load fails.

Without a GPU Triton's kernels are interpreted, and a repetition stands in for a CUDA graph.

Over 300 lines: a test for each fault that the self-test must find.
"""

import dataclasses
import itertools
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from tests.tiny_models import VOCAB_SIZE, save_tiny_model
from tests.workers.model.driver import make_prompts, make_sequence, run_to_end
from tests.workers.model.operating import wide
from workers.engine.interface import ModelRefused
from workers.ipc.messages import EngineOptions
from workers.model import paged, proof
from workers.model.ahead import runner as ahead_runner
from workers.model.ahead import self_test
from workers.model.ahead.runner import AheadRunner, RowsDecoder
from workers.model.ahead.self_test import (
    SelfTestFailed,
    check_attention,
    check_graphs,
    check_rows,
    wrong_draws,
)
from workers.model.attention.interface import AttentionFlags, Span
from workers.model.attention.packed import PackedAttention
from workers.model.attention.reference import PreparedRows, ReferenceAttention, RowsStep
from workers.model.backend import choose_backend, has_fast_gpu
from workers.model.gpu import graphs
from workers.model.gpu.drawing import draw
from workers.model.gpu.graphs import Compute, CudaRecorder
from workers.model.gpu.request_state import OWN, RequestState
from workers.model.kv_cache import KVCache, PagedStep
from workers.model.loader import load_model
from workers.model.probe import AttentionShape
from workers.model.runner import ModelRunner

triton_attention = pytest.importorskip("workers.model.attention.triton_attention")

pytestmark = pytest.mark.campaign  # Triton's interpreter is slow

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SINKS = torch.tensor([0.5, -1.0], device=DEVICE)
PLAIN = AttentionShape(2, 1, 32, 32, AttentionFlags(0.2))
EVERY_FLAG = AttentionShape(2, 2, 72, 64, AttentionFlags(0.2, 100, 30.0, SINKS))


@dataclass
class _Loaded:
    """What the comparison of attention reads of a loaded decoder."""

    dtype: torch.dtype = torch.float32
    block_size: int = 16
    device: torch.device = DEVICE


@dataclass
class _Pair:
    """What it reads of a back end."""

    attention: Any
    prepare_rows: Any


class _Replayed:
    """Stands in for a CUDA graph: repeats the recorded computation."""

    def __init__(self, compute: Compute) -> None:
        self.replay = compute


class _Stale(_Replayed):
    """A graph that does not read its inputs again."""

    def __init__(self, compute: Compute) -> None:
        compute()
        self.replay = lambda: None


@pytest.mark.parametrize("shape", [PLAIN, EVERY_FLAG], ids=["plain", "every flag"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_kernels_pass(shape: AttentionShape, dtype: torch.dtype) -> None:
    """In every stage; contexts have one split and two."""
    triton = triton_attention.TritonAttention(16)

    check_attention(_Pair(triton, triton.prepare_rows), [shape], _Loaded(dtype))  # type: ignore[arg-type]


class _WrongFor:
    """The reference, doubled in the steps of one stage."""

    def __init__(self, stage: str) -> None:
        self._chunks = self_test._STAGES.get(stage)

    def prepare(self, spans: Seq[Span], device: torch.device) -> Any:
        prepared = ReferenceAttention().prepare(spans, device)
        if tuple((span.start, span.num_tokens) for span in spans) == self._chunks:
            plain = prepared.attend
            prepared.attend = lambda *tensors: 2 * plain(*tensors)  # type: ignore[method-assign]
        return prepared


@pytest.mark.parametrize("stage", self_test._STAGES)
def test_a_wrong_kernel_is_named_by_its_stage(stage: str) -> None:
    """With the largest difference."""
    with pytest.raises(
        SelfTestFailed, match=f"^the self-test fails at {stage}: off by 1.0e[+]00 of the largest"
    ):
        check_attention(_Pair(_WrongFor(stage), PreparedRows), [PLAIN], _Loaded())  # type: ignore[arg-type]


def test_wrong_rows_and_kernels_that_raise_are_named_too() -> None:
    """Rows that read beside their tables; a kernel without a compiler."""

    def beside(step: RowsStep) -> PreparedRows:
        return PreparedRows(dataclasses.replace(step, rows=step.rows - 1))

    with pytest.raises(SelfTestFailed, match=r"^the self-test fails at prepared rows: off by "):
        check_attention(_Pair(ReferenceAttention(), beside), [PLAIN], _Loaded())  # type: ignore[arg-type]

    def refuse(step: RowsStep) -> PreparedRows:
        raise OSError("Failed to find C compiler")

    with pytest.raises(SelfTestFailed, match=r"raises OSError: Failed to find C"):
        check_attention(_Pair(ReferenceAttention(), refuse), [PLAIN], _Loaded())  # type: ignore[arg-type]


def test_a_lost_device_refuses_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else can run on it in this process."""

    def synchronize(device: torch.device) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)

    with (
        pytest.raises(ModelRefused, match=r"self-test \(chunk\): an illegal .*--attention torch"),
        self_test._Stage("chunk", torch.device("cuda")),
    ):
        raise RuntimeError("an illegal memory access was encountered")


def test_older_devices_get_torch_s_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """With merged modules, unless the operator wants none."""
    cuda = torch.device("cuda")
    for capability in ((7, 5), (8, 0), (9, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        is_fast = capability >= (8, 0)
        assert has_fast_gpu(cuda) == is_fast
        for fused in (True, False):
            backend = choose_backend("auto", torch.float16, cuda, 16, print, fused=fused)
            assert isinstance(backend.attention, PackedAttention) == (not is_fast)
            assert backend.merges == fused
    assert not has_fast_gpu(torch.device("cpu"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("llama"), **wide("llama"))


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device counts as a fast GPU. Few graphs, as Triton's interpreter is slow."""
    monkeypatch.setattr(graphs, "_MOST_TOKENS", 4)
    monkeypatch.setattr(graphs, "_TOKENS_APART", 4)
    monkeypatch.setattr(proof, "_STREAM_TOKENS", (12, 5))  # two streams: the interpreter is slow
    monkeypatch.setattr("workers.model.backend.has_fast_gpu", lambda device: True)
    if DEVICE.type == "cpu":
        monkeypatch.setattr("workers.model.ahead.self_test.recorder", lambda device: _Replayed)


def load(folder: Path, **options: Any) -> tuple[Any, list[str]]:
    lines: list[str] = []
    arguments: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 2} | options
    engine_options = EngineOptions(model_path=str(folder), device=DEVICE.type, **arguments)
    return load_model(engine_options, lines.append).model, lines


def tokens(model: Any) -> list[list[int]]:
    prompts = make_prompts([11, 5], VOCAB_SIZE)  # the end of the first is in a graph
    return run_to_end(model, [make_sequence(p, max_tokens=3) for p in prompts], chunk_tokens=9)


@pytest.mark.usefixtures("fast")
def test_a_fast_gpu_gets_all_by_default(llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Triton's attention, merged modules, steps ahead, and the graphs of the first bound before it
    is ready; with the tokens of torch's attention."""
    model, lines = load(llama)

    assert isinstance(model, AheadRunner)
    assert isinstance(model.decoder.runner.backend, triton_attention.TritonAttention)
    assert model.decoder.runner.stack is not None
    assert model.decoder.graphs is not None
    assert model.decoder.graphs.sizes == [4, 2, 1]
    assert "3 CUDA graphs are recorded" in lines
    assert not caplog.records
    assert tokens(model) == tokens(load(llama, attention="torch", ahead=False)[0])


@pytest.mark.usefixtures("fast")
def test_a_wrong_kernel_costs_speed_only(
    llama: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Merged modules and torch's attention remain; one line says which stage failed."""
    plain = triton_attention.PreparedTriton.attend

    def wrong(self: Any, *tensors: Any) -> torch.Tensor:
        attended: torch.Tensor = plain(self, *tensors)
        return attended + 0.01

    monkeypatch.setattr(triton_attention.PreparedTriton, "attend", wrong)

    model, lines = load(llama)

    assert isinstance(model, ModelRunner)
    assert isinstance(model.backend, PackedAttention)
    assert any("2 attention layers, 2 gated MLPs" in line for line in lines)
    [record] = caplog.records
    text = "torch's attention is used in place of Triton's: the self-test fails at chunk: off by "
    assert record.message.startswith(text)


@pytest.fixture
def recordable(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's attention can be recorded: it takes all contexts for as long as the self-test's.
    Few graphs."""

    def prepare(step: RowsStep) -> PreparedRows:
        return PreparedRows(dataclasses.replace(step, longest=step.longest or 16))

    def choose(*arguments: Any, **named: Any) -> Any:
        return dataclasses.replace(choose_backend(*arguments, **named), prepare_rows=prepare)

    monkeypatch.setattr(paged, "choose_backend", choose)
    monkeypatch.setattr(graphs, "_MOST_TOKENS", 4)
    monkeypatch.setattr(graphs, "_TOKENS_APART", 4)


@pytest.mark.usefixtures("recordable")
def test_a_replay_that_repeats_itself_costs_the_graphs(
    llama: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps ahead remain."""
    monkeypatch.setattr("workers.model.ahead.self_test.recorder", lambda device: _Stale)

    model, _ = load(llama, attention="torch", ahead=True)

    assert isinstance(model, AheadRunner)
    assert model.decoder.graphs is None
    [record] = caplog.records
    assert record.message.startswith(
        "steps are ahead without graphs: the self-test fails at a graph's replay"
    )
    assert "logits differ by up to " in record.message


class _Refused(_Replayed):
    """A model that waits for the device cannot be recorded."""

    def __init__(self, compute: Compute) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nCompile with …")


@pytest.mark.usefixtures("recordable")
def test_a_model_that_cannot_be_recorded_is_served_without_graphs(
    llama: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log gives the reason."""
    monkeypatch.setattr("workers.model.ahead.self_test.recorder", lambda device: _Refused)
    reason = (
        "the self-test fails at graphs: it raises RuntimeError: "
        "operation not permitted when stream is capturing"
    )

    model, _ = load(llama, attention="torch", ahead=True)

    assert isinstance(model, AheadRunner)
    assert model.decoder.graphs is None
    [record] = caplog.records
    assert record.message == f"steps are ahead without graphs: {reason}"


def test_torch_s_attention_is_not_recorded(
    llama: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step of a graph would read as much as the longest possible context."""
    monkeypatch.setattr("workers.model.ahead.self_test.recorder", lambda device: _Replayed)

    load(llama, attention="torch", ahead=True)

    [record] = caplog.records
    assert "fails at graphs: " in record.message
    assert "whose length the host must know" in record.message


def test_a_broken_recording_gives_its_reason_and_the_stream_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch raises at the end of it too, and does not leave its own stream."""
    streams = ["the engine's"]

    class Recording:
        def __init__(self, *_: Any, **__: Any) -> None:
            pass

        def __enter__(self) -> None:
            streams.append("the recording's")

        def __exit__(self, *_: object) -> None:
            raise RuntimeError("operation failed due to a previous error during capture")

    for name, value in {
        "graph": Recording,
        "CUDAGraph": object,
        "graph_pool_handle": object,
        "current_stream": lambda: streams[-1],
        "set_stream": streams.append,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)

    def compute() -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match=r"^operation not permitted"):
        CudaRecorder()(compute)

    assert streams == ["the engine's", "the recording's", "the engine's"]


def test_wrong_draws_cost_the_steps_ahead(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One token beside the sampler's in a row with limits. Asked for, such steps are refused."""

    def wrong(*arguments: Any) -> torch.Tensor:
        return draw(*arguments) + int(any(s.params.top_k for s in arguments[3]))

    monkeypatch.setattr("workers.model.ahead.self_test.wrong_draws.__defaults__", (wrong,))

    with pytest.raises(ModelRefused, match=r"fails at sampling: tokens \[.* in place of \["):
        load(llama, ahead=True)


@pytest.mark.parametrize("by_triton", [False, True])
@pytest.mark.parametrize("num_rows", [1, 3, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.each_value
def test_right_draws_pass(dtype: torch.dtype, num_rows: int, by_triton: bool) -> None:
    """With fewer rows than are compared, and with more; in one tile of the vocabulary, and in
    several."""
    device = DEVICE if by_triton else torch.device("cpu")
    for vocab_size in (60, 9000):
        state = RequestState(num_rows, 8, 4, 99, device)

        assert wrong_draws(state, vocab_size, dtype, partial(draw, by_triton=by_triton)) is None


def unsteady(seed: Callable[[int], int]) -> Callable[..., tuple[torch.Tensor, ...]]:
    """A router whose experts have nearly the same score, so that rounding chooses: here random
    numbers, seeded for a number of tokens."""

    def route(self: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        tokens = hidden.reshape(-1, hidden.shape[-1])
        generator = torch.Generator().manual_seed(seed(len(tokens)))
        scores = torch.rand(len(tokens), self.num_experts, generator=generator) * 1e-6 + 0.25
        chosen, experts = torch.topk(scores, self.top_k, dim=-1)
        return scores, chosen / chosen.sum(-1, keepdim=True), experts

    return route


@pytest.mark.parametrize("cause", ["each call", "number of tokens"])
def test_experts_of_nearly_equal_score_are_no_failure(
    cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a mixture of experts, two ways to compute a row may choose others, and so may steps of
    other sizes; a graph and the computation that it records do not."""
    runner = load(save_tiny_model("qwen3_moe", tmp_path))[0]
    calls = itertools.count()
    is_each = cause == "each call"
    route = unsteady((lambda _: next(calls)) if is_each else (lambda num_tokens: num_tokens))
    monkeypatch.setattr(Qwen3MoeTopKRouter, "forward", route)

    def prepare(step: RowsStep) -> PreparedRows:
        return PreparedRows(dataclasses.replace(step, longest=step.longest or 16))

    model = AheadRunner(runner, prepare, 4, torch.device("cpu"), _Replayed)
    if is_each:
        model.decoder.graphs = None
        check_rows(model, runner, runner._decoder.config)
    else:
        assert check_graphs(model, runner, runner._decoder.config) == 3 + 8


def _without_given(self: RowsDecoder, *extent: int) -> torch.Tensor:
    self._state.given.fill_(OWN)
    return _compute(self, *extent)


def _unwritten(cache: KVCache, prepared: Any, slots: torch.Tensor, kernels: Any) -> PagedStep:
    scratch = torch.full_like(slots, cache.scratch_block_id * cache.block_size)
    return PagedStep(cache, prepared, scratch, kernels)


_compute = RowsDecoder._compute


@pytest.mark.parametrize(
    ("where", "name", "wrong"),
    [(RowsDecoder, "_compute", _without_given), (ahead_runner, "PagedStep", _unwritten)],
    ids=["given tokens", "KV"],
)
def test_what_a_step_must_write_is_not_found_in_the_cache(
    where: Any, name: str, wrong: Any, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that read the place of another token, or whose KV is not written, fail the self-test,
    though the prompts were computed before."""
    monkeypatch.setattr(where, name, wrong)

    with pytest.raises(ModelRefused, match=r"fails at rows: "):
        load(llama, ahead=True)


def test_wrong_rows_cost_the_steps_ahead(
    llama: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked for, they are refused."""
    plain = PreparedRows.attend

    def wrong(self: Any, *tensors: Any) -> torch.Tensor:
        return plain(self, *tensors) * 1.5

    monkeypatch.setattr(PreparedRows, "attend", wrong)

    with pytest.raises(
        ModelRefused, match=r"^the self-test fails at rows: logits differ by up to "
    ):
        load(llama, ahead=True)
