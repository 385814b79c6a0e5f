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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ |= {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"

import msgspec
import numpy as np
import torch
import vllm.platforms
from vllm.platforms.cuda import CudaPlatformBase
from vllm.platforms.interface import DeviceCapability

from contract.jobs import SamplingParams
from workers.engine import sequence as engine_sequence
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
from vllm.sampling_params import SamplingParams as VllmParams  # noqa: E402
from vllm.usage.usage_lib import UsageContext  # noqa: E402
from vllm.v1.executor.multiproc_executor import MultiprocExecutor  # noqa: E402
from vllm.v1.metrics.loggers import StatLoggerBase  # noqa: E402
from vllm.v1.metrics.stats import IterationStats, SchedulerStats  # noqa: E402
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch  # noqa: E402
from vllm.v1.worker.gpu.sample import logit_bias, sampler  # noqa: E402
from vllm.v1.worker.gpu.sample.logits_processor import (  # noqa: E402
    LogitsProcessor,
    build_custom_logits_processors,
    build_custom_logits_processors_params_validator,
)
from vllm.v1.worker.gpu.states import RequestState  # noqa: E402

from workers.engine.grammar import Grammars  # noqa: E402
from workers.engine.interface import Sample  # noqa: E402
from workers.engine.masks import StepMasks  # noqa: E402
from workers.model.sampler import sample  # noqa: E402
from workers.vllm_engine import runner_v2_compat  # noqa: E402
from workers.vllm_engine.hosted import Stats  # noqa: E402
from workers.vllm_engine.load import engine_args, engine_config  # noqa: E402
from workers.vllm_engine.runner_v1_compat import SeededSampling  # noqa: E402
from workers.vllm_engine.sampling import grammars_of, sampling_of  # noqa: E402
from workers.vllm_engine.stages import Stages  # noqa: E402

# Triton's interpreter fails in the kernel.
sampler.apply_top_k_top_p = lambda logits, k, p, **_: apply_top_k_top_p_pytorch(logits, k, p)

_NUM_SLOTS, _NUM_TOKENS, _PROMPT = 8, 20, [40, 41, 42, 41, 43]
_CPU = torch.device("cpu")
_OURS = {
    "model_config.generation_config",
    "model_config.max_logprobs",
    "model_config.skip_tokenizer_init",
    "scheduler_config.policy",
}
_SIZES = ("max_num_batched_tokens", "max_num_seqs", "stream_interval")
_GRAMMAR = '{"grammars": [{"lark_grammar": "start: /[a-f]{4,30}/"}]}'
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0},
    "limits": {"temperature": 1.5, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    "presence": {"temperature": 0.0, "presence_penalty": 1.5},
    "frequency": {"temperature": 0.0, "frequency_penalty": 2.0},
    "penalties": {
        "temperature": 1.0,
        "presence_penalty": 1.5,
        "frequency_penalty": -1.0,
        "repetition_penalty": 1.5,
    },
    "bias": {"temperature": 0.0, "logit_bias": {7: 30.0, 9: -100.0}},
    "least length": {"temperature": 0.0, "min_tokens": 12, "logit_bias": {1: 50.0}},
    "grammar": {"temperature": 1.0, "grammar": _GRAMMAR},
    "greedy grammar": {"temperature": 0.0, "grammar": _GRAMMAR, "frequency_penalty": 1.0},
}


def main(model: str) -> None:
    """Runs each check; raises what fails."""
    options = EngineOptions(model_path=model, max_num_seqs=_NUM_SLOTS, prefix_caching=True)
    config = engine_config(engine_args(options))
    assert config.use_v2_model_runner, "on a GPU vLLM would take its old runner"
    assert not config.model_config.logits_processors
    sampling = sampling_of(config)
    assert sampling.processor is not None
    try:
        build_custom_logits_processors_params_validator([SeededSampling])
    except ValueError:
        pass
    else:
        raise AssertionError("vLLM takes a processor of its old runner: this check is blind")
    validate = build_custom_logits_processors_params_validator([sampling.processor])
    _check_types()
    _check_calls(config)
    _check_sizes(model)
    _check_vectors(model)
    _check_log()
    for number, (kind, params) in enumerate(KINDS.items()):
        _check_resume(kind, _Runner(config, sampling, validate), params, number)
    print(f"vLLM {vllm.__version__}: {len(KINDS)} kinds of jobs resume with the same tokens")


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


class _Runner:
    """vLLM's sampler and its state of requests, driven as its model runner drives them."""

    def __init__(self, config: Any, sampling: Any, validate: Callable[[VllmParams], None]) -> None:
        self.config, self._sampling, self._validate = config, sampling, validate
        self.vocab_size = config.model_config.get_vocab_size()
        self._state = RequestState(_NUM_SLOTS, 256, 512, 0, self.vocab_size, _CPU)
        custom = build_custom_logits_processors(config, self._state, False, (sampling.processor,))
        self._sampler = sampler.Sampler(
            config, _NUM_SLOTS, self.vocab_size, _CPU, self._state, custom_logits_processors=custom
        )
        self._sequences: dict[int, engine_sequence.Sequence] = {}  # by slot

    def add(self, name: str, sequence: engine_sequence.Sequence) -> int:
        """Adds a request as HostedEngine does; returns its slot."""
        asked = VllmParams(
            max_tokens=sequence.params.max_tokens - sequence.num_output,
            stop_token_ids=sorted(sequence.ending_ids),
            ignore_eos=True,
            detokenize=False,
            **self._sampling.arguments(sequence),
        )
        asked.verify(self.config.model_config, None, self.config.structured_outputs_config, None)
        self._validate(asked)
        known = len(sequence.token_ids)
        self._state.add_request(name, known, list(sequence.token_ids), 0, _NUM_TOKENS)
        slot: int = self._state.req_id_to_index[name]
        self._sampler.add_request(slot, asked)
        self._sequences[slot] = sequence
        return slot

    def step(self, slots: Sequence[int], logits: torch.Tensor) -> list[int]:
        """logits (len(slots), vocab_size). Returns the tokens, which it also commits."""
        self._state.apply_staged_writes()
        self._sampler.apply_staged_writes()
        mapping = torch.tensor(slots)
        lengths = np.array([len(self._sequences[slot].token_ids) for slot in slots])
        last_ids = torch.tensor([self._sequences[slot].token_ids[-1] for slot in slots])
        sampled, _ = self._sampler.sample(
            logits.clone(),
            mapping,
            mapping,
            np.array(slots),
            torch.from_numpy(lengths - 1),
            last_ids,
            torch.zeros(len(slots), dtype=torch.int32),
            lengths,
        )
        tokens: list[int] = sampled.view(-1).tolist()
        for slot, length, token_id in zip(slots, lengths.tolist(), tokens, strict=True):
            self._sequences[slot].token_ids.append(token_id)
            self._state.all_token_ids.gpu[slot, length] = token_id
            self._sampler.penalties_state.output_bin_counts[slot, token_id] += 1
        return tokens


def _check_resume(kind: str, runner: _Runner, params: dict[str, Any], number: int) -> None:
    """A choice that starts again after any of its tokens goes on with the same ones, in other slots
    and beside others; greedy ones are those of batchway's own sampler."""
    seeds = np.random.default_rng(number).integers(0, 2**31, size=(256,))
    whole = _sequence(params)
    slot = runner.add("whole", whole)
    ours = _sequence(params)
    grammars = grammars_of(runner.config)
    assert grammars is not None
    for _ in range(_NUM_TOKENS):
        logits = _logits(whole, seeds, runner.vocab_size)
        if params["temperature"] == 0.0:
            expected = _own_token(logits, ours, grammars)
            ours.token_ids.append(expected)
            assert runner.step([slot], logits) == [expected], (kind, whole.num_output)
        else:
            runner.step([slot], logits)
    for cut in random.Random(number).sample(range(1, _NUM_TOKENS), 5):
        resumed = _sequence(params, whole.token_ids[: len(_PROMPT) + cut])
        other = _sequence(KINDS["penalties"])
        slots = [runner.add(f"other-{cut}", other), runner.add(f"cut-{cut}", resumed)]
        for _ in range(_NUM_TOKENS - cut):
            both = [_logits(each, seeds, runner.vocab_size) for each in (other, resumed)]
            runner.step(slots, torch.cat(both))
        assert resumed.token_ids == whole.token_ids, (kind, cut)
        for name in (f"other-{cut}", f"cut-{cut}"):
            runner._state.remove_request(name)


def _sequence(params: dict[str, Any], token_ids: Sequence[int] = ()) -> engine_sequence.Sequence:
    return engine_sequence.Sequence(
        job_id="job",
        epoch=1,
        choice=0,
        tenant="t",
        lane="standard",
        token_ids=list(token_ids) or list(_PROMPT),
        num_prompt=len(_PROMPT),
        params=SamplingParams(max_tokens=_NUM_TOKENS + 1, seed=7, **params),
        ending_ids=frozenset((1,)),
    )


def _logits(sequence: engine_sequence.Sequence, seeds: Any, vocab_size: int) -> torch.Tensor:
    """(1, vocab_size), from the last token and the position; some tokens are often likely."""
    place = len(sequence.token_ids)
    generator = torch.Generator().manual_seed(int(seeds[place]) + sequence.token_ids[-1])
    logits = torch.randn((1, vocab_size), generator=generator)
    logits[0, 68:76] += 3.0
    return logits


def _own_token(logits: torch.Tensor, sequence: engine_sequence.Sequence, grammars: Grammars) -> int:
    masks = None
    if sequence.params.grammar:
        output = sequence.token_ids[sequence.num_prompt :]
        matcher = grammars.matcher(sequence.params.grammar, output)
        grammars.start_masks({matcher: ()})
        assert matcher.mask is not None
        masks = StepMasks({sequence: matcher.mask})
    [found] = sample(logits, [sequence], masks=masks)
    assert isinstance(found, Sample)
    return found.token_id


if __name__ == "__main__":
    main(sys.argv[1])
