"""The faster product is chosen for each shape, by measurements that are made once and stored."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny_models import save_tiny_model
from tests.workers.model.processors import ISAS
from workers.ipc.messages import EngineOptions
from workers.model import matmul_choice
from workers.model.loader import load_model
from workers.model.matmul_choice import (
    ROWS,
    LinearShape,
    Processor,
    Product,
    Products,
    find_processor,
)
from workers.model.native.kernels import DTYPES, Kernels
from workers.model.native.library import load_library

KERNELS = {dtype: Kernels(load_library(ISAS[-1]), dtype) for dtype in DTYPES}
SHAPE = LinearShape(64, 128, torch.float32)


def choose(kept_in: Path | None = None, *allowed: Product) -> Products:
    among = frozenset(allowed or Product)
    return Products(KERNELS, among, weight_bytes=0, kept_in=kept_in)


def keep(folder: Path, **factors: float) -> Path:
    """A file of measurements in which `onednn` takes this many times as long as our product, by
    shape."""
    figures = {
        shape: {"own": [1e-3] * len(ROWS), "onednn": [factor * 1e-3] * len(ROWS)}
        for shape, factor in factors.items()
    }
    file = folder / "figures.json"
    file.write_text(json.dumps(figures))
    return file


@pytest.mark.parametrize(
    ("factor", "expected"),
    [(2.0, Product.OWN), (0.95, Product.OWN), (0.8, Product.ONEDNN)],
    ids=["ours is faster", "oneDNN is hardly faster", "oneDNN is faster"],
)
def test_the_faster_product_is_taken(factor: float, expected: Product, tmp_path: Path) -> None:
    """Ours if both take about as long: layers that use only ours run in one call."""
    figures = keep(tmp_path, **{str(SHAPE): factor})

    assert choose(figures).fastest(SHAPE) is expected


def test_a_shape_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second load of the model, and a second layer of the shape, use the stored measurements."""
    monkeypatch.setattr(matmul_choice, "_STEADY", float("inf"))
    monkeypatch.setattr(matmul_choice, "_LEAST_SHARE", 0.0)
    file = tmp_path / "figures.json"
    first = choose(file)
    chosen = first.fastest(SHAPE)
    written = file.read_bytes()
    walls_s = json.loads(written)[str(SHAPE)]
    assert set(walls_s) == {"own", "onednn"}
    assert all(wall_s > 0 for times in walls_s.values() for wall_s in times)

    def fail(*args: Any) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(Products, "_measure", fail)
    assert first.fastest(SHAPE) is chosen
    assert choose(file).fastest(SHAPE) is chosen
    assert file.read_bytes() == written


@pytest.mark.parametrize("why", ["uneven", "not alone"])
def test_a_busy_machine_keeps_no_measurement_and_uses_our_product(
    why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Timings that differ much, or from a process that gets little processor time, are not used."""
    monkeypatch.setattr(matmul_choice, "_STEADY", 0.0 if why == "uneven" else float("inf"))
    monkeypatch.setattr(matmul_choice, "_LEAST_SHARE", 0.0 if why == "uneven" else float("inf"))
    file = tmp_path / "figures.json"

    assert choose(file).fastest(SHAPE) is Product.OWN
    assert not file.exists()


@pytest.mark.parametrize("text", ["", "[1]", '{"float32 64x128": {"own": [0]}}', "{"])
def test_a_damaged_file_is_replaced_by_new_measurements(text: str, tmp_path: Path) -> None:
    """The file is a cache, so this is no error."""
    file = tmp_path / "figures.json"
    file.write_text(text)

    assert choose(file).fastest(SHAPE) in (Product.OWN, Product.ONEDNN)


def test_an_unwritable_folder_costs_only_a_measurement(tmp_path: Path) -> None:
    """The choice is made without it."""
    assert choose(tmp_path / "missing" / "figures.json").fastest(SHAPE) is not Product.TORCH


def test_a_single_product_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours does not support odd shapes, oneDNN's does not support int8, and neither supports half
    precision."""

    def fail(*args: Any) -> None:
        raise AssertionError("measured")

    monkeypatch.setattr(Products, "_measure", fail)

    assert choose().fastest(LinearShape(60, 100, torch.float32)) is Product.ONEDNN
    assert choose().fastest(LinearShape(64, 128, torch.bfloat16, is_int8=True)) is Product.OWN
    assert choose().fastest(LinearShape(64, 128, torch.float16)) is Product.TORCH
    assert choose(None, Product.ONEDNN).fastest(SHAPE) is Product.ONEDNN
    assert choose(None, Product.TORCH).fastest(SHAPE) is Product.TORCH


def test_a_type_slower_than_float32_is_warned_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With the measured factors. There is no warning for float32 or a faster type."""
    folder = save_tiny_model("llama", tmp_path / "model")
    speeds = {torch.float32: 1.0, torch.bfloat16: 1.5}

    def measure(self: Products, shape: LinearShape, candidates: list[Product]) -> Any:
        return {name: [speeds[shape.dtype]] * len(ROWS) for name in candidates}

    monkeypatch.setattr(Products, "_measure", measure)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def warnings(dtype: str) -> list[str]:
        caplog.clear()
        options = EngineOptions(model_path=str(folder), device="cpu", dtype=dtype)
        with caplog.at_level(logging.WARNING):
            load_model(options, lambda text: None, Processor(ISAS[-1]))
        return [record.getMessage() for record in caplog.records]

    assert warnings("float32") == []
    [warning] = warnings("bfloat16")
    assert warning.startswith("dtype bfloat16 is slower than float32 on this processor")
    assert "1.5 with 1, 1.5 with 8, 1.5 with 32, 1.5 with 128" in warning
    speeds[torch.bfloat16] = 0.6
    (tmp_path / "batchway").rename(tmp_path / "old")
    assert warnings("bfloat16") == []


def test_an_operator_can_limit_the_instruction_set() -> None:
    """By an environment variable; an unknown name is refused."""
    assert find_processor({}).isa == "native"
    assert find_processor({"BATCHWAY_CPU_ISA": "avx2"}).isa == "avx2"
    with pytest.raises(Exception, match="BATCHWAY_CPU_ISA=sse9 is not one of avx2, avx512, native"):
        find_processor({"BATCHWAY_CPU_ISA": "sse9"})
