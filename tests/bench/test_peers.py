"""Engines side by side: each adapter's record, medians and tables."""

import argparse
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bench.peers.__main__ import ADAPTERS, OURS, Column, main, measure, summarise, tables
from bench.peers.adapters import record
from infra.measure.workloads import Workload, WorkloadRequest
from tests.tiny_models import save_tiny_model

pytestmark = pytest.mark.e2e


def options(folder: Path) -> argparse.Namespace:
    return argparse.Namespace(folder=folder, max_running=2, threads=1)


@pytest.mark.campaign
def test_an_adapter_and_our_engine_yield_equal_tokens(tmp_path: Path) -> None:
    """In float32, as many as each request asks for. Their records have the same fields."""
    save_tiny_model("llama", tmp_path / "S")
    requests = [WorkloadRequest(tuple(range(4, 4 + n)), 3 + n) for n in (2, 5, 9)]
    (tmp_path / "S.json").write_bytes(msgspec.json.encode(Workload(tuple(requests))))
    column, python = Column("S", "float32"), Path(sys.executable)

    ours = measure(OURS, python, column, options(tmp_path))
    theirs = measure("transformers", python, column, options(tmp_path))

    assert theirs["outputs"] == ours["outputs"]
    assert [len(output) for output in ours["outputs"]] == [5, 8, 12]
    assert theirs.keys() <= ours.keys()
    assert all(theirs[name].keys() == ours[name].keys() for name in ("ttft_s", "itl_s", "e2e_s"))


def test_every_adapter_has_a_name() -> None:
    """Every file with an adapter's options is in ADAPTERS, and no other."""
    folder = Path(record.__file__).parent
    takers = {f.stem for f in folder.glob("*.py") if "options = arguments()" in f.read_text()}

    assert takers == set(ADAPTERS.values())


def found(speed: float, outputs: list[list[int]]) -> dict[str, Any]:
    latencies = {name: {"p50": 0.0, "p99": 1 / speed} for name in ("ttft_s", "itl_s")}
    return {"output_tokens_per_s": speed, "outputs": outputs, **latencies}


def test_medians_and_equal_outputs_are_reported() -> None:
    """Throughput and latency are in separate tables."""
    runs = {
        OURS: [found(speed, [[1], [2]]) for speed in (10.0, 300.0, 200.0)],
        "vllm": [found(speed, [[1], [3]]) for speed in (100.0, 1.0, 900.0)],
    }

    summary = summarise(runs)
    text = tables({Column("S", "float32"): summary})

    assert summary["vllm"]["same_outputs"] == 1
    assert text.splitlines() == [
        "S float32",
        "                tokens/s   ours / it   same outputs",
        "batchway             200        1.00         2 of 2",
        "vllm                 100        2.00         1 of 2",
        "ms               first token       p99   between, p99",
        "batchway                   0         5            5.0",
        "vllm                       0        10           10.0",
    ]


@pytest.mark.parametrize("peer", ["nobody=/bin/sh", "vllm", "vllm=/no/such/python"])
def test_an_unknown_peer_is_an_error(
    peer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything runs. The error quotes the option."""
    with pytest.raises(SystemExit):
        main(["--folder", str(tmp_path), "--peer", peer])

    assert peer in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
