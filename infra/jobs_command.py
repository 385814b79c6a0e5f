"""`batchway jobs`: operator actions on jobs: those of tenants, by Redis alone, without gateway and
key; quarantined ones; predicted waits beside actual ones. Shows states and sizes, never text.
"""

import argparse
import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from contract.catalogue import Catalogue
from contract.connection import broker_errors
from contract.function_types import JobView, Submitted
from contract.functions import Functions
from contract.job_lists import JobLists
from contract.jobs import PUBLIC_STATUSES, JobStatus, public_status
from contract.operations import OperationKind
from contract.replays import replay_of, replayed_id
from contract.shards import OpenShards
from infra import options as opts
from infra.operations_command import (
    ALL_TENANTS,
    DEFAULT_TENANT,
    add_filter_options,
    has_filter,
    run_operation,
    wanted_of,
)
from infra.option_values import model_name
from infra.options import Option
from infra.preconditions import Failed, UsageError
from infra.tables import date, percentile, table, write

JOB_ACTIONS = ("list", "show", "cancel", "replay", "delete")
_LIST_HEADING = (
    "job",
    "tenant",
    "submitted",
    "status",
    "model",
    "lane",
    "prompt",
    "output",
    "metadata",
)


def add_tenant_option(parser: argparse.ArgumentParser) -> None:
    tenant = Option("the tenant whose jobs are meant", opts.NAME, DEFAULT_TENANT)
    opts.add_options(parser, {"tenant": tenant})


def add_list_options(parser: argparse.ArgumentParser) -> None:
    add_filter_options(parser, tuple(PUBLIC_STATUSES))
    opts.add_options(parser, {"limit": Option("the most jobs to list", opts.COUNT, 20)})


async def _run_on_job(options: argparse.Namespace, redis_url: str) -> None:
    """Runs one action. Raises Failed, BrokerUnavailable."""
    actions: dict[str, Callable[[Functions, argparse.Namespace], Awaitable[None]]]
    actions = {"show": _show_job, "cancel": _cancel, "delete": _delete}
    async with OpenShards(redis_url, options.namespace) as shards:
        if options.kind == "list":
            await _list_jobs(shards, options)
        elif options.kind == "replay" or (options.kind == "cancel" and options.job_id is None):
            await run_operation(shards, options, OperationKind(options.kind))
        else:
            shard = await shards.of(options.job_id)
            await actions[options.kind](shard.functions, options)


async def _list_jobs(shards: OpenShards, options: argparse.Namespace) -> None:
    tenant = "" if options.tenant == ALL_TENANTS else options.tenant
    wanted = await wanted_of(shards.first.client, options)
    lists = JobLists(await shards.of_list(tenant), tenant, wanted)
    views: list[JobView] = []
    after = ""
    while len(views) < options.limit:
        page = await lists.page(after, options.limit - len(views))
        if page is None:
            break  # deleted while we read
        views += page.views
        if not (after := page.position):
            break
    text = table([_LIST_HEADING, *map(_job_row, views)]) if views else "no such job"
    write({"jobs": [_shown(view) for view in views]}, text, options.json)


async def _show_job(functions: Functions, options: argparse.Namespace) -> None:
    found = await functions.read(options.job_id, options.tenant)
    if found is None:
        raise _unknown(options)
    shown = _shown(found[0])
    write(shown, table([(name, str(value)) for name, value in shown.items()]), options.json)


async def _cancel(functions: Functions, options: argparse.Namespace) -> None:
    if has_filter(options):
        raise UsageError("give a JOB or filters, not both")
    status = await functions.cancel(options.job_id, options.tenant)
    if status is None:
        raise _unknown(options)
    if status is not JobStatus.CANCELLED:
        raise Failed(f"{options.job_id} has ended before: {public_status(status)}")
    _say(options, "cancelled")


async def _delete(functions: Functions, options: argparse.Namespace) -> None:
    found = await functions.delete(options.job_id, options.tenant)
    if found is False:
        raise _unknown(options)
    if found is not True:
        raise Failed(f"{options.job_id} is {public_status(found)}: cancel it first")
    _say(options, "deleted")  # a worker deletes its objects


def _say(options: argparse.Namespace, what: str) -> None:
    write({"id": options.job_id, "status": what}, f"{options.job_id} is {what}", options.json)


def _unknown(options: argparse.Namespace) -> Failed:
    return Failed(f"the tenant {options.tenant!r} has no job {options.job_id!r}")


def _shown(view: JobView) -> dict[str, Any]:
    def seconds(ms: int | None) -> float | None:
        return None if ms is None else ms / 1000

    return {
        "id": view.job.id,
        "tenant": view.job.tenant,
        "status": public_status(view.status),
        "model": view.job.model,
        "lane": view.lane,
        "attempt": view.attempt,
        "prompt_tokens": view.num_prompt_tokens,
        "cached_tokens": view.num_cached_tokens,
        "output_tokens": view.num_output_tokens,
        "metadata": dict(view.metadata),
        "created": seconds(view.created_ms),
        "claimed": seconds(view.claimed_ms),
        "finished": seconds(view.finished_ms),
        "deadline": seconds(view.deadline_ms),
        "code": view.code,
        "message": view.message,
    }


def _job_row(view: JobView) -> tuple[str, ...]:
    metadata = ",".join(f"{name}={value}" for name, value in sorted(view.metadata.items()))
    sizes = (str(view.num_prompt_tokens), str(view.num_output_tokens))
    created, status = date(view.created_ms / 1000), public_status(view.status)
    return (
        view.job.id,
        view.job.tenant,
        created,
        status,
        view.job.model,
        view.lane,
        *sizes,
        metadata,
    )


ACTIONS = ("list", "show", "requeue")
# Shorter waits count as this, so that a small delay is no large relative error.
_LEAST_WAIT_MS = 100
_CALIBRATION_HEADING = ("lane", "jobs", "half within", "nine in ten within")
_HEADING = ("job", "since", "model", "lane", "tenant", "prompt", "output", "can run again")


class Quarantine(Functions):
    """The poison jobs, on which engines died: sizes and hashes, never text. Every method raises
    BrokerUnavailable, WireError.

    A requeued job is a new job with the content of the old record. Its id is derived from the old
    one, so that a repeated requeue finds the existing job.
    """

    async def records(self) -> list[dict[str, Any]]:
        """All records, latest first."""
        with broker_errors(self._client, "ZREVRANGE", record="quarantine"):
            rows: Any = await self._client.zrevrange(
                self._keys.of("quarantine"), 0, -1, withscores=True
            )
        found = [(raw_id.decode(errors="replace"), int(since_ms)) for raw_id, since_ms in rows]
        return [await self._record(job_id, since_ms) for job_id, since_ms in found]

    async def find(self, job_id: str) -> dict[str, Any]:
        """Returns a record. Raises Failed if there is none: the id is wrong, or a thousand
        later ones have replaced it."""
        with broker_errors(self._client, "ZSCORE"):
            since_ms = await self._client.zscore(self._keys.of("quarantine"), job_id)
        if since_ms is None:
            raise Failed(f"there is no {job_id!r} in the quarantine")
        return await self._record(job_id, int(since_ms))

    async def requeue(self, job_id: str, deadline_s: float | None = None) -> Submitted:
        """Submits the job again; `is_new` is False where it was requeued before.

        The deadline's length stays the same unless `deadline_s` is given. Raises Failed,
        JobRefused, BrokerFull, WireError.
        """
        await self.find(job_id)
        found = await replay_of(self._client, self._keys, job_id)
        if found is None:
            raise Failed(f"the record and prompt of {job_id} have expired: submit the job anew")
        job, terms = found
        if job.has_objects:
            raise Failed(
                f"the prompt of {job_id} is in an object store and expires: submit the job anew"
            )
        if deadline_s is not None:
            terms = msgspec.structs.replace(terms, deadline_s=deadline_s)
        return await self.submit(job, terms)

    async def _record(self, job_id: str, since_ms: int) -> dict[str, Any]:
        again = replayed_id(job_id)
        with broker_errors(self._client, "HGET or EXISTS", record="record of a poison job"):
            raw: Any = await self._client.hget(self._keys.of("poison"), job_id)
            has_record = bool(await self._client.exists(self._keys.of("job", job_id)))
            was_requeued = bool(await self._client.exists(self._keys.of("job", again)))
        about = {}
        with contextlib.suppress(ValueError):
            about = dict(json.loads(raw or b"{}"))
        return {
            "id": job_id,
            "since": since_ms / 1000,
            **about,
            "can_run_again": has_record,
            "requeued_as": again if was_requeued else None,
        }


def add_jobs_options(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    add_list_options(_add_kind(kinds, "list", "list a tenant's jobs, the youngest first"))
    _add_job(_add_kind(kinds, "show", "show a job: state and sizes, never text"))
    cancel = _add_kind(kinds, "cancel", "cancel a waiting or running job, or all that match")
    cancel.add_argument("job_id", metavar="JOB", nargs="?", help="its id; without it by filter")
    add_filter_options(cancel, ("queued", "running"))
    replay = _add_kind(kinds, "replay", "submit failed jobs again, each once; gateways do it")
    add_filter_options(replay, ("failed", "expired", "cancelled"), "failed")
    _add_job(_add_kind(kinds, "delete", "delete an ended job: prompt, output, log"))
    calibration = opts.add_action(kinds, "calibration", "compare predicted waits with actual ones")
    model = opts.Option("only this model", opts.Value(model_name, "NAME"), shown="every model")
    opts.add_options(calibration, {"model": model})
    summary = "jobs that crashed engines"
    quarantine = kinds.add_parser("quarantine", help=summary, description=summary)
    actions = quarantine.add_subparsers(dest="action", required=True, metavar="ACTION")
    opts.add_action(actions, "list", "list the last thousand, the latest first")
    _add_job(opts.add_action(actions, "show", "show one: sizes and hashes, never text"))
    requeue = opts.add_action(actions, "requeue", "run one again as a new job; idempotent")
    _add_job(requeue)
    deadline = opts.Option(
        "deadline of the new job, from now", opts.SECONDS, shown="as long as the old one had"
    )
    opts.add_options(requeue, {"deadline_s": deadline})


def run_jobs(options: argparse.Namespace, redis_url: str) -> int:
    """Runs one action; returns the exit status. Raises Failed, JobRefused, BrokerUnavailable."""
    if options.kind == "quarantine":
        asyncio.run(_run(options, redis_url))
    elif options.kind == "calibration":
        _run_calibration(options, redis_url)
    else:
        asyncio.run(_run_on_job(options, redis_url))
    return 0


def _add_kind(kinds: Any, name: str, summary: str) -> argparse.ArgumentParser:
    parser = opts.add_action(kinds, name, summary)
    add_tenant_option(parser)
    return parser


def _add_job(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job_id", metavar="JOB", help="its id, as `list` shows it")


async def _run(options: argparse.Namespace, redis_url: str) -> None:
    actions: dict[str, Callable[[Quarantine, argparse.Namespace], Awaitable[None]]]
    actions = {"show": _show, "requeue": _requeue}
    async with OpenShards(redis_url, options.namespace) as shards:
        if options.action == "list":
            await _list(shards, options)
            return
        shard = await shards.of(options.job_id)
        await actions[options.action](Quarantine(shard.client, shard.keys), options)


async def _list(shards: OpenShards, options: argparse.Namespace) -> None:
    records = list[dict[str, Any]]()
    for shard in await shards.all():
        records += await Quarantine(shard.client, shard.keys).records()
    records.sort(key=lambda record: record["since"], reverse=True)
    rows = [_HEADING, *map(_row, records)]
    text = table(rows) if records else "no job is in quarantine"
    write({"jobs": records}, text, options.json)


async def _show(quarantine: Quarantine, options: argparse.Namespace) -> None:
    shown = await quarantine.find(options.job_id)
    write(shown, table([(name, str(value)) for name, value in shown.items()]), options.json)


async def _requeue(quarantine: Quarantine, options: argparse.Namespace) -> None:
    submitted = await quarantine.requeue(options.job_id, options.deadline_s)
    how = "is queued" if submitted.is_new else "was queued before"
    result = {"id": options.job_id, "requeued_as": submitted.job_id, "is_new": submitted.is_new}
    write(result, f"{options.job_id} {how} as {submitted.job_id}", options.json)


def _row(record: dict[str, Any]) -> tuple[str, ...]:
    again = ("no", "yes")[record["can_run_again"]]
    if record["requeued_as"]:
        again = f"as {record['requeued_as']}"
    names = ("model", "lane", "tenant", "prompt_tokens", "output_tokens")
    values = (str(record.get(name, "?")) for name in names)
    return (record["id"], date(record["since"]), *values, again)


def _run_calibration(options: argparse.Namespace, redis_url: str) -> None:
    """Raises BrokerUnavailable, WireError."""
    found = asyncio.run(_calibrations(options, redis_url))
    parts = []
    for model, lanes in found.items():
        rows = [
            (row["lane"], str(row["num_jobs"]), _percent(row["p50"]), _percent(row["p90"]))
            for row in lanes
        ]
        parts.append(f"{model}\n{table([_CALIBRATION_HEADING, *rows])}")
    write({"models": found}, "\n\n".join(parts) or "no model is known", options.json)


async def _calibrations(
    options: argparse.Namespace, redis_url: str
) -> dict[str, list[dict[str, Any]]]:
    """By model, of each lane the median and the 90th percentile of |predicted − actual| ÷ actual
    over the last 1,000 jobs that were claimed."""
    found = dict[str, list[dict[str, Any]]]()
    async with OpenShards(redis_url, options.namespace) as shards:
        for card in await Catalogue(shards.first.client, shards.first.keys).models():
            if options.model not in (None, card.name):
                continue
            found[card.name] = []
            for lane in card.lanes:
                waits = list[tuple[int, ...]]()
                for shard in await shards.all():
                    key = shard.keys.of("calibration", card.name, lane)
                    with broker_errors(shard.client, "LRANGE", record="calibration"):
                        raw: Any = await shard.client.lrange(key, 0, -1)
                        waits += [tuple(map(int, entry.split())) for entry in raw]
                errors = [abs(said - ms) / max(_LEAST_WAIT_MS, ms) for said, ms in waits]
                figures = {"p50": percentile(errors, 0.5), "p90": percentile(errors, 0.9)}
                found[card.name].append({"lane": lane, "num_jobs": len(errors), **figures})
    return found


def _percent(error: float | None) -> str:
    return "-" if error is None else f"{100 * error:.0f} %"
