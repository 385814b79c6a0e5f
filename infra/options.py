"""The options of the command line, each defined once.

Imports nothing heavy: `--help` must be instant, and a gateway must never load torch.
Over 300 lines: it is one list.
"""

import argparse
import os
from pathlib import Path
from typing import Any, get_args

from contract.connection import redis_url_of
from infra.computing_options import (
    add_computing_options,
    add_dtype_option,
    add_engine_options,
    add_kv_cache_option,
    add_node_options,
    add_quantization_option,
    node_options,
)
from infra.demo_model import demo_model_path
from infra.generation_options import (
    add_generation_options,
    generation_arguments,
    generation_options,
)
from infra.option_values import (
    device,
    integer,
    lanes,
    model_name,
    namespace,
    number,
    object_store,
    redis_url,
    spot_notice,
)
from workers.ipc.messages import EngineOptions, StrategyName, StrategyOptions
from workers.model.nvidia import VISIBLE_VARIABLE as VISIBLE_VARIABLE
from workers.settings import LANES, WorkerSettings

LIFELINE_GRACE_S = 10.0  # beyond the drain time, after the parent has ended
DEMO_NAME = "demo"
DEFAULT_NAMESPACE = "default"
OF_RUNNING_UP = "that of the running `batchway up`"
NAMESPACE_VARIABLE = "BATCHWAY_NAMESPACE"
OBJECT_STORE_VARIABLE = "BATCHWAY_OBJECT_STORE"
MODELS_VARIABLE = "BATCHWAY_MODELS"
DRAIN_VARIABLE = "BATCHWAY_DRAIN_S"
DRAIN_RELEASE_VARIABLE = "BATCHWAY_DRAIN_RELEASE_S"
SPOT_NOTICE_VARIABLE = "BATCHWAY_SPOT_NOTICE"

_ENGINE = EngineOptions(model_path="")
GATEWAY_DRAIN_S = 20.0
WORKER_DEFAULTS = WorkerSettings(redis_url="", served_model_name="", engine=_ENGINE)
_LOG_LEVELS = ("debug", "info", "warning", "error")
GIB = 2**30


# --- groups of options ------------------------------------------------------------------------


def add_shared_options(parser: argparse.ArgumentParser, *, redis_default: str) -> None:
    """Adds options that all parts of an installation must agree on."""
    parser.add_argument(
        "--redis-url",
        type=redis_url,
        default=redis_url_of(os.environ),
        metavar="URL",
        help=f"Redis 7.0 or later (default: the variable REDIS_URL, else {redis_default})",
    )
    parser.add_argument(
        "--namespace",
        type=namespace,
        default=os.environ.get(NAMESPACE_VARIABLE) or DEFAULT_NAMESPACE,
        metavar="NAME",
        help="separates installations that share one Redis "
        f"(default: the variable {NAMESPACE_VARIABLE}, else default)",
    )
    parser.add_argument(
        "--log-level",
        choices=_LOG_LEVELS,
        default="info",
        help="the lowest level of log lines to show (default: info)",
    )


def add_object_store_option(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument(
        "--object-store",
        type=object_store,
        default=os.environ.get(OBJECT_STORE_VARIABLE) or "",
        metavar="DIR_OR_S3",
        help="where long prompts and results are stored: a directory that gateways and workers "
        f"share, or s3://bucket/prefix (default: the variable {OBJECT_STORE_VARIABLE}, else "
        f"{default})",
    )


def add_models_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--models",
        default=os.environ.get(MODELS_VARIABLE) or "",
        metavar="FILE",
        help="models that consist of others, see docs/flows.md; read again when the file changes "
        f"(default: the variable {MODELS_VARIABLE}, else none)",
    )


def add_address_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="address to listen on; any but loopback needs an API key (default: 127.0.0.1)",
    )
    parser.add_argument(
        "--port",
        type=integer(0, 65535),
        default=8000,
        metavar="N",
        help="port to listen on; 0 chooses a free port and logs it (default: 8000)",
    )


def add_json_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json",
        metavar="OUT",
        help="write the result to this file as JSON, for you alone to read; - writes it to "
        "standard output instead of the table (default: no JSON)",
    )


def add_action(actions: Any, name: str, summary: str) -> argparse.ArgumentParser:
    """Adds an action of an operator's command, with the options that all of them have."""
    parser: argparse.ArgumentParser = actions.add_parser(
        name, help=summary, description=f"{summary[0].upper()}{summary[1:]}."
    )
    add_shared_options(parser, redis_default=OF_RUNNING_UP)
    add_json_option(parser)
    return parser


def add_drain_option(parser: argparse.ArgumentParser, default: float, what: str) -> None:
    parser.add_argument(
        "--drain-s",
        type=number(may_be_zero=True),
        default=os.environ.get(DRAIN_VARIABLE) or str(default),
        metavar="SECONDS",
        help=f"{what} (default: the variable {DRAIN_VARIABLE}, else {default:g} s)",
    )


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Adds the model of a worker and its limits."""
    group = parser.add_argument_group("the model and its limits")
    group.add_argument(
        "--model",
        default=str(demo_model_path()),
        metavar="PATH_OR_HUB_ID",
        help="a folder in Hugging Face layout, or an id on its hub (default: the built-in demo)",
    )
    group.add_argument(
        "--served-model-name",
        type=model_name,
        metavar="NAME",
        help="the name that requests use (default: demo, or the last part of --model)",
    )
    add_dtype_option(group)
    add_quantization_option(group)
    group.add_argument(
        "--device",
        type=device,
        default="auto",
        metavar="DEVICE",
        help="auto, cpu, cuda, or cuda:N for one of several GPUs (default: auto)",
    )
    group.add_argument(
        "--strategy",
        choices=get_args(StrategyName),
        help="how sequences are batched; parameters are in batching.yaml (default: continuous)",
    )
    group.add_argument(
        "--batching",
        type=Path,
        metavar="FILE",
        help="lanes, strategies and limits (default: batching.yaml beside the model)",
    )
    add_computing_options(group)
    add_engine_options(group)
    add_generation_options(group)
    _add_limit_options(group)
    group.add_argument(
        "--auto-truncate",
        action="store_true",
        help="cut prompts that are too long, unless a call says otherwise (default: refuse them)",
    )
    group.add_argument("--engine-module", default=None, help=argparse.SUPPRESS)  # for tests


def _add_limit_options(group: argparse._ArgumentGroup) -> None:
    limits = (
        ("--threads", "CPU threads of each worker (default: as many as its share of the cores)"),
        ("--max-model-len", "tokens of prompt and output together (default: the model's own)"),
        ("--max-num-seqs", f"sequences at a time (default: {_ENGINE.max_num_seqs})"),
        (
            "--max-num-batched-tokens",
            "the token budget of a step (default: chosen for the device)",
        ),
        ("--block-size", "tokens in a block of the KV cache (default: chosen for the device)"),
    )
    for name, text in limits:
        group.add_argument(name, type=integer(1), metavar="N", help=text)
    add_kv_cache_option(group)
    group.add_argument(
        "--memory-share",
        type=number(may_be_zero=False, most=1.0),
        metavar="SHARE",
        help="of the device's memory, for a worker's weights and KV cache; it does not start where "
        "they do not fit (default: what is free)",
    )


def add_up_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--fleet",
        type=Path,
        metavar="FILE",
        help="several models, each with its workers, as docs/configuration.md describes "
        "(default: the one of --model)",
    )
    parser.add_argument(
        "--workers",
        type=integer(1, 64),
        default=1,
        metavar="N",
        help="worker processes, each with the whole model (default: 1)",
    )
    parser.add_argument(
        "--data-dir",
        type=Path,
        metavar="DIR",
        help="where the Redis that batchway starts stores its jobs (default: lost when it ends)",
    )
    parser.add_argument(
        "--durability",
        choices=("fast", "durable"),
        default="fast",
        help="of the Redis that batchway starts: fast writes to disk every second, durable before "
        "each answer, and needs --data-dir (default: fast)",
    )
    parser.add_argument(
        "--redis-memory-gib",
        type=number(may_be_zero=False),
        metavar="GIB",
        help="memory that the Redis that batchway starts may use, in GiB (default: 1, or a quarter "
        "of the machine's where that is less)",
    )


def add_lanes_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--lanes",
        type=lanes,
        default=LANES,
        metavar="NAMES",
        help=f"lanes to take jobs from, most urgent first (default: {','.join(LANES)})",
    )


def add_worker_options(parser: argparse.ArgumentParser) -> None:
    add_lanes_option(parser)
    parser.add_argument(
        "--lease-s",
        type=number(may_be_zero=False),
        default=WORKER_DEFAULTS.lease_s,
        metavar="SECONDS",
        help="a worker without a heartbeat for this time loses its jobs "
        f"(default: {WORKER_DEFAULTS.lease_s:g} s)",
    )
    parser.add_argument(
        "--step-timeout-s",
        type=number(may_be_zero=False),
        default=WORKER_DEFAULTS.step_timeout_s,
        metavar="SECONDS",
        help="an engine that has work but ends no step for this time is restarted "
        f"(default: {WORKER_DEFAULTS.step_timeout_s:g} s)",
    )
    parser.add_argument(
        "--drain-release-s",
        type=number(may_be_zero=True),
        default=os.environ.get(DRAIN_RELEASE_VARIABLE) or str(WORKER_DEFAULTS.drain_release_s),
        metavar="SECONDS",
        help="running jobs are given back this long before the end of --drain-s, or after two "
        f"thirds of it (default: the variable {DRAIN_RELEASE_VARIABLE}, else "
        f"{WORKER_DEFAULTS.drain_release_s:g} s)",
    )
    parser.add_argument(
        "--metrics-port",
        type=integer(1, 65535),
        metavar="N",
        help="port on loopback of this worker's own page of metrics, /metrics (default: none)",
    )
    add_node_options(parser)
    parser.add_argument(
        "--spot-notice",
        type=spot_notice,
        default=os.environ.get(SPOT_NOTICE_VARIABLE) or "",
        metavar="FILE_OR_URL",
        help="the worker drains once this file exists, or this http:// address answers 200 "
        f"(default: the variable {SPOT_NOTICE_VARIABLE}, else none)",
    )


# --- what the options mean --------------------------------------------------------------------


def served_name(options: argparse.Namespace) -> str:
    """The model's name in requests. Raises argparse.ArgumentTypeError."""
    if options.served_model_name is not None:
        return str(options.served_model_name)
    if Path(options.model) == demo_model_path():
        return DEMO_NAME
    return model_name(Path(options.model).name or options.model)


def choose_gpu(options: argparse.Namespace) -> None:
    """Shows this process and its children only the GPU of `--device cuda:N`, the N-th of those that
    it sees. Call it before torch is imported. Raises argparse.ArgumentTypeError."""
    _, _, number = options.device.partition(":")
    if number:
        os.environ[VISIBLE_VARIABLE] = visible_gpu(int(number), os.environ.get(VISIBLE_VARIABLE))


def visible_gpu(number: int, visible: str | None) -> str:
    """The id of the N-th GPU of CUDA_VISIBLE_DEVICES. Raises argparse.ArgumentTypeError."""
    if visible is None:
        return str(number)
    ids = [each for each in visible.split(",") if each.strip()]
    if number >= len(ids):
        raise argparse.ArgumentTypeError(
            f"--device cuda:{number}: {VISIBLE_VARIABLE} shows only {len(ids)}"
        )
    return ids[number].strip()


def engine_options(options: argparse.Namespace) -> EngineOptions:
    """The engine's options; those not given keep the engine's defaults."""
    given = {
        "block_size": options.block_size,
        "max_model_len": options.max_model_len,
        "max_num_seqs": options.max_num_seqs,
        "max_num_batched_tokens": options.max_num_batched_tokens,
        "num_threads": options.threads,
        "strategy": options.strategy and StrategyOptions(name=options.strategy),
        "kv_memory_bytes": options.kv_cache_gib and int(options.kv_cache_gib * GIB),
    }
    return EngineOptions(
        model_path=options.model,
        dtype=options.dtype,
        quantization=options.quantization,
        device=options.device.partition(":")[0],
        memory_share=options.memory_share,
        attention=options.attention,
        fused=not options.torch_only,
        engine_args=dict(options.engine_arg),
        **node_options(options),
        **generation_options(options),
        **{name: value for name, value in given.items() if value is not None},
    )


def model_arguments(options: argparse.Namespace) -> tuple[str, ...]:
    """The model options, as arguments of a worker."""
    names = (
        "model", "dtype", "quantization", "device", "threads", "max_model_len", "max_num_seqs",
        "max_num_batched_tokens", "block_size", "kv_cache_gib", "memory_share", "strategy",
        "batching", "attention", "engine_module",
    )  # fmt: skip
    pairs = [(name, getattr(options, name)) for name in names]
    pairs.append(("served_model_name", served_name(options)))
    given = [f"--{name.replace('_', '-')}={value}" for name, value in pairs if value is not None]
    given += ["--torch-only"] * options.torch_only
    given += ["--auto-truncate"] * options.auto_truncate
    given += generation_arguments(options)
    given += [f"--engine={options.engine}"]
    given += [f"--engine-arg={name}={value}" for name, value in options.engine_arg]
    if options.engine_python:
        given += [f"--engine-python={options.engine_python}"]
    return tuple(given)
