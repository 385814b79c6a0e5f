"""What a model's files say holds on vLLM as on batchway's own engine; a model that cannot compute
there is refused at load."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from contract.model_cards import GenerationDefaults
from infra.demo_model import demo_model_path
from tests.nvidia_smi import ROWS, fake_gpus
from tests.tiny_models import EOS_ID, edit_json, save_tiny_model
from tests.workers.model.driver import make_sequence, run_to_end
from tests.workers.vllm_engine.driven import job, refusal_of, running
from workers.ipc.messages import EngineOptions, EngineReady
from workers.model.loader import load_model

pytestmark = [pytest.mark.anyio, pytest.mark.campaign]

PROMPT = tuple(range(5, 105))


def options_of_auto(folder: Path) -> EngineOptions:
    """Type and length are left to the model; not compiled, which takes minutes."""
    return EngineOptions(
        model_path=str(folder), max_num_seqs=4, engine_args={"enforce_eager": "true"}
    )


async def test_settings_end_tokens_type_and_length_are_those_of_our_own_engine(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """With yarn beyond the configured positions, and everything left to `auto`. min_tokens bans
    each end token."""
    folder = save_tiny_model(
        "qwen2",
        tmp_path,
        hidden_size=128,  # heads of 32, the least on a CPU
        max_position_embeddings=64,
        rope_parameters={
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "rope_theta": 10000.0,
        },
    )
    settings = {"temperature": 0.6, "top_k": 20, "suppress_tokens": [9]}
    edit_json(folder / "generation_config.json", **settings, eos_token_id=[EOS_ID, 20])
    edit_json(folder / "tokenizer_config.json", eos_token="#")
    options = EngineOptions(model_path=str(folder), max_num_seqs=4, device="cpu")
    own = load_model(options, lambda text: None)
    [expected] = run_to_end(own.model, [make_sequence(PROMPT, max_tokens=24)], 1000)
    ends = tuple(set(own.eos_token_ids))
    bias = dict.fromkeys(ends, 50.0)
    async with running(options_of_auto(folder)) as engine:
        [ready] = engine.of(EngineReady)
        found = await engine.run(
            job("greedy", prompt=PROMPT, temperature=0.0),
            job("ends", prompt=PROMPT, temperature=0.0, ignore_eos=False, logit_bias=bias),
            job("later", ignore_eos=False, min_tokens=9, max_tokens=12, logit_bias=bias),
        )

    sizes = (
        f"max_num_batched_tokens={ready.num_step_tokens} (vLLM's default), max_num_seqs=4 (given)"
    )
    assert f"{sizes}, stream_interval=1 (vLLM's default)" in capfd.readouterr().err
    assert ready.max_num_seqs == 4
    assert ready.num_step_tokens > 256
    assert ready.context_length == own.context_length == 256
    assert ready.eos_token_ids == own.eos_token_ids == (EOS_ID, 6, 20)
    assert ready.generation == own.generation
    assert own.generation == GenerationDefaults(temperature=0.6, top_k=20, suppress_tokens=(9,))
    assert found["greedy", 0] == expected
    assert len(found["ends", 0]) == 1
    assert found["ends", 0][0] in ends
    assert not set(found["later", 0][:9]) & set(ends)
    assert found["later", 0][9] in ends


async def test_a_model_whose_first_step_fails_is_refused(tmp_path: Path) -> None:
    """Heads of 16, which vLLM's build for CPUs loads and cannot compute."""
    folder = save_tiny_model("llama", tmp_path)

    assert "its first step fails" in await refusal_of(options_of_auto(folder))


async def test_a_build_for_cpus_is_refused_on_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would compute on the CPU in silence. The sentence has the cause and what helps."""
    fake_gpus(tmp_path, monkeypatch, ROWS[0])

    refusal = await refusal_of(EngineOptions(model_path=str(demo_model_path())))

    assert "nvidia-smi sees NVIDIA A100-SXM4-80GB, but torch cannot use it" in refusal
    assert "built without CUDA" in refusal
    assert "scripts/setup-vllm, or give --device cpu" in refusal


@pytest.mark.parametrize(
    ("arguments", "kv_memory_bytes", "reason"),
    [
        ({}, 2**50, "and 1.05e+06 GiB for its KV cache, and this machine has "),
        ({"tensor_parallel_size": "2"}, None, "the messages between 2 ranks of vLLM may take "),
    ],
)
async def test_a_start_without_room_is_refused_before_weights_are_read(
    arguments: dict[str, str],
    kv_memory_bytes: int | None,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the machine's memory, or in /dev/shm, here for messages of a million MiB."""
    monkeypatch.setenv("VLLM_MQ_MAX_CHUNK_BYTES_MB", "1000000")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    options = options_of_auto(demo_model_path())
    engine_args = {**options.engine_args, **arguments}

    refusal = await refusal_of(
        replace(options, kv_memory_bytes=kv_memory_bytes, engine_args=engine_args)
    )

    assert reason in refusal
    assert "vLLM does not load" not in refusal
