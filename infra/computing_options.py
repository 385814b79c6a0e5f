"""Options for kernels and step execution."""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from infra.option_values import host_and_port, integer, lengths, number

_ATTENTIONS = ("auto", "torch", "triton")
_QUANTIZATIONS = ("none", "int8")
_ENGINES = ("auto", "own", "vllm")
# What batchway's own engine alone has, by the default.
_OF_OWN_ENGINE = {"quantization": "none", "attention": "auto", "torch_only": False}


def add_engine_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--engine",
        choices=_ENGINES,
        default="auto",
        help="own: batchway's; vllm: vLLM, in an environment of its own, which scripts/setup-vllm "
        "makes; auto: vllm on an NVIDIA GPU, if it is installed and has all that is asked for, "
        "else own (default: auto)",
    )
    group.add_argument(
        "--engine-arg",
        action="append",
        default=[],
        type=_engine_argument,
        metavar="NAME=VALUE",
        help="an argument of vLLM's own, as tensor_parallel_size=2; repeatable (default: none)",
    )
    group.add_argument(
        "--engine-python",
        default=None,
        metavar="PATH",
        help="the interpreter of vLLM's environment (default: .venv-vllm/bin/python beside the "
        "environment of this command)",
    )


def own_option(options: argparse.Namespace) -> str | None:
    """The first given option that batchway's own engine alone has, as it was given, or None."""
    if options.strategy not in (None, "continuous"):
        return f"--strategy {options.strategy}"
    changed = [name for name, each in _OF_OWN_ENGINE.items() if getattr(options, name) != each]
    return f"--{changed[0].replace('_', '-')}" if changed else None


def vllm_python(options: argparse.Namespace) -> Path:
    """Where the interpreter of vLLM's environment is, or would be."""
    beside = Path(sys.prefix).parent / ".venv-vllm" / "bin" / "python"
    return Path(options.engine_python or beside).absolute()


def engine_python(options: argparse.Namespace) -> str | None:
    """The interpreter that runs the engine, which is chosen; None: this one. Raises
    argparse.ArgumentTypeError."""
    if options.engine == "own":
        for name in ("engine_arg", "engine_python"):
            if getattr(options, name):
                raise argparse.ArgumentTypeError(f"--{name.replace('_', '-')} needs --engine vllm")
        return None
    if given := own_option(options):
        raise argparse.ArgumentTypeError(
            f"{given} is of batchway's own engine; vLLM's arguments go by --engine-arg"
        )
    path = vllm_python(options)
    if not os.access(path, os.X_OK):
        raise argparse.ArgumentTypeError(
            f"no interpreter at {path}: run scripts/setup-vllm, or name vLLM's environment by "
            "--engine-python"
        )
    return str(path)


def add_node_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--nodes",
        type=integer(1),
        default=1,
        metavar="N",
        help="machines that share the ranks of one vLLM engine; each runs this command "
        "(default: 1)",
    )
    parser.add_argument(
        "--node-rank",
        type=integer(0),
        default=0,
        metavar="R",
        help="which of them this is; 0 takes the jobs, the others only compute (default: 0)",
    )
    parser.add_argument(
        "--master",
        type=host_and_port,
        metavar="HOST:PORT",
        help="where node 0 waits for the others, on a private network (default: none)",
    )


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


def _engine_argument(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def add_quantization_option(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--quantization",
        choices=_QUANTIZATIONS,
        default="none",
        help="int8: weights of linear layers take a byte each, on a CPU; answers may differ "
        "(default: none)",
    )


def add_dtype_option(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="of weights and KV cache; auto: float32 on a CPU (default: auto)",
    )


def add_kv_cache_option(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--kv-cache-gib",
        type=number(may_be_zero=False),
        metavar="GIB",
        help="memory of the KV cache, in GiB (default: chosen from the memory that is free)",
    )


def add_length_options(group: argparse._ActionsContainer, prompt: str, output: str) -> None:
    """Lengths of random requests, with their defaults."""
    for name, default in (("prompt", prompt), ("output", output)):
        group.add_argument(
            f"--{name}-tokens",
            type=lengths,
            default=lengths(default),
            metavar="LOW:HIGH",
            help=f"{name} lengths in tokens, log-uniform; N: the same for all (default: {default})",
        )


def add_computing_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--attention",
        choices=_ATTENTIONS,
        default="auto",
        help="auto: the kernel for the processor or GPU, if it passes the self-test, else torch; "
        "triton: that or nothing (default: auto)",
    )
    group.add_argument(
        "--torch-only",
        action="store_true",
        help="no merged modules, and on a CPU no kernels of batchway's own; slower "
        "(default: both, where they prove equal)",
    )
