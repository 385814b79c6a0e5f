"""`batchway jobs list`, `show`, `cancel`, `delete`: a tenant's actions, done by an operator.

Uses only Redis, without gateway and key. Shows states and sizes, never text.
"""

import argparse
import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import Any

from contract.connection import connect
from contract.function_types import JobView, Wanted
from contract.functions import Functions
from contract.jobs import PUBLIC_STATUSES, JobStatus, public_status
from contract.keys import Keys
from infra import options as opts
from infra.options import Option, Value
from infra.tables import date, table, write
from workers.settings import LANES

ACTIONS = ("list", "show", "cancel", "delete")
DEFAULT_TENANT = "default"
_HEADING = ("job", "submitted", "status", "model", "lane", "prompt", "output", "metadata")
_METADATA = re.compile(r"([^=]{1,64})=(.{0,512})")


class JobRefusal(Exception):
    """The job does not exist or is not in a suitable state."""


def add_tenant_option(parser: argparse.ArgumentParser) -> None:
    tenant = Option("the tenant whose jobs are meant", opts.NAME, DEFAULT_TENANT)
    opts.add_options(parser, {"tenant": tenant})


def add_list_options(parser: argparse.ArgumentParser) -> None:
    """Adds filters of the list."""
    table = {
        "status": Option("only this state", tuple(PUBLIC_STATUSES), shown="any"),
        "lane": Option("only this lane", LANES, shown="any"),
        "served_model_name": Option("only this one", opts.NAME, shown="any"),
        "metadata": Option(
            "only jobs with this metadata; may be repeated",
            Value(_metadata, "NAME=VALUE"),
            [],
            "any",
        ),
        "limit": Option("the most jobs to list", opts.COUNT, 20),
    }
    opts.add_options(parser, table)


def run_tenant_jobs(options: argparse.Namespace, redis_url: str) -> None:
    """Runs one action. Raises JobRefusal, BrokerUnavailable."""
    asyncio.run(_run(options, redis_url))


def _metadata(raw: str) -> tuple[str, str]:
    match = _METADATA.fullmatch(raw)
    if match is None:
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE, not {raw!r}")
    return match[1], match[2]


async def _run(options: argparse.Namespace, redis_url: str) -> None:
    actions: dict[str, Callable[[Functions, argparse.Namespace], Awaitable[None]]]
    actions = {"list": _list, "show": _show, "cancel": _cancel, "delete": _delete}
    async with connect(redis_url) as client:
        await actions[options.kind](Functions(client, Keys(options.namespace)), options)


async def _list(functions: Functions, options: argparse.Namespace) -> None:
    wanted = Wanted(
        statuses=PUBLIC_STATUSES[options.status] if options.status else frozenset(),
        lane=options.lane or "",
        model=options.served_model_name or "",
        metadata=dict(options.metadata),
    )
    views: list[JobView] = []
    after = ""
    while len(views) < options.limit:
        room = options.limit - len(views)
        page = await functions.list_jobs(options.tenant, wanted, after=after, max_jobs=room)
        if page is None:
            break  # deleted while we read
        views += page.views
        if not (after := page.position):
            break
    text = table([_HEADING, *map(_row, views)]) if views else "no such job"
    write({"jobs": [_shown(view) for view in views]}, text, options.json)


async def _show(functions: Functions, options: argparse.Namespace) -> None:
    found = await functions.read(options.job_id, options.tenant)
    if found is None:
        raise _unknown(options)
    shown = _shown(found[0])
    write(shown, table([(name, str(value)) for name, value in shown.items()]), options.json)


async def _cancel(functions: Functions, options: argparse.Namespace) -> None:
    status = await functions.cancel(options.job_id, options.tenant)
    if status is None:
        raise _unknown(options)
    if status is not JobStatus.CANCELLED:
        raise JobRefusal(f"{options.job_id} has ended before: {public_status(status)}")
    _say(options, "cancelled")


async def _delete(functions: Functions, options: argparse.Namespace) -> None:
    found = await functions.delete(options.job_id, options.tenant)
    if found is False:
        raise _unknown(options)
    if found is not True:
        raise JobRefusal(f"{options.job_id} is {public_status(found)}: cancel it first")
    _say(options, "deleted")  # a worker deletes its objects


def _say(options: argparse.Namespace, what: str) -> None:
    write({"id": options.job_id, "status": what}, f"{options.job_id} is {what}", options.json)


def _unknown(options: argparse.Namespace) -> JobRefusal:
    return JobRefusal(f"the tenant {options.tenant!r} has no job {options.job_id!r}")


def _shown(view: JobView) -> dict[str, Any]:
    def seconds(ms: int | None) -> float | None:
        return None if ms is None else ms / 1000

    return {
        "id": view.job.id,
        "status": public_status(view.status),
        "model": view.job.model,
        "lane": view.lane,
        "attempt": view.attempt,
        "prompt_tokens": view.num_prompt_tokens,
        "output_tokens": view.num_output_tokens,
        "metadata": dict(view.metadata),
        "created": seconds(view.created_ms),
        "claimed": seconds(view.claimed_ms),
        "finished": seconds(view.finished_ms),
        "deadline": seconds(view.deadline_ms),
        "code": view.code,
        "message": view.message,
    }


def _row(view: JobView) -> tuple[str, ...]:
    metadata = ",".join(f"{name}={value}" for name, value in sorted(view.metadata.items()))
    sizes = (str(view.num_prompt_tokens), str(view.num_output_tokens))
    created, status = date(view.created_ms / 1000), public_status(view.status)
    return (view.job.id, created, status, view.job.model, view.lane, *sizes, metadata)
