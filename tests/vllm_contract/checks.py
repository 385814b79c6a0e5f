"""What batchway uses of vLLM, tried on the sources of vLLM's GPU build, without a GPU.

`python -m tests.vllm_contract.checks MODEL`, by an interpreter that finds those sources; run by
`scripts/vllm-contract`. Triton's interpreter runs vLLM's sampler on the CPU; a stand-in for an H100
makes vLLM configure itself as on one.
"""

import inspect
import json
import os
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ |= {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"

import msgspec
import vllm.platforms
from vllm.platforms.cuda import CudaPlatformBase
from vllm.platforms.interface import DeviceCapability

from workers.ipc.messages import EngineOptions


class _Hopper(CudaPlatformBase):  # type: ignore[misc]  # vLLM is not installed here
    """What vLLM asks a device while it makes its configuration."""

    get_device_capability = classmethod(lambda cls, device_id=0: DeviceCapability(9, 0))
    has_device_capability = classmethod(lambda cls, capability, device_id=0: True)
    get_device_name = classmethod(lambda cls, device_id=0: "NVIDIA H100")
    get_device_total_memory = classmethod(lambda cls, device_id=0: 80 * 2**30)
    is_fully_connected = classmethod(lambda cls, physical_device_ids: True)
    num_compute_units = classmethod(lambda cls, device_id=0: 132)
    log_warnings = classmethod(lambda cls: None)


vllm.platforms._current_platform = _Hopper()

import vllm.v1.worker.cpu.shm  # noqa: E402  its stand-ins for pinned memory
from vllm import AsyncEngineArgs, LLMEngine, PoolingParams  # noqa: E402
from vllm.entrypoints.pooling.scoring.utils import compress_token_type_ids  # noqa: E402
from vllm.logger import DEFAULT_LOGGING_CONFIG  # noqa: E402
from vllm.model_executor.model_loader import get_model_cls  # noqa: E402
from vllm.model_executor.models.interfaces import SupportsMultiModal  # noqa: E402
from vllm.multimodal.image import convert_image_mode  # noqa: E402
from vllm.renderers import BaseRenderer  # noqa: E402
from vllm.sampling_params import SamplingParams as VllmParams  # noqa: E402
from vllm.usage.usage_lib import UsageContext  # noqa: E402
from vllm.v1.executor.multiproc_executor import MultiprocExecutor  # noqa: E402
from vllm.v1.metrics.loggers import StatLoggerBase  # noqa: E402
from vllm.v1.metrics.stats import IterationStats, SchedulerStats  # noqa: E402
from vllm.v1.worker.gpu.sample import logit_bias  # noqa: E402
from vllm.v1.worker.gpu.sample.logits_processor import (  # noqa: E402
    LogitsProcessor,
    build_custom_logits_processors_params_validator,
)

from tests.vllm_contract.drafts import check_drafts  # noqa: E402
from tests.vllm_contract.runner import NUM_SLOTS, Runner  # noqa: E402
from tests.vllm_contract.sequences import (  # noqa: E402
    KINDS,
    NUM_TOKENS,
    PROMPT,
    Scores,
    own_token,
    sequence_of,
)
from workers.vllm_engine import runner_v2_compat  # noqa: E402
from workers.vllm_engine.hosted import Stats  # noqa: E402
from workers.vllm_engine.load import engine_args, engine_config  # noqa: E402
from workers.vllm_engine.runner_v1_compat import SeededSampling  # noqa: E402
from workers.vllm_engine.sampling import grammars_of, sampling_of  # noqa: E402
from workers.vllm_engine.stages import Stages  # noqa: E402

_OURS = {
    "model_config.generation_config",
    "model_config.logits_processors",
    "model_config.max_logprobs",
    "model_config.skip_tokenizer_init",
    "scheduler_config.policy",
}
_SIZES = ("max_num_batched_tokens", "max_num_seqs", "stream_interval")


def main(model: str) -> None:
    """Runs each check; raises what fails."""
    options = EngineOptions(model_path=model, max_num_seqs=NUM_SLOTS, prefix_caching=True)
    config = engine_config(engine_args(options))
    assert config.use_v2_model_runner, "on a GPU vLLM would take its old runner"
    sampling = sampling_of(config)
    assert config.model_config.logits_processors == [sampling.processor]
    try:
        build_custom_logits_processors_params_validator([SeededSampling])
    except ValueError:
        pass
    else:
        raise AssertionError("vLLM takes a processor of its old runner: this check is blind")
    _check_types()
    _check_calls(config)
    _check_sizes(model)
    _check_vectors(model)
    _check_log()
    for number, (kind, params) in enumerate(KINDS.items()):
        _check_resume(kind, Runner(config, sampling), params, number)
    print(f"vLLM {vllm.__version__}: {len(KINDS)} kinds of jobs resume with the same tokens")
    check_drafts(model)


def _check_types() -> None:
    """Our subclasses override what is there, with the parameters that vLLM passes."""
    for ours, theirs in (
        (runner_v2_compat.CountedOutput, LogitsProcessor),
        (Stats, StatLoggerBase),
    ):
        for name, method in vars(ours).items():
            if inspect.isfunction(method) and not name.startswith("_") and name != "take":
                own = list(inspect.signature(method).parameters)
                given = list(inspect.signature(getattr(theirs, name)).parameters)
                assert own == given, (ours, name, own, given)
        assert not inspect.isabstract(ours), ours
    assert logit_bias.MAX_NUM_LOGIT_BIAS_TOKENS == runner_v2_compat.MAX_BIASES
    assert logit_bias.MAX_NUM_STOP_TOKEN_IDS == runner_v2_compat.MAX_ENDING_IDS


def _check_calls(config: Any) -> None:
    """vLLM's methods take the arguments of our calls, and its records have the fields we read."""
    for method, args, kwargs in (
        (LLMEngine.from_vllm_config, (config,), {"stat_loggers": []}),
        (LLMEngine.add_request, (None, "id", {}, VllmParams()), {"priority": 0}),
        (LLMEngine.abort_request, (None, ["id"]), {}),
        (LLMEngine.step, (None,), {}),
        (BaseRenderer.render_cmpl, (None, [{}]), {}),
        (SupportsMultiModal.get_placeholder_str, ("image", 1), {}),
        (get_model_cls, (config.model_config,), {}),
        (convert_image_mode, (None, "RGB"), {}),
        (MultiprocExecutor, (config,), {"monitor_workers": False}),
    ):
        inspect.signature(method).bind(*args, **kwargs)
    stats = Stats(config)
    stats.record(scheduler_stats=SchedulerStats(), iteration_stats=IterationStats())


def _check_sizes(model: str) -> None:
    """What the operator does not give is as in `vllm serve`, on each node."""
    served = AsyncEngineArgs(model=model).create_engine_config(UsageContext.OPENAI_API_SERVER)
    plain = EngineOptions(model_path=model)
    sizes = {name: getattr(served.scheduler_config, name) for name in _SIZES}
    assert sizes == {"max_num_batched_tokens": 8192, "max_num_seqs": 1024, "stream_interval": 1}
    for is_headless in (False, True):
        config = engine_config(engine_args(plain), headless=is_headless)
        assert set(_differences(served, config)) == _OURS
        assert config.scheduler_config.async_scheduling
    for given, expected in (
        ({"max_num_seqs": 256}, {"max_num_seqs": 256}),
        ({"max_num_batched_tokens": 1000}, {"max_num_batched_tokens": 1000, "max_num_seqs": 1000}),
        ({"max_num_seqs": 256, "engine_args": {"max-num-seqs": "99"}}, {"max_num_seqs": 99}),
        ({"engine_args": {"stream_interval": "4"}}, {"stream_interval": 4}),
    ):
        options = msgspec.structs.replace(plain, **given)
        found = engine_config(engine_args(options)).scheduler_config
        assert {name: getattr(found, name) for name in _SIZES} == sizes | expected, given
    forgetful = engine_config(engine_args(msgspec.structs.replace(plain, prefix_caching=False)))
    assert not forgetful.cache_config.enable_prefix_caching


def _check_vectors(model: str) -> None:
    """vLLM pools as it is told, and takes the requests for vectors."""
    pooler = {"use_activation": False, "seq_pooling_type": "MEAN"}
    arguments = {"runner": "pooling", "pooler_config": json.dumps(pooler)}
    options = EngineOptions(model_path=model, prefix_caching=False)
    config = engine_config(engine_args(options, arguments))
    found = config.model_config.pooler_config
    assert {name: getattr(found, name) for name in pooler} == pooler
    assert not config.cache_config.enable_prefix_caching
    for task in ("embed", "classify"):
        params = PoolingParams(task=task, use_activation=False)
        params.extra_kwargs = {"compressed_token_type_ids": compress_token_type_ids([0, 1])}
        params.verify(config.model_config)
        inspect.signature(LLMEngine.add_request).bind(None, "id", {}, params)
        assert params.use_activation is False


def _check_log() -> None:
    """vLLM's processes log as `Stages` expects it."""
    logger = DEFAULT_LOGGING_CONFIG["loggers"]["vllm"]
    assert {"handlers", "level"} <= logger.keys() <= {"handlers", "level", "propagate"}
    for stage, file in (
        ("weights", "model_executor/model_loader/default_loader.py"),
        ("compile", "compilation/monitor.py"),
        ("compile", "compilation/decorators.py"),
        ("graphs", "v1/worker/gpu/model_runner.py"),
        ("graphs", "v1/worker/gpu_model_runner.py"),
    ):
        source = Path(vllm.__file__).parent.joinpath(file).read_text()
        source = re.sub(r'"\s*\n\s*"', "", source)  # a text in several lines
        told: list[str] = []
        stages = Stages(told.append)
        for text in re.findall(r'"(.*(?:took|finished in).*)"', source):
            stages.take(re.sub(r"%[.\d]*[fs]", "1.0", text.removeprefix("%s")), 0.0)
        assert f"{stage}: 1.0 s" in told, (stage, file)


def _differences(one: Any, other: Any) -> Iterator[str]:
    """The fields of two configurations, and of their parts, that differ."""
    for name, value in vars(one).items():
        if name.endswith("_config") and hasattr(value, "__dict__"):
            fields = vars(getattr(other, name))
            yield from (f"{name}.{n}" for n, v in vars(value).items() if repr(v) != repr(fields[n]))
        elif name != "instance_id" and repr(value) != repr(getattr(other, name)):
            yield name


def _check_resume(kind: str, runner: Runner, params: dict[str, Any], number: int) -> None:
    """A choice that starts again after any of its tokens goes on with the same ones, in other slots
    and beside others; greedy ones are those of batchway's own sampler."""
    scores = Scores(number, runner.vocab_size)
    whole = sequence_of(params)
    slot = runner.add("whole", whole)
    grammars = grammars_of(runner.config)
    assert grammars is not None
    for _ in range(NUM_TOKENS):
        expected = own_token(scores(whole), whole, grammars)
        [token_id] = runner.step([slot], scores)[slot]
        assert params["temperature"] or token_id == expected, (kind, whole.num_output)
    for cut in random.Random(number).sample(range(1, NUM_TOKENS), 5):
        resumed = sequence_of(params, whole.token_ids[: len(PROMPT) + cut])
        other = sequence_of(KINDS["penalties"])
        slots = [runner.add(f"other-{cut}", other), runner.add(f"cut-{cut}", resumed)]
        for _ in range(NUM_TOKENS - cut):
            runner.step(slots, scores)
        assert resumed.token_ids == whole.token_ids, (kind, cut)
        for name in (f"other-{cut}", f"cut-{cut}"):
            runner.remove(name)


if __name__ == "__main__":
    main(sys.argv[1])
