"""The command line parser of `batchway`."""

import argparse
import importlib.metadata
import sys
from typing import NoReturn

from infra import options as opts
from infra.ab_command import WORKER_CANDIDATE_SHARE, add_candidate_options
from infra.callbacks_command import add_allow_option
from infra.commands import COMMANDS

_KINDS = ("ACTION", "COMMAND", "KIND", "WHAT")  # of what a command line may lack


class _Parser(argparse.ArgumentParser):
    """Shows its commands if none is given."""

    def error(self, message: str) -> NoReturn:
        if message.rpartition(": ")[2] not in _KINDS:
            super().error(message)
        self.print_help(sys.stderr)
        self.exit(2, f"\n{self.prog}: error: {message}\n")


def build_parser() -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = _Parser(
        prog="batchway",
        description="Serves language models: a gateway, a durable queue in Redis, workers.",
    )
    parser.add_argument("--version", action="version", version=f"batchway {_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    up = _add(commands, "up", "run everything on this machine: Redis, workers and a gateway")
    opts.add_options(up, opts.ADDRESS | opts.UP)
    add_allow_option(up)
    opts.add_shared_options(up, redis_default="a server of its own")
    opts.add_object_store_option(up, "a directory beside its own Redis")
    opts.add_options(up, opts.MODELS)
    opts.add_options(up, opts.PARTITIONS)
    opts.add_drain_option(
        up,
        opts.WORKER_DEFAULTS.drain_s,
        "on SIGTERM or Ctrl-C, how long requests, and then jobs without a caller, may continue",
    )
    opts.add_model_options(up)
    add_candidate_options(up, share_default="that of its workers, half of --workers")

    gateway = _add(
        commands,
        "gateway",
        "run the HTTP server",
        "All its other settings, BATCHWAY_API_KEY among them, are environment variables: "
        "see docs/configuration.md.",
    )
    opts.add_options(gateway, opts.ADDRESS)
    opts.add_shared_options(gateway, redis_default="refused")
    opts.add_object_store_option(gateway, "they stay in Redis")
    opts.add_options(gateway, opts.MODELS)
    opts.add_options(gateway, opts.PARTITIONS)
    opts.add_drain_option(
        gateway,
        opts.GATEWAY_DRAIN_S,
        "on SIGTERM, how long running requests may continue",
    )
    # From the process that starts gateways: the sockets to listen on.
    gateway.add_argument("--listen-fd", type=int, nargs="+", default=[], help=argparse.SUPPRESS)

    worker = _add(commands, "worker", "run one worker: it takes jobs from Redis and runs a model")
    opts.add_shared_options(worker, redis_default="refused")
    opts.add_object_store_option(worker, "they stay in Redis")
    opts.add_options(worker, opts.WORKER)
    opts.add_drain_option(
        worker, opts.WORKER_DEFAULTS.drain_s, "on SIGTERM, how long running jobs may continue"
    )
    opts.add_model_options(worker)
    add_candidate_options(worker, share_default=f"{WORKER_CANDIDATE_SHARE:g}")

    for name, command in COMMANDS.items():
        command.add_options(_add(commands, name, command.summary, command.epilog))
    return parser


def _add(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]",
    name: str,
    summary: str,
    epilog: str | None = None,
) -> argparse.ArgumentParser:
    return commands.add_parser(
        name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.", epilog=epilog
    )


def _version() -> str:
    try:
        return importlib.metadata.version("batchway")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"
