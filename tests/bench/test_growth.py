"""Step time by batch size and context: the streams, the hardware's limit, and what does not fit."""

import json
from pathlib import Path

import pytest

from bench.growth import fill_cache, main, make_streams, measure_growth
from tests.tiny_models import save_tiny_model
from workers.ipc.messages import EngineOptions
from workers.model.loader import load_model
from workers.model.runner import ModelRunner


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("llama"))


def options_of(model: Path, kv_memory_bytes: int = 2**20) -> EngineOptions:
    return EngineOptions(
        model_path=str(model),
        dtype="float32",
        num_threads=1,
        max_num_seqs=4,
        kv_memory_bytes=kv_memory_bytes,
    )


def runner_of(options: EngineOptions) -> ModelRunner:
    runner = load_model(options, lambda _: None).model
    assert isinstance(runner, ModelRunner)
    return runner


def test_the_limit_counts_weights_once_and_the_context_of_every_stream(model: Path) -> None:
    """Each stream adds only its KV cache in bytes, and the same number of operations."""
    growth = measure_growth(options_of(model), batches=(1, 3), contexts=(20, 40))
    assert [(c.num_streams, c.context) for c in growth.cells] == [
        (1, 20),
        (3, 20),
        (1, 40),
        (3, 40),
    ]
    machine, shape = growth.machine, growth.shape
    found = {}
    for cell in growth.cells:
        kv_bytes = cell.memory_s * machine.bytes_per_s - shape.weight_bytes
        num_tokens = kv_bytes / shape.kv_bytes_per_token / cell.num_streams
        assert cell.context <= num_tokens < cell.context + 20  # it grows by a token per step
        assert cell.limit_s == max(cell.memory_s, cell.compute_s)
        assert cell.share == pytest.approx(cell.limit_s / cell.step_s)
        found[cell.num_streams, cell.context] = cell
    for context in (20, 40):
        each_s = found[3, context].compute_s / 3
        assert each_s == pytest.approx(found[1, context].compute_s, rel=0.1)


def test_streams_have_separate_blocks_of_random_numbers(model: Path) -> None:
    """All but the last token count as computed. Every key is overwritten."""
    runner = runner_of(options_of(model))
    streams = make_streams(runner, 3, 20)
    assert streams is not None
    block_ids = [block_id for stream in streams for block_id in stream.block_ids]
    assert sorted(block_ids) == list(range(len(block_ids)))
    assert [stream.num_pending for stream in streams] == [1, 1, 1]
    for layer in runner.cache.layers.values():
        layer.keys.zero_()
        layer.values.zero_()
    fill_cache(runner, len(block_ids))
    for layer in runner.cache.layers.values():
        assert layer.keys[: len(block_ids)].count_nonzero() == layer.keys[: len(block_ids)].numel()
        assert not layer.values[len(block_ids) : -1].any()


def test_a_batch_that_does_not_fit_is_named(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In its cell of the table. JSON leaves it out."""
    out = tmp_path / "out.json"
    kv_gib = 2**16 / 2**30
    arguments = ["--model", model, "--dtype", "float32", "--threads", 1, "--kv-gib", kv_gib]
    arguments += ["--batch", 1, 4, "--context", 16, "--json", out]
    assert main([str(argument) for argument in arguments]) == 0
    shown, found = capsys.readouterr().out, json.loads(out.read_text())
    assert [(cell["num_streams"], cell["context"]) for cell in found["cells"]] == [(1, 16)]
    assert "| 4 | does not fit |" in shown
    assert main(["--model", str(tmp_path / "nothing")]) == 1
