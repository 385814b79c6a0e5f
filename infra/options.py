"""The options of the command line, each declared once: argparse's option, its help, docs/options.md
and the engine's options come from here.

Imports nothing heavy: `--help` must be instant, and a gateway must never load torch.
"""

import argparse
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, get_args

import msgspec

from contract.connection import redis_url_of
from contract.partitions import MAX_PARTITIONS
from infra.demo_model import demo_model_path
from infra.option_values import (
    device,
    engine_argument,
    host_and_port,
    integer,
    json_object,
    lanes,
    lengths,
    model_name,
    namespace,
    number,
    object_store,
    redis_url,
    spot_notice,
)
from workers.ipc.messages import DEFAULT_PLACES, EngineOptions, StrategyName, StrategyOptions
from workers.model.nvidia import VISIBLE_VARIABLE as VISIBLE_VARIABLE
from workers.settings import LANES, WorkerSettings

LIFELINE_GRACE_S = 10.0  # beyond the drain time, after the parent has ended
DEMO_NAME = "demo"
DEFAULT_NAMESPACE = "default"
OF_RUNNING_UP = "that of the running `batchway up`"
MODELS_VARIABLE = "BATCHWAY_MODELS"
OBJECT_STORE_VARIABLE = "BATCHWAY_OBJECT_STORE"
GATEWAY_DRAIN_S = 20.0
WORKER_DEFAULTS = WorkerSettings(
    redis_url="", served_model_name="", engine=EngineOptions(model_path="")
)
GIB = 2**30


class Value(NamedTuple):
    """What an option takes: how it is parsed, and its name in the help."""

    parse: Callable[[str], Any]
    name: str


COUNT = Value(integer(1), "N")
SECONDS = Value(number(may_be_zero=False), "SECONDS")
SECONDS_OR_ZERO = Value(number(may_be_zero=True), "SECONDS")
SHARE = Value(number(may_be_zero=False, most=1.0), "SHARE")
GIBIBYTES = Value(number(may_be_zero=False), "GIB")
FILE = Value(Path, "FILE")
NAME = Value(str, "NAME")


@dataclass(frozen=True, slots=True)
class Option:
    """One option. It takes a value, or one word of a tuple, or nothing: a flag. One whose default
    is a list may be repeated.

    `default` holds where neither the option nor `variable`, of the environment, is given; `shown`
    describes a default that is found later.
    """

    meaning: str
    takes: Value | tuple[str, ...] | None
    default: Any = None
    shown: str = ""
    variable: str = ""

    def add_to(self, parser: argparse._ActionsContainer, name: str) -> None:
        word = f"--{name.replace('_', '-')}"
        shown = self.shown or self._default_text()
        if self.variable:
            shown = f"the variable {self.variable}, else {shown}"
        help_ = f"{self.meaning} (default: {shown})"
        if self.takes is None:
            parser.add_argument(word, action="store_true", help=help_)
        elif isinstance(self.takes, Value):
            default = os.environ.get(self.variable) or self.default
            parser.add_argument(
                word,
                action="append" if isinstance(default, list) else "store",
                type=self.takes.parse,
                # argparse parses a default that is a text, as that of the variable.
                default=str(default) if isinstance(default, float) else default,
                metavar=self.takes.name,
                help=help_,
            )
        else:
            parser.add_argument(word, choices=self.takes, default=self.default, help=help_)

    def _default_text(self) -> str:
        if self.default in (None, "", {}, []):
            return "none"
        if isinstance(self.default, tuple):
            return ",".join(self.default)
        shown = f"{self.default:g}" if isinstance(self.default, float) else str(self.default)
        is_time = isinstance(self.takes, Value) and self.takes.name == "SECONDS"
        return f"{shown} s" if is_time else shown


def add_options(
    parser: argparse._ActionsContainer, options: Mapping[str, Option], *names: str
) -> None:
    """Adds all of the options, or those with these names."""
    for name in names or options:
        options[name].add_to(parser, name)


# --- the options ------------------------------------------------------------------------------

MODELS = {
    "models": Option(
        "models that consist of others, see docs/flows.md; read again when the file changes",
        Value(str, "FILE"),
        "",
        variable=MODELS_VARIABLE,
    ),
}
PARTITIONS = {
    "partitions": Option(
        "of the namespace, fixed when it is made",
        Value(integer(1, MAX_PARTITIONS), "N"),
        shown="as many as it has, 1 in a new one",
        variable="BATCHWAY_PARTITIONS",
    ),
}
ADDRESS = {
    "host": Option(
        "address to listen on; any but loopback needs an API key",
        Value(str, "ADDRESS"),
        "127.0.0.1",
    ),
    "port": Option(
        "port to listen on; 0 chooses a free port and logs it", Value(integer(0, 65535), "N"), 8000
    ),
    "gateways": Option(
        "gateway processes behind the port; of several, each listens alone, too, on the ports "
        "that follow it",
        Value(integer(1, 64), "N"),
        1,
        variable="BATCHWAY_GATEWAYS",
    ),
    "allowed_origins": Option(
        "origins of other sites whose pages may call, by commas; `*`: any, without cookies",
        Value(str, "ORIGINS"),
        "",
        variable="BATCHWAY_ALLOWED_ORIGINS",
    ),
}
UP = {
    "fleet": Option(
        "several models, each with its workers, as docs/configuration.md describes",
        FILE,
        shown="the one of --model",
    ),
    "workers": Option("worker processes, each with the whole model", Value(integer(1, 64), "N"), 1),
    "data_dir": Option(
        "where the Redis that batchway starts stores its jobs",
        Value(Path, "DIR"),
        shown="lost when it ends",
    ),
    "durability": Option(
        "of the Redis that batchway starts: fast writes to disk every second, durable before "
        "each answer, and needs --data-dir",
        ("fast", "durable"),
        "fast",
    ),
    "redis_memory_gib": Option(
        "memory that the Redis that batchway starts may use, in GiB",
        GIBIBYTES,
        shown="1, or a quarter of the machine's where that is less",
    ),
}
WORKER_LANES = {
    "lanes": Option("lanes to take jobs from, most urgent first", Value(lanes, "NAMES"), LANES)
}
WORKER = {
    **WORKER_LANES,
    "partition": Option(
        "the partition from which to take jobs",
        Value(integer(0, MAX_PARTITIONS - 1), "NUMBER"),
        WORKER_DEFAULTS.partition,
        variable="BATCHWAY_PARTITION",
    ),
    "lease_s": Option(
        "a worker without a heartbeat for this time loses its jobs",
        SECONDS,
        WORKER_DEFAULTS.lease_s,
    ),
    "step_timeout_s": Option(
        "an engine that has work but ends no step for this time is restarted",
        SECONDS,
        WORKER_DEFAULTS.step_timeout_s,
    ),
    "drain_release_s": Option(
        "running jobs are given back this long before the end of --drain-s, or after two thirds "
        "of it",
        SECONDS_OR_ZERO,
        WORKER_DEFAULTS.drain_release_s,
        variable="BATCHWAY_DRAIN_RELEASE_S",
    ),
    "metrics_port": Option(
        "port on loopback of this worker's own page of metrics, /metrics",
        Value(integer(1, 65535), "N"),
    ),
    "nodes": Option(
        "machines that share the ranks of one vLLM engine; each runs this command", COUNT, 1
    ),
    "node_rank": Option(
        "which of them this is; 0 takes the jobs, the others only compute",
        Value(integer(0), "R"),
        0,
    ),
    "master": Option(
        "where node 0 waits for the others, on a private network", Value(host_and_port, "HOST:PORT")
    ),
    "spot_notice": Option(
        "the worker drains once this file exists, or this http:// address answers 200",
        Value(spot_notice, "FILE_OR_URL"),
        "",
        variable="BATCHWAY_SPOT_NOTICE",
    ),
}
# A name that is a field of EngineOptions sets that field.
MODEL = {
    "model": Option(
        "a folder in Hugging Face layout, an id on its hub, a GGUF file, or smollm2",
        Value(str, "PATH_OR_ID"),
        str(demo_model_path()),
        "the built-in demo",
    ),
    "served_model_name": Option(
        "the name that requests use",
        Value(model_name, "NAME"),
        shown="demo, or the last part of --model",
    ),
    "dtype": Option(
        "of weights and KV cache; auto: float32 on a CPU",
        ("auto", "float32", "bfloat16", "float16"),
        "auto",
    ),
    "quantization": Option(
        "int8: weights of linear layers take a byte each, on a CPU; answers may differ",
        ("none", "int8"),
        "none",
    ),
    "device": Option(
        "auto, cpu, cuda, or cuda:N for one of several GPUs", Value(device, "DEVICE"), "auto"
    ),
    "strategy": Option(
        "how sequences are batched; parameters are in batching.yaml",
        get_args(StrategyName),
        shown="continuous",
    ),
    "batching": Option(
        "lanes, strategies and limits", FILE, shown="batching.yaml beside the model"
    ),
    "attention": Option(
        "auto: batchway's kernel on a CPU, FlashAttention for whole prompts on a GPU, torch's "
        "elsewhere; torch: everywhere",
        ("auto", "torch"),
        "auto",
    ),
    "torch_only": Option(
        "on a CPU no merged modules and no kernels of batchway's own; slower",
        None,
        False,
        "both, where they prove equal",
    ),
    "engine": Option(
        "own: batchway's; vllm: vLLM, in an environment of its own, which scripts/setup-vllm "
        "makes; auto: vllm on an NVIDIA GPU, if it is installed and has all that is asked for, "
        "else own",
        ("auto", "own", "vllm"),
        "auto",
    ),
    "engine_arg": Option(
        "an argument of vLLM's own, as tensor_parallel_size=2; repeatable",
        Value(engine_argument, "NAME=VALUE"),
        [],
    ),
    "engine_python": Option(
        "the interpreter of vLLM's environment",
        Value(str, "PATH"),
        shown=".venv-vllm/bin/python beside the environment of this command",
    ),
    "generation_config": Option(
        "auto: the sampling settings of the model's generation_config.json hold where a caller "
        "gives none; none: they do not",
        ("auto", "none"),
        "auto",
    ),
    "tool_call_parser": Option(
        "the format of the model's tool calls, see docs/models.md; auto: what its chat template "
        "shows; none: it calls no tools",
        NAME,
        "auto",
    ),
    "reasoning_parser": Option(
        "the format of the model's reasoning, see docs/models.md; auto: what its chat template "
        "shows; none: all of its output is the answer",
        NAME,
        "auto",
    ),
    "default_chat_template_kwargs": Option(
        'variables of the chat template, as {"enable_thinking": false}, unless a call gives them',
        Value(json_object, "JSON"),
        {},
    ),
    "threads": Option(
        "CPU threads of each worker", COUNT, shown="as many as its share of the cores"
    ),
    "max_model_len": Option("tokens of prompt and output together", COUNT, shown="the model's own"),
    "max_num_seqs": Option(
        "sequences at a time", COUNT, shown=f"{DEFAULT_PLACES}; on vLLM, vLLM's own"
    ),
    "max_num_batched_tokens": Option(
        "the token budget of a step", COUNT, shown="chosen for the device"
    ),
    "block_size": Option("tokens in a block of the KV cache", COUNT, shown="chosen for the device"),
    "kv_cache_gib": Option(
        "memory of the KV cache, in GiB", GIBIBYTES, shown="chosen from the memory that is free"
    ),
    "memory_share": Option(
        "of the device's memory, for a worker's weights and KV cache; it does not start where "
        "they do not fit",
        SHARE,
        shown="what is free",
    ),
    "auto_truncate": Option(
        "cut prompts that are too long, unless a call says otherwise", None, False, "refuse them"
    ),
}


LOG_LEVEL = {
    "log_level": Option(
        "the lowest level of log lines to show", ("debug", "info", "warning", "error"), "info"
    )
}
JSON = {
    "json": Option(
        "write the result to this file as JSON, for you alone to read; - writes it to standard "
        "output instead of the table",
        Value(str, "OUT"),
        shown="no JSON",
    )
}


NAMESPACE = {
    "namespace": Option(
        "separates installations that share one Redis",
        Value(namespace, "NAME"),
        DEFAULT_NAMESPACE,
        variable="BATCHWAY_NAMESPACE",
    ),
}


def add_shared_options(parser: argparse.ArgumentParser, *, redis_default: str) -> None:
    """Adds options that all parts of an installation must agree on."""
    own = {
        "redis_url": Option(
            "Redis 7.0 or later",
            Value(redis_url, "URL"),
            redis_url_of(os.environ),
            f"the variable REDIS_URL, else {redis_default}",
        ),
    }
    add_options(parser, own | NAMESPACE | LOG_LEVEL)


def add_object_store_option(parser: argparse.ArgumentParser, shown: str) -> None:
    store = Option(
        "where long prompts and results are stored: a directory that gateways and workers share, "
        "or s3://bucket/prefix",
        Value(object_store, "DIR_OR_S3"),
        "",
        shown,
        OBJECT_STORE_VARIABLE,
    )
    add_options(parser, {"object_store": store})


def add_drain_option(parser: argparse.ArgumentParser, default: float, meaning: str) -> None:
    drain = Option(meaning, SECONDS_OR_ZERO, default, variable="BATCHWAY_DRAIN_S")
    add_options(parser, {"drain_s": drain})


def add_action(actions: Any, name: str, summary: str) -> argparse.ArgumentParser:
    """Adds an action of an operator's command, with the options that all of them have."""
    parser: argparse.ArgumentParser = actions.add_parser(
        name, help=summary, description=f"{summary[0].upper()}{summary[1:]}."
    )
    add_shared_options(parser, redis_default=OF_RUNNING_UP)
    add_options(parser, JSON)
    return parser


def add_model_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the model and its limits")
    add_options(group, MODEL)
    group.add_argument("--engine-module", default=None, help=argparse.SUPPRESS)  # for tests
    # From `up`, which has chosen the engine: what the console says of the worker.
    group.add_argument("--notice", default=None, help=argparse.SUPPRESS)


def add_length_options(group: argparse._ActionsContainer, prompt: str, output: str) -> None:
    """Lengths of random requests, with their defaults."""
    for name, default in (("prompt", prompt), ("output", output)):
        meaning = f"{name} lengths in tokens, log-uniform; N: the same for all"
        option = Option(meaning, Value(lengths, "LOW:HIGH"), lengths(default), default)
        add_options(group, {f"{name}_tokens": option})


# --- what the options mean --------------------------------------------------------------------


def served_name(options: argparse.Namespace) -> str:
    """The model's name in requests. Raises argparse.ArgumentTypeError."""
    if options.served_model_name is not None:
        return str(options.served_model_name)
    if Path(options.model) == demo_model_path():
        return DEMO_NAME
    try:
        return model_name(Path(options.model).name.removesuffix(".gguf") or options.model)
    except argparse.ArgumentTypeError as exc:
        raise argparse.ArgumentTypeError(f"--served-model-name is needed: it {exc}") from None


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
    """The engine's options; those not given keep the engine's defaults. Raises
    argparse.ArgumentTypeError."""
    same = {
        name: getattr(options, name) for name in MODEL if name in EngineOptions.__struct_fields__
    }
    other = {
        "model_path": options.model,
        "device": options.device.partition(":")[0],
        "strategy": options.strategy and StrategyOptions(name=options.strategy),
        "fused": not options.torch_only,
        "num_threads": options.threads,
        "kv_memory_bytes": options.kv_cache_gib and int(options.kv_cache_gib * GIB),
        "chat_template_kwargs": options.default_chat_template_kwargs,
        "engine_args": dict(options.engine_arg),
        **node_options(options),
    }
    given = {name: value for name, value in (same | other).items() if value is not None}
    return EngineOptions(**given)


def node_options(options: argparse.Namespace) -> dict[str, Any]:
    """The fields of EngineOptions that say which node this is. Raises
    argparse.ArgumentTypeError."""
    num_nodes: int = getattr(options, "nodes", 1)  # `up` has one
    if num_nodes == 1:
        if getattr(options, "master", None) or getattr(options, "node_rank", 0):
            raise argparse.ArgumentTypeError("--node-rank and --master need --nodes")
        return {}
    if options.engine != "vllm":
        raise argparse.ArgumentTypeError("--nodes needs --engine vllm")
    if options.master is None:
        raise argparse.ArgumentTypeError("--nodes needs --master")
    if options.node_rank >= num_nodes:
        raise argparse.ArgumentTypeError(f"--node-rank must be below {num_nodes}, the --nodes")
    return {"nodes": num_nodes, "node_rank": options.node_rank, "master": options.master}


def model_arguments(options: argparse.Namespace) -> tuple[str, ...]:
    given = []
    for name in (*MODEL, "engine_module", "notice"):
        value = served_name(options) if name == "served_model_name" else getattr(options, name)
        word = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            given += [word] * value
        elif isinstance(value, list):
            given += [f"{word}={each}={text}" for each, text in value]
        elif isinstance(value, dict):
            given.append(f"{word}={msgspec.json.encode(value).decode()}")
        elif value is not None:
            given.append(f"{word}={value}")
    return tuple(given)
