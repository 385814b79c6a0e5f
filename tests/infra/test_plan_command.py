"""`batchway plan`: memory, times, waiting and the file that it writes, without weights or a GPU."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.cli import main
from infra.planning.devices import DEVICES, ENGINES
from infra.planning.engine import RequestLengths, closed_loop, open_loop
from infra.planning.plan import Goal, batching_yaml, erlang_c, make_plan, mgk_wait_s, server_of
from infra.planning.shapes import ModelShape, read_shape
from tests.tiny_families import PAGED
from workers.configuration import parse
from workers.ipc.messages import StrategyOptions

LLAMA_8B: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 14336, "vocab_size": 128256,
    "max_position_embeddings": 131072, "dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip
QWEN_8B = LLAMA_8B | {
    "model_type": "qwen3", "num_hidden_layers": 36, "intermediate_size": 12288,
    "vocab_size": 151936, "max_position_embeddings": 40960,
}  # fmt: skip
# So wide that few of its sequences fit: simulating many takes long.
SMALL = LLAMA_8B | {
    "num_hidden_layers": 8,
    "num_key_value_heads": 32,
    "max_position_embeddings": 4096,
}
SHARE = 0.3  # of the memory


def write_config(folder: Path, config: dict[str, Any]) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


def shape_of(folder: Path, config: dict[str, Any]) -> ModelShape:
    return read_shape(write_config(folder, config))


def test_a_shape_has_the_weights_and_the_kv_of_the_published_model(tmp_path: Path) -> None:
    """Llama-3.1-8B: 8.03 billion weights, and 128 KiB of KV for a token in bfloat16."""
    shape = shape_of(tmp_path, LLAMA_8B)
    assert shape.num_body + shape.num_head + shape.num_embedding == 8_030_261_248
    assert 2 * shape.num_kv == 128 * 1024
    assert shape.attention_width == 32 * 4096


def test_sizes_that_differ_by_layer_are_counted_layer_by_layer(tmp_path: Path) -> None:
    """Gemma 4: heads of 16 in a window and of 32 in full; the last two of four layers attend to the
    keys and values of the others."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(
        "gemma4_text", vocab_size=320, vocab_size_per_layer_input=320, hidden_size=64,
        hidden_size_per_layer_input=16, intermediate_size=96, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, global_head_dim=32,
        num_kv_shared_layers=2, sliding_window=12,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )  # fmt: skip
    config.save_pretrained(tmp_path)

    shape = read_shape(tmp_path)

    assert shape.num_kv == 2 * 2 * 32
    assert shape.windows == ((2 * 2 * 16, 12),)
    assert shape.attention_width == 2 * 4 * (16 + 32)


@pytest.mark.parametrize("family", sorted(PAGED))
def test_every_family_is_counted_whole(tmp_path: Path, family: str) -> None:
    """Experts, tied heads and sliding windows too: no weight is left out or counted twice."""
    import torch
    import transformers

    name, arguments = PAGED[family]
    config = getattr(transformers, name)(**arguments)
    path = tmp_path / "config.json"
    path.write_text(config.to_json_string())
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    shape = read_shape(path)
    counted = shape.num_body + shape.num_experts + shape.num_head + shape.num_embedding
    assert counted == sum(p.numel() for p in model.parameters())
    assert shape.num_kv + sum(n for n, _ in shape.windows) > 0
    assert 0 < shape.expert_share <= 1


def test_the_largest_batch_is_what_memory_leaves(tmp_path: Path) -> None:
    """By hand: 0.9 of 80 GB, less weights and a step of 2,048 tokens, in blocks of 16 tokens."""
    server = server_of(shape_of(tmp_path, LLAMA_8B), "h100_sxm", "vllm", "bfloat16", 0.9)
    step = 2048 * 2 * (6 * 4096 + 3 * 14336)
    free = 0.9 * 80e9 - 2 * 8_030_261_248 - step
    assert server.sizes.weight_bytes == pytest.approx(2 * 8_030_261_248, rel=1e-3)
    assert server.largest_batch(1000) == int(free // (1008 * 128 * 1024))


def test_throughput_is_near_what_was_measured(tmp_path: Path) -> None:
    """Of Qwen3-8B on one H200, docs/performance.md: 128 tokens in and 512 out over HTTP, by 1, 32
    and 256 streams."""
    server = server_of(shape_of(tmp_path, QWEN_8B), "h200_sxm", "vllm", "bfloat16", 0.9)
    for callers, expected in ((1, 187), (32, 5056), (256, 16225)):
        point = closed_loop(server, RequestLengths(128, 512), callers)
        assert point.output_tokens_per_s == pytest.approx(expected, rel=0.25), callers


def test_erlang_c_is_that_of_the_tables() -> None:
    """One place: the load itself. Two places at a load of 1: 1/3. Ten at 8: 0.4092."""
    assert erlang_c(1, 0.7) == pytest.approx(0.7)
    assert erlang_c(2, 1.0) == pytest.approx(1 / 3)
    assert erlang_c(10, 8.0) == pytest.approx(0.4092, abs=1e-4)


def test_the_wait_is_pollaczek_and_khinchine_s_for_one_place() -> None:
    """M/M/1 and M/D/1 at 80%: four services and two. Infinite where work exceeds the places."""
    assert mgk_wait_s(0.8, 1.0, 1.0, 1) == pytest.approx(4.0)
    assert mgk_wait_s(0.8, 1.0, 0.0, 1) == pytest.approx(2.0)
    assert mgk_wait_s(3.0, 1.0, 1.0, 2) == math.inf
    assert mgk_wait_s(0.0, 1.0, 1.0, 2) == 0.0


@given(st.integers(1, 2000), st.floats(0.01, 0.99), st.floats(0.01, 0.99))
def test_more_load_waits_longer_and_more_places_wait_less(
    num_places: int, one: float, other: float
) -> None:
    low, high = sorted((one, other))
    wait_s = mgk_wait_s(low * num_places, 1.0, 1.0, num_places)
    assert wait_s <= mgk_wait_s(high * num_places, 1.0, 1.0, num_places)
    assert mgk_wait_s(low * num_places, 1.0, 1.0, num_places + 1) <= wait_s


def test_static_batches_wait_for_their_longest_and_continuous_ones_do_not(tmp_path: Path) -> None:
    """The engine's own strategies decide, so their order is the one that they are known for."""
    server = server_of(shape_of(tmp_path, SMALL), "l4", "vllm", "bfloat16", SHARE)
    work = RequestLengths(64, 64, spread=0.9)
    static, continuous = (
        closed_loop(server, work, 16, StrategyOptions(name=name, batch_size=16))
        for name in ("static", "continuous")
    )
    assert continuous.output_tokens_per_s > 1.2 * static.output_tokens_per_s
    assert continuous.ttft_p99_s < static.ttft_p99_s


def test_an_open_loop_serves_its_rate_and_holds_what_little_s_law_says(tmp_path: Path) -> None:
    server = server_of(shape_of(tmp_path, SMALL), "l4", "vllm", "bfloat16", SHARE)
    point = open_loop(server, RequestLengths(64, 32), 16, 20.0, 400, seed=3)
    assert point.requests_per_s == pytest.approx(20.0, rel=0.2)
    assert point.concurrency == pytest.approx(point.requests_per_s * point.e2e_s, rel=0.2)


def test_goals_bound_the_batch_and_the_file_is_one_that_workers_read(tmp_path: Path) -> None:
    """The chosen batch meets the goals, a larger one would not, and each value has its reason."""
    server = server_of(shape_of(tmp_path, SMALL), "l4", "vllm", "bfloat16", SHARE)
    work = RequestLengths(256, 64)
    free = make_plan(server, work, Goal())
    assert free.batch == free.knee
    assert free.queue is None
    assert 0 < free.utilisation <= 0.95
    goal = Goal(rate_per_s=50.0, ttft_s=0.3, itl_s=free.presets["latency"].itl_s)
    plan = make_plan(server, work, goal)
    assert plan.binds == "itl"
    assert plan.batch < plan.largest_batch
    assert closed_loop(server, work, plan.batch).itl_s <= (goal.itl_s or 0)
    assert plan.queue is not None
    assert plan.queue.utilisation < 1
    file = batching_yaml(plan)
    values = parse(file).values
    assert values["max_num_seqs"] == plan.batch
    assert file.count("# why: ") == len(values) == 5


def test_the_command_writes_points_and_the_same_bytes_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_config(tmp_path, SMALL)
    command = [
        "plan", "--model", str(path), "--device", "l4", "--isl", "64", "--osl", "16",
        "--memory-share", str(SHARE), "--at", "1,8", "--rate", "5", "--price", "0.8",
    ]  # fmt: skip
    outs = []
    for number in range(2):
        out = tmp_path / f"{number}.json"
        assert main([*command, "--json", str(out), "--yaml", str(tmp_path / "b.yaml")]) == 0
        outs.append((capsys.readouterr().out, out.read_bytes()))
    assert outs[0] == outs[1]
    found = json.loads(outs[0][1])
    assert [point["concurrency"] for point in found["points"]] == [1, 8]
    assert {"output_tokens_per_s", "ttft_ms", "itl_ms"} < set(found["points"][0])
    assert set(found["presets"]) == {"throughput", "balanced", "latency"}
    assert found["alternatives"] == sorted(
        found["alternatives"], key=lambda each: -each["output_tokens_per_s"]
    )
    assert parse((tmp_path / "b.yaml").read_text()).values


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (("--device", "t4"), "t4 does not compute bfloat16; it computes float16"),
        (("--isl", "4000", "--osl", "4000"), "the context: 4000 and 4000 tokens are more than"),
        (("--memory-share", "0.01"), "memory: "),
        (("--ttft", "0.001"), "ttft: one sequence alone takes"),
        (("--itl", "0.001"), "itl: one sequence alone takes"),
    ],
)
def test_what_does_not_fit_is_exit_status_1_and_says_what_binds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, ...], reason: str
) -> None:
    path = write_config(tmp_path, SMALL)
    size = ("--isl", "64", "--osl", "16", "--memory-share", str(SHARE))
    assert main(["plan", "--model", str(path), "--device", "l4", *size, *more]) == 1
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"model_type": "nothing"}',
        '{"model_type": "t5"}',
        '{"model_type": "mamba"}',
    ],
)
def test_a_file_that_describes_no_decoder_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    assert main(["plan", "--model", str(path)]) == 1
    assert str(path) in capsys.readouterr().err


def test_devices_and_engines_are_complete() -> None:
    for device in DEVICES.values():
        assert device.memory_bytes > 10e9
        assert device.flops_per_s
    assert all(0 < engine.efficiency <= 1 for engine in ENGINES.values())


def test_a_folder_will_do_and_one_without_a_configuration_is_refused(tmp_path: Path) -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model(**SMALL)
    config.save_pretrained(tmp_path)
    assert read_shape(tmp_path).name == tmp_path.name
    assert main(["plan", "--model", str(tmp_path / "nowhere")]) == 1
