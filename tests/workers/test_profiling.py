"""What limits a step: the arithmetic, the advice, and a whole profile of the demo model."""

import dataclasses
import json
from pathlib import Path

import pytest

from infra.demo_model import demo_model_path
from infra.planning.costs import fit_steps
from tests.workers.engine.test_block_manager import sequence_of
from workers.engine.interface import Chunk
from workers.ipc.messages import EngineOptions
from workers.model.loader import load_model
from workers.model.native.kernels import Kernels
from workers.profiling import (
    KINDS,
    Bound,
    CannotProfile,
    ClassFinding,
    DecoderShape,
    Demand,
    Operator,
    Profile,
    ProfiledLoad,
    advice,
    demand_of,
    shape_of,
    take_profile,
)

OPTIONS = EngineOptions(
    model_path=str(demo_model_path()), num_threads=1, max_num_batched_tokens=128, max_num_seqs=16
)
FINDING = ClassFinding(
    kind="decode",
    num_steps=1,
    num_tokens=8,
    num_seqs=8,
    step_s=0.011,
    p99_s=0.012,
    model_s=0.010,
    outside_s=0.001,
    memory_s=0.009,
    compute_s=0.002,
    gap_share=0.1,
    operators=(Operator("aten::mm", 9_000.0, 0.9, 10),),
)


def test_a_step_reads_weights_once_and_each_context_once() -> None:
    """Two streams after 10 and 20 tokens, and a chunk of 4 tokens after 6 that does not sample."""
    shape = DecoderShape(
        weight_bytes=1000,
        num_body_weights=100,
        num_head_weights=50,
        kv_bytes_per_token=8,
        attention_width=2,
    )
    sequence = sequence_of(30)
    chunks = [
        Chunk(sequence, 10, 1, samples=True),
        Chunk(sequence, 20, 1, samples=True),
        Chunk(sequence, 6, 4, samples=False),
    ]
    context, pairs = 11 + 21 + 10, 11 + 21 + (7 + 8 + 9 + 10)
    products = 100 * 6 + 50 * 2
    assert demand_of(shape, chunks) == Demand(
        num_bytes=1000 + 8 * context, flops=2 * products + 4 * 2 * pairs
    )


@pytest.mark.parametrize(("quantization", "num_bytes"), [("none", 4), ("int8", 1)])
@pytest.mark.parametrize("fused", [True, False])
def test_the_demo_model_s_weights_are_counted_in_any_layout(
    fused: bool, quantization: str, num_bytes: int
) -> None:
    """Packed and merged weights count the same: all of the model card's except the embedding."""
    options = EngineOptions(
        model_path=str(demo_model_path()), num_threads=1, fused=fused, quantization=quantization
    )
    shape = shape_of(load_model(options, lambda _: None).model)
    config = json.loads((demo_model_path() / "config.json").read_text())
    hidden, inner, layers = (
        config[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers")
    )
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    size = config.get("head_dim") or hidden // heads
    attention = hidden * size * (2 * heads + 2 * kv_heads)
    assert shape.num_body_weights == layers * (attention + 3 * hidden * inner)
    assert shape.num_head_weights == hidden * config["vocab_size"]
    assert shape.kv_bytes_per_token == 2 * layers * kv_heads * size * 4
    assert shape.weight_bytes == num_bytes * (shape.num_body_weights + shape.num_head_weights)


def test_the_bound_of_a_step_is_its_largest_part() -> None:
    """The larger of the two minimum times, if it explains at least half of the model's time."""
    assert FINDING.bound is Bound.MEMORY
    assert FINDING.efficiency == pytest.approx(0.9)
    assert dataclasses.replace(FINDING, compute_s=0.0095).bound is Bound.COMPUTE
    assert dataclasses.replace(FINDING, memory_s=0.004).bound is Bound.OVERHEAD
    assert dataclasses.replace(FINDING, memory_s=0.02).efficiency == 1.0


def test_advice_names_the_setting_that_moves_the_bound() -> None:
    """Memory: more streams; compute: no more; gaps: the host; long mixed steps: the budget."""
    prefill = dataclasses.replace(FINDING, kind="prefill", memory_s=0.001, compute_s=0.009)
    mixed = dataclasses.replace(FINDING, kind="mixed")

    def advised(**changes: float) -> str:
        decode = dataclasses.replace(FINDING, **changes)  # type: ignore[arg-type]
        return advice((decode, mixed, prefill), is_gpu=True)

    assert "raise --max-num-seqs" in advised()
    assert "high enough" in advised(compute_s=0.0095)
    assert "waits for the host" in advised(memory_s=0.001, gap_share=0.6)
    assert "aten::mm takes 90%" in advised(memory_s=0.001)
    assert "prefill_share" not in advised()
    assert "prefill_share" in advised(step_s=0.005, model_s=0.004, memory_s=0.0036)
    assert "the best case" in advised()
    assert "\n" not in advised()


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> tuple[Profile, Path]:
    """A short profile of the demo model, on one core."""
    traces = tmp_path_factory.mktemp("traces")
    return take_profile(OPTIONS, ProfiledLoad(4, 64, 3, num_profiled=2), traces), traces


@pytest.mark.campaign
def test_each_class_of_steps_has_its_tokens(profile: tuple[Profile, Path]) -> None:
    """Decode: one token for each stream; prefill: a full budget of prompt tokens; mixed: both."""
    decode, mixed, prefill = profile[0].findings
    assert (decode.kind, mixed.kind, prefill.kind) == KINDS
    assert (decode.num_tokens, decode.num_seqs) == (4, 4)
    assert prefill.num_tokens == 128
    assert mixed.num_tokens == 4 + 64
    for finding in profile[0].findings:
        assert 0 < finding.model_s < finding.step_s
        assert finding.step_s == pytest.approx(finding.model_s + finding.outside_s)
        assert min(finding.memory_s, finding.compute_s) > 0
        assert 0 <= finding.gap_share < 1
        assert sum(o.share for o in finding.operators) <= 1.0 + 1e-9
    assert prefill.compute_s > decode.compute_s


@pytest.mark.campaign
def test_step_times_are_fitted_to_its_steps(profile: tuple[Profile, Path]) -> None:
    """Nine steps, with times that are given here: what a machine measured says nothing about the
    fit. The sizes are as a worker would report them."""
    steps, room = profile[0].steps, profile[0].room
    assert len(steps) == 3 * len(KINDS)
    assert all(took_s > 0 for took_s, _ in steps)
    step, token, kv_token = 0.002, 0.0001, 0.000001
    given = [(step + token * x[0] + kv_token * x[1], x) for _, x in steps]
    found = fit_steps(given, room)
    for took_s, features in given:
        assert found.predict(features) == pytest.approx(took_s, rel=1e-3)
    assert (found.step_tokens, found.num_blocks) == (128, room["num_blocks"])


@pytest.mark.campaign
def test_traces_include_our_own_kernels(profile: tuple[Profile, Path]) -> None:
    """One Chrome trace for each class. Afterwards the kernels are as before."""
    for kind in KINDS:
        events = json.loads((profile[1] / f"{kind}.json").read_text())["traceEvents"]
        assert any(event.get("name", "").startswith(("aten::", "mkldnn::")) for event in events)
    assert Kernels.attend.__name__ == "attend"
    assert not hasattr(Kernels.attend, "__wrapped__")
    assert profile[0].machine.bytes_per_s > 1e8
    assert json.loads(json.dumps(profile[0].as_dict()))["findings"][0]["bound"]


def test_a_window_that_the_model_cannot_hold_is_refused() -> None:
    """Before anything is measured."""
    with pytest.raises(CannotProfile, match="ask for fewer"):
        take_profile(OPTIONS, ProfiledLoad(1, 2000, 50), None)
