"""`batchway profile`: loads a model, measures the machine and each class of step, and advises.

An engine runs steps of each class: timed, then under torch's profiler. Prefill: prompts with one
output token each. Decode: streams only. Mixed: streams, and a new prompt in each step. Every prompt
is different, so no prefix is cached.
"""

import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from contract.jobs import SamplingParams
from workers.engine.cost_model import Features, step_features
from workers.engine.engine import Engine
from workers.engine.interface import Chunk
from workers.engine.step_plan import StepReport
from workers.engine_process.engine_setup import build_engine
from workers.ipc.messages import EngineOptions, Request
from workers.model.loader import load_model
from workers.model.native.kernels import Kernels, Panels
from workers.model.runner import ModelRunner

KINDS = ("decode", "mixed", "prefill")
_READ_BYTES = {"cpu": 2**28, "cuda": 2**31}  # larger than any cache
_COLUMNS = 8192
_GEMM_SIZE = {"cpu": 2048, "cuda": 8192}
_TIMES = 7  # the shortest is used
_MAX_OPERATORS = 8
_NATIVE = ("attend", "rms_norm", "rotate_and_keep", "silu_gate")  # kernels that torch cannot name
_NEAR = 0.5  # share of the best possible from which memory or compute limits a step
_LARGE_GAP = 0.25


class CannotProfile(Exception):
    """The engine cannot be profiled. The message is one sentence."""


# --- the machine and the model ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Machine:
    """Limits of one device for one element type, with the current number of threads."""

    device: str
    dtype: str
    num_threads: int
    bytes_per_s: float  # of a matrix-vector product
    flops_per_s: float  # of a square matrix product, 2 per multiplication


def measure(device: torch.device, dtype: torch.dtype) -> Machine:
    """Measures for some seconds. Bytes are those of the faster of a matrix-vector product and a
    copy, as products are slow on some processors; on a CPU in float32, as half precision is bound
    by compute. Numbers are random: a GPU is faster on equal ones than on weights."""
    read_dtype = torch.float32 if device.type == "cpu" else dtype
    num_rows = _READ_BYTES[device.type] // (_COLUMNS * read_dtype.itemsize)
    matrix = torch.randn(num_rows, _COLUMNS, device=device, dtype=read_dtype)
    vector = torch.randn(_COLUMNS, device=device, dtype=read_dtype)
    read_s = _best_s(lambda: torch.mv(matrix, vector), device)
    copy_s = _best_s(matrix.clone, device)
    size = _GEMM_SIZE[device.type]
    square = torch.randn(size, size, device=device, dtype=dtype)
    return Machine(
        torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        str(dtype).removeprefix("torch."),
        torch.get_num_threads(),
        max(matrix.nbytes / read_s, 2 * matrix.nbytes / copy_s),
        2 * size**3 / _best_s(lambda: square @ square, device),
    )


@torch.inference_mode()
def _best_s(work: Callable[[], object], device: torch.device) -> float:
    def synchronize() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    best = float("inf")
    work()
    for _ in range(_TIMES):
        synchronize()
        started_s = time.perf_counter()
        work()
        synchronize()
        best = min(best, time.perf_counter() - started_s)
    return best


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """A decoder's sizes. All experts of a mixture count, although a step uses only some."""

    weight_bytes: int  # read in a step: all but the embedding
    num_body_weights: int  # multiplied for each token
    num_head_weights: int  # multiplied for each sampled row
    kv_bytes_per_token: int
    attention_width: int  # query heads * their size * layers


class Demand(NamedTuple):
    """Lower bounds of a step: bytes read and floating-point operations."""

    num_bytes: int
    flops: int


def shape_of(runner: ModelRunner) -> DecoderShape:
    """A decoder's sizes. Raises AttributeError for a model that is not a transformers decoder."""
    decoder: Any = runner._decoder
    seen: set[int] = set()
    head = decoder.get_output_embeddings()
    num_head, head_bytes = (0, 0) if head is None else _count([head], seen)
    modules = [m for m in decoder.modules() if not isinstance(m, nn.Embedding)]
    num_body, body_bytes = _count(modules, seen)
    layers = list(runner.cache.layers.values())
    itemsize = layers[0].keys.dtype.itemsize
    elements = sum(layer.keys[0, 0].numel() + layer.values[0, 0].numel() for layer in layers)
    return DecoderShape(
        body_bytes + head_bytes,
        num_body,
        num_head,
        elements * itemsize,
        sum(layer.shape.num_heads * layer.shape.k_dim for layer in layers),
    )


def demand_of(shape: DecoderShape, chunks: Seq[Chunk]) -> Demand:
    """A step's demand: it reads the weights once and each sequence's KV once."""
    num_tokens = sum(chunk.num_tokens for chunk in chunks)
    num_rows = sum(chunk.samples for chunk in chunks)
    num_context = sum(chunk.start + chunk.num_tokens for chunk in chunks)
    # Each token attends to those before it and to itself.
    num_pairs = sum(c.num_tokens * c.start + c.num_tokens * (c.num_tokens + 1) // 2 for c in chunks)
    products = shape.num_body_weights * num_tokens + shape.num_head_weights * num_rows
    return Demand(
        shape.weight_bytes + shape.kv_bytes_per_token * num_context,
        2 * products + 4 * shape.attention_width * num_pairs,
    )


def _count(modules: Seq[nn.Module], seen: set[int]) -> tuple[int, int]:
    """Returns elements and bytes of the modules' own matrices; shared tensors count once."""
    own = [tensor for module in modules for tensor in _tensors(module)]
    found = {id(t): t for t in own if t.dim() > 1 and id(t) not in seen}.values()
    seen.update(map(id, found))
    return sum(t.numel() for t in found), sum(t.nbytes for t in found)


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    """Yields parameters, and other tensors of batchway's own modules, packed or not."""
    yield from module.parameters(recurse=False)
    for value in vars(module).values():
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, Panels):
            yield value.weights


# --- steps of a class -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ProfiledLoad:
    """The requests of the steps, and the numbers of steps of each class."""

    num_streams: int
    num_prompt_tokens: int
    num_steps: int = 50
    num_profiled: int = 8  # under torch's profiler

    @property
    def num_output_tokens(self) -> int:
        """The output that a stream needs to last for all windows."""
        return 6 * self.num_steps + 64


class _Step(NamedTuple):
    step_s: float
    report: StepReport  # with the model's time
    demand: Demand
    features: Features


class _Windows:
    """Produces steps of a class, with one engine for all."""

    def __init__(
        self, engine: Engine, shape: DecoderShape, vocab_size: int, load: ProfiledLoad
    ) -> None:
        self._engine = engine
        self._shape = shape
        self._vocab_size = vocab_size
        self._load = load
        self._num_requests = 0

    def run(
        self,
        kind: str,
        num_steps: int,
        within: AbstractContextManager[object] | None = None,
    ) -> list[_Step]:
        """Runs `num_steps` steps of this class. Enters the context `within` when they begin."""
        load, steps, num_new = self._load, list[_Step](), 0
        budget = self._engine.limits.max_num_batched_tokens
        if kind != "decode":
            num_new = 1 if kind == "mixed" else -(-budget // load.num_prompt_tokens)
        if kind != "prefill":
            self._add(load.num_streams, load.num_output_tokens)
            num_first = 0
            while num_first < load.num_streams:
                num_first += sum(o.position == 0 for o in self._engine.step().outputs)
        with within or contextlib.nullcontext():
            while len(steps) < num_steps:
                self._add(num_new, 1)
                step = self._step()
                if kind_of(step.report) == kind:  # as nearly all are
                    steps.append(step)
        for number in range(self._num_requests):
            self._engine.stop_job(str(number), 1)
        return steps

    def _step(self) -> _Step:
        chunks: list[Chunk] = []
        started_s = time.perf_counter()
        report = self._engine.step(chunks.extend)
        step_s = time.perf_counter() - started_s
        assert not report.failed, report.failed[0].message
        return _Step(step_s, report, demand_of(self._shape, chunks), step_features(chunks))

    def _add(self, num_requests: int, max_tokens: int) -> None:
        for number in range(self._num_requests, self._num_requests + num_requests):
            ids = (7919 * number + 31 * i for i in range(self._load.num_prompt_tokens))
            prompt_ids = tuple(4 + each % (self._vocab_size - 4) for each in ids)
            params = SamplingParams(
                max_tokens=max_tokens, seed=number, temperature=0.0, ignore_eos=True
            )
            # Tenants of their own, so that no prefix is shared.
            name, prompts = str(number), (prompt_ids,)
            self._engine.add(
                Request(
                    name, 1, name, "standard", prompts, params, outputs=((),), finished=(False,)
                )
            )
        self._num_requests += num_requests


def kind_of(report: StepReport) -> str:
    """The class of a step, as in metrics."""
    num_prefill = report.num_step_tokens - report.num_decode_tokens
    if not num_prefill:
        return "decode" if report.num_decode_tokens else "idle"
    return "mixed" if report.num_decode_tokens else "prefill"


# --- findings ---------------------------------------------------------------------------------


class Bound(StrEnum):
    """What limits a class of steps."""

    MEMORY = "memory"
    COMPUTE = "compute"
    OVERHEAD = "overhead"  # neither: small operations, launches, Python


@dataclass(frozen=True, slots=True)
class Operator:
    """One kind of operation, with its share of all operators' time."""

    name: str
    self_us: float
    share: float
    num_calls: int


@dataclass(frozen=True, slots=True)
class ClassFinding:
    """Steps of one class; means unless stated otherwise. Seconds.

    `memory_s`, `compute_s`: lower bounds of reading and computing on this machine. `outside_s`:
    part of a step before and after the model: scheduling, bookkeeping. `gap_share`: share of the
    profiled time without an operator on the device.
    """

    kind: str
    num_steps: int
    num_tokens: float
    num_seqs: float
    step_s: float
    p99_s: float
    model_s: float
    outside_s: float
    memory_s: float
    compute_s: float
    gap_share: float
    operators: tuple[Operator, ...]

    @property
    def bound(self) -> Bound:
        if max(self.memory_s, self.compute_s) < _NEAR * self.model_s:
            return Bound.OVERHEAD
        return Bound.MEMORY if self.memory_s > self.compute_s else Bound.COMPUTE

    @property
    def efficiency(self) -> float:
        """The lower bound relative to the model's time; 1 is the best possible."""
        return min(1.0, max(self.memory_s, self.compute_s) / self.model_s)


@dataclass(frozen=True, slots=True)
class Profile:
    """The results of `batchway profile`. `steps`: seconds and features of each step that was
    measured; `room`: what a worker with this model has room for."""

    machine: Machine
    shape: DecoderShape
    findings: tuple[ClassFinding, ...]
    advice: str
    steps: tuple[tuple[float, Features], ...]
    room: dict[str, int]

    def as_dict(self) -> dict[str, Any]:
        return {
            "machine": asdict(self.machine),
            "shape": asdict(self.shape),
            "advice": self.advice,
            "findings": [
                asdict(f) | {"bound": f.bound.value, "efficiency": f.efficiency}
                for f in self.findings
            ],
        }


def take_profile(options: EngineOptions, load: ProfiledLoad, trace_dir: Path | None) -> Profile:
    """Takes the profile of a model. Raises ModelRefused, CannotProfile."""
    loaded = load_model(options, lambda text: print(text, file=sys.stderr))
    runner = loaded.model
    if not isinstance(runner, ModelRunner):
        raise CannotProfile("only models with paged attention are profiled")
    longest = load.num_prompt_tokens + load.num_output_tokens
    if longest > runner.max_model_len:
        raise CannotProfile(
            f"{load.num_prompt_tokens} tokens of prompt and {load.num_steps} steps need a context "
            f"of {longest} tokens, and this model has {runner.max_model_len}: ask for fewer"
        )
    keys = next(iter(runner.cache.layers.values())).keys
    try:
        machine, shape = measure(keys.device, keys.dtype), shape_of(runner)
        engine = build_engine(runner, loaded.vocab_size, options, loaded.num_step_tokens)
        windows = _Windows(engine, shape, loaded.vocab_size, load)
        found = [_find(windows, kind, machine, load, trace_dir) for kind in KINDS]
        findings = tuple(finding for finding, _ in found)
    except torch.OutOfMemoryError as exc:
        raise CannotProfile("the device has too little memory for this") from exc
    return Profile(
        machine,
        shape,
        findings,
        advice(findings, keys.device.type == "cuda"),
        tuple((step.step_s, step.features) for _, steps in found for step in steps),
        {
            "max_num_seqs": options.num_places,
            "num_blocks": runner.num_blocks,
            "block_size": runner.block_size,
            "step_tokens": engine.limits.max_num_batched_tokens,
        },
    )


def _find(
    windows: _Windows, kind: str, machine: Machine, load: ProfiledLoad, trace_dir: Path | None
) -> tuple[ClassFinding, list[_Step]]:
    """Times a class without the profiler, then profiles some of its steps. Returns also the timed
    steps."""
    windows.run(kind, 2)  # one-time costs are not measured
    steps = windows.run(kind, load.num_steps)
    operators, gap_share = _look_inside(windows, kind, load.num_profiled, trace_dir)
    step_s = statistics.mean(step.step_s for step in steps)
    model_s = statistics.mean(step.report.step_s for step in steps)
    finding = ClassFinding(
        kind=kind,
        num_steps=load.num_steps,
        num_tokens=statistics.mean(step.report.num_step_tokens for step in steps),
        num_seqs=statistics.mean(step.report.num_step_seqs for step in steps),
        step_s=step_s,
        p99_s=sorted(step.step_s for step in steps)[int(0.99 * (load.num_steps - 1))],
        model_s=model_s,
        outside_s=step_s - model_s,
        memory_s=statistics.mean(step.demand.num_bytes for step in steps) / machine.bytes_per_s,
        compute_s=statistics.mean(step.demand.flops for step in steps) / machine.flops_per_s,
        gap_share=gap_share,
        operators=operators,
    )
    return finding, steps


def _look_inside(
    windows: _Windows, kind: str, num_steps: int, trace_dir: Path | None
) -> tuple[tuple[Operator, ...], float]:
    """The operators with the most time, and the share of time in which none ran."""
    is_gpu = torch.cuda.is_available()
    profiler = profile(
        activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_gpu else [])]
    )
    with _named_native_kernels():
        windows.run(kind, num_steps, profiler)
    if trace_dir is not None:
        trace_dir.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(trace_dir / f"{kind}.json"))
    rows = [(_self_us(row, is_gpu), row) for row in profiler.key_averages()]
    all_us = sum(us for us, _ in rows)
    rows.sort(key=lambda pair: -pair[0])
    operators = tuple(
        Operator(row.key, us, us / all_us, row.count) for us, row in rows[:_MAX_OPERATORS] if us
    )
    spans: list[Any] = [event.time_range for event in profiler.events()]  # type: ignore[no-untyped-call]
    window_us = float(max(span.end for span in spans) - min(span.start for span in spans))
    return operators, max(0.0, 1.0 - all_us / window_us)


def _self_us(row: Any, is_gpu: bool) -> float:
    """An operation's time; on a GPU of kernels only, because host operators include it again."""
    if is_gpu:
        return float(row.self_device_time_total) if row.device_type == DeviceType.CUDA else 0.0
    return float(row.self_cpu_time_total)


@contextlib.contextmanager
def _named_native_kernels() -> Iterator[None]:
    """Shows batchway's kernels in torch's profiler, which records only torch's operators."""

    def recorded(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def recorded_call(*args: Any, **kwargs: Any) -> Any:
            with record_function(f"batchway::{name}"):
                return call(*args, **kwargs)

        return recorded_call

    originals = {name: getattr(Kernels, name) for name in _NATIVE}
    for name, original in originals.items():
        setattr(Kernels, name, recorded(name, original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(Kernels, name, original)


def advice(findings: tuple[ClassFinding, ...], is_gpu: bool) -> str:
    """One paragraph: what limits this engine, and which setting helps."""
    by_kind = {finding.kind: finding for finding in findings}
    mixed, decode = by_kind["mixed"], by_kind["decode"]
    sentences = [_of_decode(decode, is_gpu), _of_prefill(by_kind["prefill"])]
    if mixed.step_s > 2 * decode.step_s:
        sentences.append(
            f"A step that also computes prompts takes {mixed.step_s / decode.step_s:.1f} times as "
            "long as one of decoding alone, so tokens arrive later: lower "
            "--max-num-batched-tokens, or set prefill_share, where time between tokens matters "
            "more than the first token."
        )
    outside = max(findings, key=lambda finding: finding.outside_s / finding.step_s)
    if outside.outside_s > _LARGE_GAP * outside.step_s:
        sentences.append(
            f"{outside.outside_s / outside.step_s:.0%} of a {outside.kind} step passes outside of "
            "the model, in scheduling and bookkeeping: larger batches spread it over more tokens."
        )
    return " ".join(sentences)


def _of_decode(finding: ClassFinding, is_gpu: bool) -> str:
    text = f"Decoding is bound by {finding.bound}, at {finding.efficiency:.0%} of the roof. "
    if finding.bound is Bound.MEMORY:
        return text + (
            "Each step reads all weights for one token of each stream, so more streams are "
            "nearly free: raise --max-num-seqs as far as KV memory and the time between "
            "tokens allow; a smaller --dtype makes each step shorter."
        )
    if finding.bound is Bound.COMPUTE:
        return text + (
            "More streams make each step longer without more tokens per second: "
            "--max-num-seqs is high enough. A faster device or a smaller model helps."
        )
    if finding.gap_share > _LARGE_GAP:
        waits = "the device waits for the host" if is_gpu else "Python runs between operators"
        return text + (
            f"In {finding.gap_share:.0%} of the time no operator ran: {waits}. More streams in a "
            "step are nearly free then: raise --max-num-seqs."
        )
    first = finding.operators[0]
    return text + (
        "Operators run nearly all the time, but at a fraction of what large ones reach here; "
        f"{first.name} takes {first.share:.0%} of it. More streams make its products larger, so "
        "raise --max-num-seqs while a step stays short enough for the time between tokens."
    )


def _of_prefill(finding: ClassFinding) -> str:
    text = f"Prefill is bound by {finding.bound}, at {finding.efficiency:.0%} of the roof"
    if finding.bound is Bound.COMPUTE:
        return text + ", the best case; only fewer prompt tokens help, through the prefix cache."
    return text + ": longer chunks would use the device better, by --max-num-batched-tokens."
