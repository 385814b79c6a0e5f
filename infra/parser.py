"""The command line parser of `batchway`."""

import argparse
import importlib.metadata
import sys
from typing import NoReturn

from infra import options as opts
from infra.ab_command import WORKER_CANDIDATE_SHARE, add_ab_options, add_candidate_options
from infra.callbacks_command import (
    KEY_VARIABLE,
    SECRETS_VARIABLE,
    add_allow_option,
    add_callbacks_options,
)
from infra.check_command import add_check_options
from infra.drain_command import add_drain_options
from infra.jobs_command import add_jobs_options
from infra.keys_command import PEPPER_VARIABLE, add_keys_options
from infra.lanes_command import add_lanes_options
from infra.measure.options import add_bench_options, add_cascade_options, add_compare_options
from infra.plan_command import add_plan_options
from infra.profile_command import add_profile_options
from infra.record_command import add_record_options
from infra.redis_roles import add_redis_roles_options
from infra.simulate_command import add_simulate_options
from infra.top_command import add_top_options

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
    gateway.add_argument("--listen-fd", type=int, help=argparse.SUPPRESS)  # set by `batchway up`

    worker = _add(commands, "worker", "run one worker: it takes jobs from Redis and runs a model")
    opts.add_shared_options(worker, redis_default="refused")
    opts.add_object_store_option(worker, "they stay in Redis")
    opts.add_options(worker, opts.WORKER)
    opts.add_drain_option(
        worker, opts.WORKER_DEFAULTS.drain_s, "on SIGTERM, how long running jobs may continue"
    )
    opts.add_model_options(worker)
    add_candidate_options(worker, share_default=f"{WORKER_CANDIDATE_SHARE:g}")

    callbacks = _add(
        commands,
        "callbacks",
        "deliver callbacks of jobs; show undeliverable ones",
        f"The variables {KEY_VARIABLE}, which all such processes share, and {SECRETS_VARIABLE}: "
        "see docs/configuration.md.",
    )
    add_callbacks_options(callbacks)

    keys = _add(
        commands,
        "keys",
        "create, list, revoke and rotate API keys",
        f"If gateways have {PEPPER_VARIABLE} set, set it here too.",
    )
    add_keys_options(keys)
    add_jobs_options(
        _add(commands, "jobs", "list, show, cancel and delete jobs; manage quarantined jobs")
    )
    add_lanes_options(_add(commands, "lanes", "pause and resume lanes and tenants"))
    add_drain_options(_add(commands, "drain", "order workers to finish their jobs and end"))
    add_check_options(
        _add(commands, "check", "compare counters and lists in Redis with the jobs' records")
    )
    add_ab_options(_add(commands, "ab", "compare two batching configurations on live jobs"))
    add_redis_roles_options(
        _add(
            commands,
            "redis-roles",
            "print a Redis user per component, for ACL SETUSER",
        )
    )
    add_top_options(_add(commands, "top", "watch lanes, workers and engines in a terminal"))
    add_profile_options(_add(commands, "profile", "show what limits the speed of a model here"))
    add_plan_options(
        _add(
            commands, "plan", "choose batch size and replicas for a model on a GPU, without either"
        )
    )
    add_simulate_options(
        _add(commands, "simulate", "run a fleet's queue and engines on a virtual clock")
    )
    add_record_options(
        _add(commands, "record", "write lengths and times of a fleet's jobs, without their texts")
    )
    add_compare_options(
        _add(commands, "compare", "compare static, dynamic and continuous batching on a model")
    )
    add_cascade_options(_add(commands, "cascade", "fit the threshold of a cascade of models"))
    add_bench_options(_add(commands, "bench", "measure parts of the system"))
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
