"""Times this machine's matrix products, chooses the fastest for each layer shape, and makes layers
with it; several are merged if they have the same input.

It depends on processor, shape and number of threads, so it is measured when a model is loaded, on
random weights, with the candidates in turn. Results are stored in a file and reused. torch's
defaults are slower than the candidates: in float32 it does not use oneDNN, in bfloat16 it converts
the weights at each call.
"""

import dataclasses
import json
import math
import os
import platform
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import torch
from torch import Tensor, nn

from workers.engine.interface import ModelRefused
from workers.model.linear import (
    NativeGates,
    NativeLinear,
    PackedLinear,
    PlainLinear,
    multiply_packed,
    pack,
)
from workers.model.native.kernels import DTYPES, PANEL, Kernels, Panels, Weight
from workers.model.native.library import Isa
from workers.model.quantization import QuantizedLinear, QuantizedWeight

ROWS = (1, 8, 32, 128)  # rows of x: one stream, a few, many, a chunk of a prompt
_SHAPE_S = 0.12  # for all row counts of one shape
_LEAST_CALLS = 5
# Time on weights larger than the caches if the model's are. Very large layers are timed in part.
_WORKING_SET_BYTES = 2**25
_MOST_WEIGHTS = 2**21
# The shortest call counts. If the median is this many times longer, or the process got less than
# this share of its threads' time, the machine is busy and the result is discarded.
_STEADY = 2.0
_LEAST_SHARE = 0.7
# Our product is chosen unless another is faster by this factor, and if there is no result: it also
# fuses norms, gates and sums, can run whole layers in one call, and its outputs do not depend on
# the other rows.
_MARGIN = 1.1

ISA_VARIABLE = "BATCHWAY_CPU_ISA"


class Product(StrEnum):
    """Implementations of a linear layer's product."""

    OWN = "own"  # our kernels in workers/model/native
    ONEDNN = "onednn"  # torch's prepacked product
    TORCH = "torch"  # torch's default product


@dataclass(frozen=True, slots=True)
class Processor:
    """The CPU features that the engine may use; no other module checks the processor.

    `isa`: the widest instruction set for our kernels. `products`: the candidates; TORCH is
    always one."""

    isa: Isa = Isa.NATIVE
    products: frozenset[Product] = frozenset(Product)


def find_processor(environment: Mapping[str, str] = os.environ) -> Processor:
    """The current processor, narrowed by BATCHWAY_CPU_ISA. Raises ModelRefused."""
    name = environment.get(ISA_VARIABLE) or Isa.NATIVE
    if name not in list(Isa):
        raise ModelRefused(f"{ISA_VARIABLE}={name} is not one of {', '.join(Isa)}")
    return Processor(Isa(name))


_Multiply = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class LinearShape:
    """A linear layer; `dtype` is that of x, and of the weights unless they are int8."""

    num_in: int
    num_out: int
    dtype: torch.dtype
    is_int8: bool = False

    def __str__(self) -> str:
        kind = DTYPES[self.dtype] + ("-int8" if self.is_int8 else "")
        return f"{kind} {self.num_in}x{self.num_out}"

    @property
    def num_bytes(self) -> int:
        return self.num_in * self.num_out * (1 if self.is_int8 else self.dtype.itemsize)


class Products:
    """The products of one CPU.

    kernels: ours, by type, as far as they could be built; weight_bytes: of the whole model;
    kept_in: the file of timings.
    """

    def __init__(
        self,
        kernels: dict[torch.dtype, Kernels],
        allowed: frozenset[Product],
        *,
        weight_bytes: int,
        kept_in: Path | None = None,
    ) -> None:
        self._kernels = kernels if Product.OWN in allowed else {}
        self._has_onednn = Product.ONEDNN in allowed
        self._working_set = min(weight_bytes, _WORKING_SET_BYTES)
        self._kept_in = kept_in
        self._timed: dict[str, dict[str, list[float]]] = {} if kept_in is None else _read(kept_in)
        self._unknown: set[str] = set()
        self._laid_out: Counter[LinearShape] = Counter()

    def fastest(self, shape: LinearShape) -> Product:
        """The fastest product for such a layer; TORCH if there is no other."""
        candidates = self._candidates(shape)
        if len(candidates) < 2:
            return next(iter(candidates), Product.TORCH)
        timed = self._time(shape, candidates)
        if not timed:
            return Product.OWN
        ratios = [
            math.log(own / other)
            for own, other in zip(timed[Product.OWN], timed[Product.ONEDNN], strict=True)
        ]
        is_own = sum(ratios) / len(ratios) <= math.log(_MARGIN)
        return Product.OWN if is_own else Product.ONEDNN

    def note(self, shape: LinearShape) -> None:
        """Counts a layer for `slowdown`."""
        self._laid_out[shape] += 1

    def slowdown(self) -> dict[int, float]:
        """Time of all layers' products by rows of x, relative to float32. Empty for float32, or if
        either cannot be timed."""
        plain = Counter[LinearShape]()
        for shape, count in self._laid_out.items():
            plain[LinearShape(shape.num_in, shape.num_out, torch.float32)] += count
        if plain == self._laid_out:
            return {}
        taken, beside = self._total_s(self._laid_out), self._total_s(plain)
        return {rows: a / b for rows, a, b in zip(ROWS, taken, beside, strict=False)}

    def _total_s(self, layers: Counter[LinearShape]) -> list[float]:
        """Seconds of all layers for each of ROWS, each layer by its fastest product."""
        totals = [0.0] * len(ROWS)
        for shape, count in layers.items():
            candidates = self._candidates(shape)
            timed = self._time(shape, candidates) if candidates else {}
            if not timed:
                return []
            for i, wall_s in enumerate(timed[self.fastest(shape)]):
                totals[i] += count * wall_s
        return totals

    def _candidates(self, shape: LinearShape) -> list[Product]:
        kernels, found = self._kernels.get(shape.dtype), []
        if kernels is not None and kernels.can_multiply_shape(shape.num_in, shape.num_out):
            found.append(Product.OWN)
        if self._has_onednn and not shape.is_int8 and onednn_takes(shape.dtype):
            found.append(Product.ONEDNN)
        return found

    def _time(self, shape: LinearShape, candidates: list[Product]) -> dict[str, list[float]]:
        """Seconds of one product for each of ROWS, by product; empty if unknown."""
        key = str(shape)
        if set(self._timed.get(key, ())) != set(candidates) and key not in self._unknown:
            self._timed[key] = self._measure(shape, candidates)
            if not self._timed[key]:
                self._unknown.add(key)
            elif self._kept_in is not None:
                _write(self._kept_in, self._timed)
        return self._timed[key]

    @torch.inference_mode()
    def _measure(self, shape: LinearShape, candidates: list[Product]) -> dict[str, list[float]]:
        part = _part(shape)
        num_copies = max(1, self._working_set // part.num_bytes)
        makers = {Product.OWN: self._make_own, Product.ONEDNN: _make_onednn}
        layers = {name: [makers[name](part) for _ in range(num_copies)] for name in candidates}
        found: dict[str, list[float]] = {name: [] for name in candidates}
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        for num_rows in ROWS:
            x = torch.randn(num_rows, shape.num_in).to(shape.dtype)
            walls_s: dict[Product, list[float]] = {name: [] for name in candidates}
            end_s = time.perf_counter() + _SHAPE_S / len(ROWS)
            while time.perf_counter() < end_s or len(walls_s[candidates[0]]) < _LEAST_CALLS:
                for name, taken_s in walls_s.items():
                    taken_s.append(_wall_s(layers[name][len(taken_s) % num_copies], x))
            for name, taken_s in walls_s.items():
                if statistics.median(taken_s) > _STEADY * min(taken_s):
                    return {}
                found[name].append(min(taken_s) * shape.num_out / part.num_out)
        share = (time.process_time() - start_cpu_s) / (time.perf_counter() - start_s)
        return found if share >= _LEAST_SHARE * torch.get_num_threads() else {}

    def _make_own(self, shape: LinearShape) -> _Multiply:
        kernels = self._kernels[shape.dtype]
        weights = torch.randn(-(-shape.num_out // PANEL), shape.num_in, PANEL)
        if shape.is_int8:
            scales = torch.ones(weights.shape[0] * PANEL)
            panels = Panels((weights * 32).clamp_(-127, 127).to(torch.int8), scales)
        else:
            panels = Panels(weights.to(shape.dtype))
        return lambda x: kernels.linear(x, panels, shape.num_out)


def _make_onednn(shape: LinearShape) -> _Multiply:
    packed = pack(torch.randn(shape.num_out, shape.num_in).to(shape.dtype))
    return lambda x: multiply_packed(x, packed, None)


def onednn_takes(dtype: torch.dtype) -> bool:
    """Whether torch and the processor support the packed product for this type."""
    if not torch._C._has_mkldnn:
        return False
    if dtype == torch.bfloat16:
        has_bfloat16: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()
        return has_bfloat16
    return dtype == torch.float32


def figures_file(library: Path) -> Path:
    """The file of timings, next to the compiled kernels. Its name depends on kernels, torch,
    processor, number of threads and oneDNN's instruction limit."""
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "all")
    text = f"{_processor_name()} {torch.__version__} {torch.get_num_threads()} {limit}"
    name = "".join(letter if letter.isalnum() else "-" for letter in text)
    return library.with_name(f"{library.stem}-{name}.json")


def _processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _part(shape: LinearShape) -> LinearShape:
    """The layer, reduced to _MOST_WEIGHTS weights."""
    most = max(PANEL, _MOST_WEIGHTS // shape.num_in // PANEL * PANEL)
    return LinearShape(shape.num_in, min(shape.num_out, most), shape.dtype, shape.is_int8)


def _wall_s(multiply: _Multiply, x: Tensor) -> float:
    start_s = time.perf_counter()
    multiply(x)
    return time.perf_counter() - start_s


def _read(file: Path) -> dict[str, dict[str, list[float]]]:
    """Stored timings; empty if the file is missing or damaged."""
    try:
        found = json.loads(file.read_text("utf-8"))
        return {
            str(shape): {str(name): [float(s) for s in walls_s] for name, walls_s in timed.items()}
            for shape, timed in found.items()
            if timed and all(len(w) == len(ROWS) and min(w) > 0 for w in timed.values())
        }
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _write(file: Path, timed: dict[str, dict[str, list[float]]]) -> None:
    """Writes to a temporary name: two workers may write at once. Failure only costs another
    measurement."""
    partial = file.with_suffix(f".{os.getpid()}")
    try:
        partial.write_text(json.dumps(timed))
        partial.replace(file)
    except OSError:
        partial.unlink(missing_ok=True)


Linear = NativeLinear | PackedLinear | PlainLinear | QuantizedLinear


AnyLinear = nn.Linear | QuantizedLinear


def are_linear(modules: Seq[object]) -> bool:
    """Whether all are plain linear layers, or all are quantized ones."""
    kinds = {type(module) for module in modules}
    return kinds in ({nn.Linear}, {QuantizedLinear})


def weight_of(linear: AnyLinear) -> Weight:
    """The weight in its stored form."""
    if isinstance(linear, QuantizedLinear):
        return linear.quantized_weight
    return linear.weight.detach()


@dataclass(frozen=True, slots=True)
class Layout:
    """How weights are stored: for the fastest of `products`."""

    products: Products
    kernels: Kernels | None

    def linear(self, weight: Weight, bias: Tensor | None) -> Linear:
        shape = _shape(weight)
        self.products.note(shape)
        product = self.products.fastest(shape)
        if product is Product.OWN and self.kernels is not None:
            return NativeLinear(weight, bias, self.kernels)
        if product is Product.ONEDNN and isinstance(weight, Tensor):
            return PackedLinear(weight, bias)
        if isinstance(weight, QuantizedWeight):
            return QuantizedLinear(weight, bias)
        return PlainLinear(weight, bias)

    def merged(self, linears: Seq[AnyLinear]) -> Linear:
        """One layer with the concatenated outputs; all are quantized or none is."""
        weight = _side_by_side([weight_of(linear) for linear in linears])
        if all(linear.bias is None for linear in linears):
            return self.linear(weight, None)
        biases: list[Tensor] = [
            torch.zeros(linear.out_features, dtype=weight.dtype)
            if linear.bias is None
            else linear.bias
            for linear in linears
        ]
        return self.linear(weight, torch.cat(biases))

    def gates(self, gate: AnyLinear, up: AnyLinear) -> NativeGates | None:
        """SiLU gates and values as one product, if ours is the fastest."""
        if self.kernels is None or gate.bias is not None or up.bias is not None:
            return None
        first, second = weight_of(gate), weight_of(up)
        both = dataclasses.replace(_shape(first), num_out=2 * first.shape[0])
        if not self.kernels.can_multiply(first):
            return None
        if self.products.fastest(both) is not Product.OWN:
            return None
        self.products.note(both)
        return NativeGates(first, second, self.kernels)


def _shape(weight: Weight) -> LinearShape:
    num_out, num_in = weight.shape
    return LinearShape(num_in, num_out, weight.dtype, isinstance(weight, QuantizedWeight))


def _side_by_side(weights: Seq[Weight]) -> Weight:
    small = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
    if not small:
        return torch.cat([weight for weight in weights if isinstance(weight, Tensor)])
    assert len(small) == len(weights)
    values = torch.cat([weight.values for weight in small])
    return QuantizedWeight(values, torch.cat([weight.scales for weight in small]), small[0].dtype)
