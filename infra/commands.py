"""The commands of `batchway` beside those that serve: what each takes and what runs it."""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from infra.ab_command import add_ab_options, run_ab
from infra.callbacks_command import (
    KEY_VARIABLE,
    SECRETS_VARIABLE,
    add_callbacks_options,
    run_callbacks_command,
)
from infra.check_command import add_check_options, run_check
from infra.drain_command import add_drain_options, run_drain
from infra.jobs_command import add_jobs_options, run_jobs
from infra.keys_command import PEPPER_VARIABLE, add_keys_options, run_keys
from infra.lanes_command import add_lanes_options, run_lanes
from infra.measure.options import (
    add_bench_options,
    add_cascade_options,
    add_compare_options,
    run_bench,
    run_cascade,
    run_compare,
)
from infra.plan_command import add_plan_options, run_plan
from infra.profile_command import add_profile_options, run_profile
from infra.record_command import add_record_options, run_record
from infra.redis_roles import add_redis_roles_options, run_redis_roles
from infra.simulate_command import add_simulate_options, run_simulate
from infra.top_command import add_top_options, run_top


@dataclass(frozen=True)
class Command:
    summary: str
    add_options: Callable[[argparse.ArgumentParser], None]
    run: Callable[..., int]  # with the options, and the URL of Redis where it needs one
    needs_redis: bool = False
    epilog: str | None = None


COMMANDS: Mapping[str, Command] = {
    "callbacks": Command(
        "deliver callbacks of jobs; show undeliverable ones",
        add_callbacks_options,
        run_callbacks_command,
        needs_redis=True,
        epilog=f"The variables {KEY_VARIABLE}, which all such processes share, and "
        f"{SECRETS_VARIABLE}: see docs/configuration.md.",
    ),
    "keys": Command(
        "create, list, revoke and rotate API keys",
        add_keys_options,
        run_keys,
        needs_redis=True,
        epilog=f"If gateways have {PEPPER_VARIABLE} set, set it here too.",
    ),
    "jobs": Command(
        "list, show, cancel and delete jobs; manage quarantined jobs",
        add_jobs_options,
        run_jobs,
        needs_redis=True,
    ),
    "lanes": Command(
        "pause and resume lanes and tenants", add_lanes_options, run_lanes, needs_redis=True
    ),
    "drain": Command(
        "order workers to finish their jobs and end", add_drain_options, run_drain, needs_redis=True
    ),
    "check": Command(
        "compare counters and lists in Redis with the jobs' records",
        add_check_options,
        run_check,
        needs_redis=True,
    ),
    "ab": Command(
        "compare two batching configurations on live jobs", add_ab_options, run_ab, needs_redis=True
    ),
    "redis-roles": Command(
        "print a Redis user per component, for ACL SETUSER",
        add_redis_roles_options,
        run_redis_roles,
    ),
    "top": Command("watch lanes, workers and engines in a terminal", add_top_options, run_top),
    "profile": Command(
        "show what limits the speed of a model here", add_profile_options, run_profile
    ),
    "plan": Command(
        "choose batch size and replicas for a model on a GPU, without either",
        add_plan_options,
        run_plan,
    ),
    "simulate": Command(
        "run a fleet's queue and engines on a virtual clock", add_simulate_options, run_simulate
    ),
    "record": Command(
        "write lengths and times of a fleet's jobs, without their texts",
        add_record_options,
        run_record,
        needs_redis=True,
    ),
    "compare": Command(
        "compare static, dynamic and continuous batching on a model",
        add_compare_options,
        run_compare,
    ),
    "cascade": Command(
        "fit the threshold of a cascade of models", add_cascade_options, run_cascade
    ),
    "bench": Command("measure parts of the system", add_bench_options, run_bench),
}
