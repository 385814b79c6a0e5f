"""Builds a vLLM engine from EngineOptions, and tries its first step. vLLM checks its own arguments
before anything is served."""

import json
import logging
import multiprocessing
import multiprocessing.connection
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

from msgspec.structs import replace
from vllm import EngineArgs, LLMEngine, envs
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from contract.jobs import ResumeKind, SamplingParams, resume_kind
from contract.model_cards import Capabilities, GenerationDefaults
from workers.engine.interface import ModelRefused
from workers.ipc.channel import PeerGone
from workers.ipc.messages import EngineOptions, EngineReady, Request
from workers.ipc.nodes import address_of
from workers.lanes import lanes_of
from workers.model.checkpoint import DEFAULT_REVISION, context_length, parse_config
from workers.model.files import ModelFiles
from workers.model.folder_check import of_each_layer
from workers.model.generation import end_token_ids, sampling_defaults
from workers.model.model_path import least_weight_bytes
from workers.model.nvidia import visible_gpus
from workers.model.tokenizer import read_tokenizer
from workers.vllm_engine.hosted import HostedEngine, Stats
from workers.vllm_engine.images import image_tokens_of
from workers.vllm_engine.sampling import grammars_of, sampling_of
from workers.vllm_engine.stages import Stages
from workers.vllm_engine.start_check import check_memory, check_shm

_NUM_TOKENS = 4
_LOOK_S = 0.5
_GRACE_S = 2.0  # for vLLM to say why its process has ended
_MAX_MESSAGE = 500
_NUM_CHUNKS = 10  # of vLLM's queue of steps (MessageQueue), each of VLLM_MQ_MAX_CHUNK_BYTES_MB
_SIZES = ("max_num_batched_tokens", "max_num_seqs", "stream_interval")


def try_step(engine: HostedEngine, num_most: int, model_path: str) -> None:
    """Runs a request of a few tokens, at most `num_most` with its output. Raises ModelRefused."""
    prompt = tuple(range(min(_NUM_TOKENS, num_most - 1)))
    if not prompt:
        return
    # Samples in each way, so that vLLM's kernels for it are compiled before the first call.
    params = SamplingParams(
        max_tokens=2, seed=0, ignore_eos=True, top_k=2, top_p=0.9, presence_penalty=0.1, logprobs=1
    )

    def compute() -> None:
        engine.add(Request("trial", 0, "trial", "", (prompt,), params, ((),), (False,)))
        while engine.next_wake_s() is not None:
            if failed := engine.step().failed:
                raise RuntimeError(failed[0].message)

    watch_first_step(compute, model_path)


def watch_first_step(compute: Callable[[], object], model_path: str) -> None:
    """Runs `compute` with the first step. Some models load, and that then ends vLLM's core, for
    which `step` waits for ever. Raises ModelRefused, also for what `compute` raises."""
    failures: list[Exception] = []

    def run() -> None:
        try:
            compute()
        except Exception as exc:
            failures.append(exc)

    trial = threading.Thread(target=run, daemon=True)
    trial.start()
    processes = multiprocessing.active_children()
    while trial.is_alive():
        if multiprocessing.connection.wait([each.sentinel for each in processes], _LOOK_S):
            trial.join(_GRACE_S)
            break
    reasons = [line_of(each) for each in failures]
    reasons += [f"{each.name} ended with {each.exitcode}" for each in processes if each.exitcode]
    if reasons:
        raise ModelRefused(
            f"vLLM loads {model_path}, but its first step fails, for the reason in vLLM's lines of "
            f"this log: {'; '.join(reasons)}"
        )


def line_of(exc: BaseException) -> str:
    """Its whole message in one line: the cause is not always in the first line."""
    return " ".join(str(exc).split())[:_MAX_MESSAGE] or type(exc).__name__


log = logging.getLogger("batchway.engine")

_CPU_KV_BYTES = 2**30
_NICENESS = 19  # the lowest priority


def start_vllm(options: EngineOptions, stages: Stages) -> tuple[HostedEngine, EngineReady, int]:
    """Loads a model that generates text into vLLM. Raises ModelRefused, also for an argument that
    vLLM refuses."""
    revision = options.revision or DEFAULT_REVISION
    arguments = engine_args(options)
    give_way()
    tokenizer = read_tokenizer(
        options.model_path,
        revision,
        tool_call_parser=options.tool_call_parser,
        reasoning_parser=options.reasoning_parser,
        template_kwargs=options.chat_template_kwargs,
    )
    stages.progress(f"loading {options.model_path} into vLLM")
    stats: list[Stats] = []

    def make_stats(config: Any, engine_index: int = 0) -> Stats:
        stats.append(Stats(config, engine_index))
        return stats[-1]

    with told_refusal(options.model_path, stages):
        config = engine_config(arguments)
        if config.model_config.is_multimodal_model:  # whose processor tokenises marks of images
            config.model_config.skip_tokenizer_init = False
        sampling = sampling_of(config)
        llm = LLMEngine.from_vllm_config(config, stat_loggers=[make_stats])
    model: Any = config.model_config
    vocab_size: int = model.get_vocab_size()
    files = ModelFiles(options.model_path, revision)
    eos = end_token_ids(files, model.hf_config, tokenizer)
    has_plugin = sampling.processor is not None
    generation = GenerationDefaults()
    if options.generation_config == "auto":
        generation = sampling_defaults(files, vocab_size)
    if not has_plugin:  # they would fail every job
        generation = replace(generation, min_p=None, suppress_tokens=())
    grammars = grammars_of(config) if has_plugin else None
    engine = HostedEngine(
        llm, stats[0], frozenset(eos), sampling.arguments, lanes_of(options.lanes), grammars
    )
    with stages.timed("first step"):
        try_step(engine, min(model.max_model_len, vocab_size), options.model_path)
    num_kv_tokens = engine.num_blocks * engine.block_size
    gpus = visible_gpus()[:1]
    ready = EngineReady(
        context_length=min(model.max_model_len, num_kv_tokens),
        vocab_size=vocab_size,
        eos_token_ids=eos,
        tokenizer=tokenizer,
        num_blocks=engine.num_blocks,
        block_size=engine.block_size,
        max_num_seqs=engine.limits.max_num_seqs,
        capabilities=Capabilities(
            structured_output=grammars is not None,
            resume=resume_of(model) if sampling.keeps_noise else "distribution",
            images=image_tokens_of(llm, tokenizer) if model.is_multimodal_model else None,
        ),
        generation=generation,
        num_step_tokens=engine.limits.max_num_batched_tokens,
        device=gpus[0].name if gpus else "",
        gpu_uuids=tuple(gpu.uuid for gpu in gpus),
    )
    return engine, ready, ready.num_step_tokens


def start_ranks(options: EngineOptions, stages: Stages) -> MultiprocExecutor:
    """Starts the ranks of a node other than node 0, which schedules for them. They end with the
    returned object. Raises ModelRefused."""
    arguments = engine_args(options)
    give_way()
    stages.progress(f"loading {options.model_path} into vLLM on node {options.node_rank}")
    with told_refusal(options.model_path, stages):
        config = engine_config(arguments, headless=True)
        ranks = MultiprocExecutor(config, monitor_workers=False)
    stages.progress(f"node {options.node_rank} has loaded its ranks")
    return ranks


@contextmanager
def told_refusal(model_path: str, stages: Stages) -> Iterator[None]:
    """Within it, what vLLM cannot load raises ModelRefused, with the cause in vLLM's processes if
    they log one."""
    try:
        yield
    except (ModelRefused, PeerGone, MemoryError):
        raise
    except Exception as exc:  # a family that vLLM does not serve as it says
        log.debug("the traceback of the refusal", exc_info=True)
        reason = stages.failure or line_of(exc)
        raise ModelRefused(f"vLLM does not load {model_path}: {reason}") from exc


def engine_config(arguments: EngineArgs, *, headless: bool = False) -> VllmConfig:
    """Returns the configuration that `vllm serve` would have, with our processor, and logs the
    sizes of its steps. Raises ValueError or RuntimeError for what vLLM refuses, and ModelRefused
    for a machine that lacks the room."""
    given = [name for name in _SIZES if getattr(arguments, name) != getattr(EngineArgs, name)]
    config = arguments.create_engine_config(UsageContext.OPENAI_API_SERVER, headless=headless)
    sizes = [getattr(config.scheduler_config, name) for name in _SIZES]
    origins = ["given" if name in given else "vLLM's default" for name in _SIZES]
    is_sampled = config.model_config.runner_type != "pooling"
    if is_sampled and (processor := sampling_of(config).processor) is not None:
        others = config.model_config.logits_processors or []
        config.model_config.logits_processors = [*others, processor]
    log.info("vLLM runs with %s", ", ".join(map("{}={} ({})".format, _SIZES, sizes, origins)))
    _check_start(arguments, config)
    return config


def _check_start(arguments: EngineArgs, config: VllmConfig) -> None:
    """Raises ModelRefused if this machine has no room for its ranks."""
    parallel, model, cache = config.parallel_config, config.model_config, config.cache_config
    check_shm(parallel.world_size, _NUM_CHUNKS * envs.VLLM_MQ_MAX_CHUNK_BYTES_MB * 2**20)
    gpus = visible_gpus()
    # How much less these arguments leave in memory is not known.
    is_known = not (arguments.quantization or arguments.cpu_offload_gb)
    if is_known and current_platform.is_cpu() == (not gpus):
        dtype = str(model.dtype).removeprefix("torch.")
        weight_bytes = least_weight_bytes(model.model, dtype, "none", on_gpu=bool(gpus))
        kv_bytes = cache.kv_cache_memory_bytes or 0
        share = 1.0 if kv_bytes else cache.gpu_memory_utilization
        num_ranks = parallel.world_size // parallel.nnodes
        check_memory(weight_bytes // parallel.world_size, kv_bytes, gpus, num_ranks, share)


def engine_args(
    options: EngineOptions, more: Mapping[str, str] | None = None, **overrides: Any
) -> EngineArgs:
    """Returns our arguments and `more`, then the operator's `--engine-arg`s, read by vLLM's own
    parser. `overrides`: of config.json. Raises ModelRefused with vLLM's sentence if one is unknown
    or out of range."""
    parser = FlexibleArgumentParser()
    EngineArgs.add_cli_args(parser)

    def refuse(message: str) -> NoReturn:
        raise ModelRefused(f"--engine-arg: {message}")

    parser.error = refuse
    overrides |= _lengthened(options)
    ours = {
        "model": options.model_path,
        "revision": options.revision,
        "dtype": _dtype(options.dtype),
        "max_model_len": options.max_model_len,
        "hf_overrides": json.dumps(overrides) if overrides else None,
        "max_num_seqs": options.max_num_seqs,
        "max_num_batched_tokens": options.max_num_batched_tokens,
        "block_size": options.block_size,
        "kv_cache_memory_bytes": options.kv_memory_bytes or default_kv_memory_bytes(),
        "enable_prefix_caching": None if options.prefix_caching else "false",
        "scheduling_policy": "priority",
        "generation_config": "vllm",
        "skip_tokenizer_init": "true",
        "max_logprobs": -1,
        "mm_processor_cache_gb": 0,  # whose halves would differ after a refused image
        "seed": 0,
        **(more or {}),
    }
    if options.memory_share is not None:
        if current_platform.is_cpu():
            raise ModelRefused("vLLM on a CPU takes no memory_share: give --kv-cache-gib")
        ours["gpu_memory_utilization"] = str(options.memory_share)
    if options.nodes > 1:
        host, port = address_of(options.master)
        ours |= {"nnodes": options.nodes, "node_rank": options.node_rank}
        ours |= {"master_addr": host, "master_port": port}
    given = {name: str(value) for name, value in ours.items() if value is not None}
    words = [_word(name, value) for name, value in (given | options.engine_args).items()]
    return EngineArgs.from_cli_args(parser.parse_args(words))


def resume_of(model: Any) -> ResumeKind:
    """`model`: vLLM's ModelConfig."""
    device = "cpu" if current_platform.is_cpu() else "cuda"
    dtype = model.quantization or str(model.dtype).removeprefix("torch.")
    return resume_kind(device, dtype, is_batch_invariant=envs.VLLM_BATCH_INVARIANT)


def _dtype(name: str) -> str:
    """The type by its name. auto: on a CPU as with batchway's own engine; on a GPU vLLM chooses."""
    return "float32" if name == "auto" and current_platform.is_cpu() else name


def _lengthened(options: EngineOptions) -> dict[str, Any]:
    """Overrides that tell vLLM of the positions that yarn makes possible: it assumes that the
    configuration includes them, which is often wrong."""
    try:
        config = parse_config(options.model_path, options.revision or DEFAULT_REVISION)
    except ModelRefused:  # vLLM serves models that batchway's own engine does not
        return {}
    text = config.get_text_config()
    scalings = of_each_layer(getattr(text, "rope_parameters", None))
    length, stated = context_length(config), getattr(text, "max_position_embeddings", None)
    if stated in (None, length) or not any(
        "yarn" in each.get("rope_type", "") for each in scalings
    ):
        return {}
    override: dict[str, Any] = {"max_position_embeddings": length}
    return override if text is config else {"text_config": override}


def give_way() -> None:
    """Lowers the priority on a CPU, where vLLM's processes spin on sched_yield while they wait for
    each other: with two cores, Redis and the gateway did not run for seconds (docs/engines.md)."""
    if current_platform.is_cpu():
        os.nice(_NICENESS)


def default_kv_memory_bytes() -> int | None:
    """The KV cache's size on a CPU, where vLLM takes nine tenths of the machine's memory, or fails
    if others use some. None on a GPU: vLLM's default is kept."""
    return _CPU_KV_BYTES if current_platform.is_cpu() else None


def _word(name: str, value: str) -> str:
    option = name.replace("_", "-")
    match value.lower():
        case "true":
            return f"--{option}"
        case "false":
            return f"--no-{option}"
    return f"--{option}={value}"
