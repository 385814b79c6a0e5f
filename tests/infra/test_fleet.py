"""`fleet.yaml`: what is accepted, what is refused and by which words, and shares of the memory."""

import argparse
import os
import shutil
from pathlib import Path

import pytest

from infra import fleet
from infra.demo_model import demo_model_path
from infra.fleet import (
    FleetEntry,
    fleet_of,
    read_fleet,
    share_memory,
    worker_arguments,
    worker_names,
)
from infra.options import VISIBLE_VARIABLE, choose_gpu, engine_options, visible_gpu
from infra.parser import build_parser
from infra.preconditions import UsageError
from tests.infra.command_line import call_cli
from tests.infra.test_cli import parse

ROOT = Path(__file__).resolve().parents[2]
GIB = 2**30
NUM_DEMO = 1_018_240  # parameters of the demo model


def read(tmp_path: Path, text: str, *given: str) -> tuple[FleetEntry, ...]:
    file = tmp_path / "fleet.yaml"
    file.write_text(text)
    return read_fleet(file, parse("up", *given))


def two(first: str, second: str) -> str:
    """A file with two entries of the demo model and these further fields."""
    return (
        f"models:\n- {{model: demo, served_model_name: a, {first}}}\n"
        f"- {{model: demo, served_model_name: b, {second}}}\n"
    )


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine seems to have two GPUs of 80 GiB."""
    monkeypatch.delenv(VISIBLE_VARIABLE, raising=False)
    sizes = {"0": 80 * GIB, "1": 80 * GIB}
    monkeypatch.setattr(fleet, "_gpu_bytes", sizes.get)


@pytest.fixture
def small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine seems to have 10 MB of memory and no GPU."""
    monkeypatch.setattr(fleet, "total_cpu_bytes", lambda: 10_000_000)
    monkeypatch.setattr(fleet, "_gpu_bytes", lambda _: None)


def test_the_example_loads() -> None:
    """With a worker of each of its two models."""
    entries = read_fleet(ROOT / "examples" / "fleet.yaml", parse("up"))
    assert [name for name, _ in worker_names(entries)] == ["chat-1", "bulk-1"]
    share_memory(entries)


def test_fields_become_options_of_the_worker(tmp_path: Path) -> None:
    """By their names. What an entry leaves out is as given to `up`."""
    text = (
        "models:\n- model: demo\n  lanes: [batch, standard]\n  torch_only: true\n"
        "  max_num_seqs: 8\n  device: cuda:1\n  memory_share: 0.4\n  count: 2\n"
    )
    [entry] = read(tmp_path, text, "--kv-cache-gib=0.5", "--max-num-seqs=9")
    worker = build_parser().parse_args(["worker", *worker_arguments(entry)])
    assert (worker.lanes, worker.torch_only) == (("batch", "standard"), True)
    engine = engine_options(worker)
    assert (engine.device, engine.max_num_seqs, engine.memory_share) == ("cuda", 8, 0.4)
    assert engine.kv_memory_bytes == GIB // 2
    assert [name for name, _ in worker_names([entry])] == ["worker-1", "worker-2"]


@pytest.mark.parametrize(
    "written",
    ["{enable_thinking: false, a: [1, null]}", '\'{"enable_thinking":false,"a":[1,null]}\''],
)
def test_template_variables_are_a_mapping_or_json(tmp_path: Path, written: str) -> None:
    text = (
        f"models:\n- model: demo\n  default_chat_template_kwargs: {written}\n"
        "  generation_config: none\n  tool_call_parser: hermes\n"
    )
    [entry] = read(tmp_path, text, "--reasoning-parser=qwen3")
    engine = engine_options(build_parser().parse_args(["worker", *worker_arguments(entry)]))
    assert engine.chat_template_kwargs == {"enable_thinking": False, "a": [1, None]}
    assert (engine.generation_config, engine.tool_call_parser) == ("none", "hermes")
    assert engine.reasoning_parser == "qwen3"


def test_one_model_is_a_fleet_of_one_entry() -> None:
    """The workers of `up --model` have the arguments of such an entry."""
    [entry] = fleet_of(parse("up", "--workers=3", "--dtype=bfloat16"))
    assert (entry.served_model_name, entry.count) == ("demo", 3)
    assert "--dtype=bfloat16" in worker_arguments(entry)


def test_an_entry_may_be_the_candidate_of_an_a_b(tmp_path: Path) -> None:
    """Beside one of the same name without it; the file is checked at once."""
    candidate = tmp_path / "candidate.yaml"
    candidate.write_text("strategy: {name: static, batch_size: 8, window_s: 0.2}\n")
    more = f"candidate: {candidate}, candidate_share: 0.25"
    text = f"models:\n- {{model: demo, count: 3}}\n- {{model: demo, {more}}}\n"
    control, other = read(tmp_path, text)
    assert control.candidate == ()
    worker = build_parser().parse_args(["worker", *worker_arguments(other)])
    assert (worker.candidate, worker.candidate_share) == (candidate, 0.25)
    assert [entry.served_model_name for entry in (control, other)] == ["demo", "demo"]
    candidate.write_text("strategy: {name: nothing}\n")
    with pytest.raises(UsageError, match=r"entry 2 \(demo\): .*candidate.yaml"):
        read(tmp_path, text)
    with pytest.raises(UsageError, match=r"entry 1 .*candidate-share needs --candidate"):
        read(tmp_path, "models:\n- {model: demo, candidate_share: 0.5}\n")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("models: [", "fleet.yaml:1: not YAML"),
        ("[]", "must be a mapping with the one key `models`"),
        ("models: []", "models: must be a list with at least one entry"),
        ("models: [3]", "entry 1: must be a mapping"),
        ("models:\n- {count: 2}", "entry 1: model: is required"),
        ("models:\n- {model: demo, lane: a}", "entry 1 (demo): lane: unknown field; did you mean"),
        ("models:\n- {model: demo, port: 1}", "entry 1 (demo): port: unknown field"),
        ("models:\n- {model: demo, lanes: [fast]}", "lanes: must be different names out of"),
        ("models:\n- {model: demo, count: 0}", "count: must be 1 to 64, not '0'"),
        ("models:\n- {model: demo, count: }", "count: has no value"),
        ("models:\n- {model: demo, memory_share: 2}", "memory_share: must be a number over 0"),
        ("models:\n- {model: demo, max_num_seqs: x}", "max_num_seqs: must be an integer"),
        ("models:\n- {model: demo, device: tpu}", "device: must be auto, cpu, cuda or cuda:N"),
        ("models:\n- {model: demo, generation_config: vllm}", "generation_config: invalid choice"),
        (
            "models:\n- {model: demo, default_chat_template_kwargs: [a]}",
            "default_chat_template_kwargs: must be a JSON object",
        ),
        ("models:\n- {model: demo, engine_arg: {a: 1}}", "engine-arg needs --engine vllm"),
        ("models:\n- {model: demo}\n- {model: /no/such}", "entry 2 (/no/such): model: there is no"),
    ],
)
def test_errors_name_the_entry_and_the_field(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(UsageError) as refused:
        read(tmp_path, text)
    assert complaint in str(refused.value)


def test_a_name_stands_for_one_model_and_its_lanes(tmp_path: Path, tiny_folder: Path) -> None:
    """Otherwise a caller would get the answer of either model."""
    same = f"models:\n- {{model: demo}}\n- {{model: {tiny_folder}, served_model_name: demo}}\n"
    with pytest.raises(UsageError, match=r"entry 2 \(demo\): model: differs from that of .*1"):
        read(tmp_path, same)
    with pytest.raises(UsageError, match=r"entry 2 \(demo\): lanes: differs"):
        read(tmp_path, "models:\n- {model: demo}\n- {model: demo, lanes: [batch]}\n")
    with pytest.raises(UsageError, match=r"entry 2 \(demo\): generation_config: differs"):
        read(tmp_path, "models:\n- {model: demo}\n- {model: demo, generation_config: none}\n")


@pytest.fixture
def tiny_folder(tmp_path: Path) -> Path:
    """Another model's folder."""
    folder = tmp_path / "tiny"
    shutil.copytree(demo_model_path(), folder)
    return folder


@pytest.mark.parametrize("given", ["--model=m", "--served-model-name=m", "--workers=2"])
def test_options_that_entries_give_are_refused_beside_a_fleet(given: str) -> None:
    with pytest.raises(UsageError, match="cannot be combined with --fleet"):
        fleet_of(parse("up", "--fleet=fleet.yaml", given))


# --- memory -----------------------------------------------------------------------------------


def test_shares_of_a_device_add_up_to_at_most_one(tmp_path: Path, gpus: None) -> None:
    """Counted for each worker and each GPU."""
    fits = two("device: cuda, memory_share: 0.3, count: 2", "device: cuda:1, memory_share: 0.6")
    share_memory(read(tmp_path, fits))
    both = two("device: cuda, memory_share: 0.3, count: 2", "device: cuda:0, memory_share: 0.6")
    with pytest.raises(UsageError) as refused:
        share_memory(read(tmp_path, both))
    assert "entry 2 (b): memory_share: the shares of GPU 0 add up to 1.2" in str(refused.value)
    assert "2 × 0.3 of 'a', 1 × 0.6 of 'b'" in str(refused.value)


def test_workers_without_a_share_divide_the_rest_of_a_gpu(tmp_path: Path, gpus: None) -> None:
    """A single worker takes what is free, as ever."""
    a, b = read(tmp_path, two("device: cuda, memory_share: 0.4", "device: cuda, count: 3"))
    share_memory([a, b])
    assert (a.options.memory_share, b.options.memory_share) == (0.4, 0.2)
    [alone] = read(tmp_path, "models: [{model: demo, device: cuda}]")
    share_memory([alone])
    assert alone.options.memory_share is None
    with pytest.raises(UsageError, match="leaves others nothing"):
        share_memory(read(tmp_path, two("device: cuda, memory_share: 1", "device: cuda")))


def test_weights_over_their_share_are_refused_with_figures(
    tmp_path: Path, small_machine: None
) -> None:
    """By the headers of their files: the demo model's 1,018,240 weights need 4 bytes each on a
    processor, 2 as bfloat16, 1 as int8."""
    for share, fields, fits in (
        (4 * NUM_DEMO / 1e7 + 0.001, "", True),
        (4 * NUM_DEMO / 1e7 - 0.001, "", False),
        (2 * NUM_DEMO / 1e7 + 0.001, ", dtype: bfloat16", True),
        (1 * NUM_DEMO / 1e7 + 0.001, ", quantization: int8", True),
    ):
        entries = read(tmp_path, f"models: [{{model: demo, memory_share: {share}{fields}}}]")
        if fits:
            share_memory(entries)
            continue
        with pytest.raises(UsageError) as refused:
            share_memory(entries)
        assert "the weights of 'demo' need 0.00379 GiB, a share of 0.407" in str(refused.value)


def test_weights_without_shares_must_fit_together(tmp_path: Path, small_machine: None) -> None:
    share_memory(read(tmp_path, "models: [{model: demo, count: 2}]"))
    with pytest.raises(UsageError, match="without a memory_share, but their weights need"):
        share_memory(read(tmp_path, "models: [{model: demo, count: 3}]"))


def test_a_refused_fleet_starts_nothing(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(two("memory_share: 0.7, device: cpu", "memory_share: 0.7, device: cpu"))
    done = call_cli("up", "--port=0", "--fleet", str(file))
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert "the shares of cpu add up to 1.4" in line


# --- GPUs -------------------------------------------------------------------------------------


def test_a_gpu_is_counted_among_the_visible_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker shows its engine only that one."""
    assert (visible_gpu(1, None), visible_gpu(1, "4, 6")) == ("1", "6")
    with pytest.raises(argparse.ArgumentTypeError, match="CUDA_VISIBLE_DEVICES shows only 2"):
        visible_gpu(2, "4,6")
    monkeypatch.setenv(VISIBLE_VARIABLE, "4,6")
    choose_gpu(parse("worker", "--device=cuda:1"))
    assert os.environ[VISIBLE_VARIABLE] == "6"
