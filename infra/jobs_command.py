"""`batchway jobs`: operator actions on jobs. This module handles quarantined ones, and compares
predicted waits with actual ones; tenant_jobs.py has the others."""

import argparse
import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from contract.catalogue import Catalogue
from contract.connection import broker_errors, connect
from contract.errors import JobRefused, wire_errors
from contract.keys import Keys
from contract.quarantine import CannotRequeue, NotInQuarantine, PoisonRecord, Quarantine
from infra import option_values
from infra import options as opts
from infra.tables import date, percentile, table, write
from infra.tenant_jobs import JobRefusal, add_list_options, add_tenant_option, run_tenant_jobs

ACTIONS = ("list", "show", "requeue")
EXIT_REFUSED = 1
# Shorter waits count as this, so that a small delay is no large relative error.
_LEAST_WAIT_MS = 100
_CALIBRATION_HEADING = ("lane", "jobs", "half within", "nine in ten within")
_HEADING = ("job", "since", "model", "lane", "tenant", "prompt", "output", "can run again")


def add_jobs_options(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    add_list_options(_add_kind(kinds, "list", "list a tenant's jobs, the youngest first"))
    _add_job(_add_kind(kinds, "show", "show a job: state and sizes, never text"))
    _add_job(_add_kind(kinds, "cancel", "cancel a waiting or running job"))
    _add_job(_add_kind(kinds, "delete", "delete an ended job: prompt, output, log"))
    calibration = opts.add_action(kinds, "calibration", "compare predicted waits with actual ones")
    calibration.add_argument(
        "--model",
        type=option_values.model_name,
        metavar="NAME",
        help="only this model (default: every model)",
    )
    summary = "jobs that crashed engines"
    quarantine = kinds.add_parser("quarantine", help=summary, description=summary)
    actions = quarantine.add_subparsers(dest="action", required=True, metavar="ACTION")
    opts.add_action(actions, "list", "list the last thousand, the latest first")
    _add_job(opts.add_action(actions, "show", "show one: sizes and hashes, never text"))
    requeue = opts.add_action(actions, "requeue", "run one again as a new job; idempotent")
    _add_job(requeue)
    requeue.add_argument(
        "--deadline-s",
        type=option_values.number(may_be_zero=False),
        metavar="SECONDS",
        help="deadline of the new job, from now (default: as long as the old one had)",
    )


def run_jobs(options: argparse.Namespace, redis_url: str) -> int:
    """Runs one action; returns the exit status. Raises BrokerUnavailable."""
    try:
        if options.kind == "quarantine":
            asyncio.run(_run(options, redis_url))
        elif options.kind == "calibration":
            _run_calibration(options, redis_url)
        else:
            run_tenant_jobs(options, redis_url)
    except (NotInQuarantine, CannotRequeue, JobRefused, JobRefusal) as exc:
        print(f"batchway jobs: {exc}", file=sys.stderr)
        return EXIT_REFUSED
    return 0


def _add_kind(kinds: Any, name: str, summary: str) -> argparse.ArgumentParser:
    parser = opts.add_action(kinds, name, summary)
    add_tenant_option(parser)
    return parser


def _add_job(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job_id", metavar="JOB", help="its id, as `list` shows it")


async def _run(options: argparse.Namespace, redis_url: str) -> None:
    actions: dict[str, Callable[[Quarantine, argparse.Namespace], Awaitable[None]]]
    actions = {"list": _list, "show": _show, "requeue": _requeue}
    async with connect(redis_url) as client:
        await actions[options.action](Quarantine(client, Keys(options.namespace)), options)


async def _list(quarantine: Quarantine, options: argparse.Namespace) -> None:
    records = await quarantine.list()
    rows = [_HEADING, *(_row(record) for record in records)]
    text = table(rows) if records else "no job is in quarantine"
    write({"jobs": [_shown(record) for record in records]}, text, options.json)


async def _show(quarantine: Quarantine, options: argparse.Namespace) -> None:
    shown = _shown(await quarantine.find(options.job_id))
    write(shown, table([(name, str(value)) for name, value in shown.items()]), options.json)


async def _requeue(quarantine: Quarantine, options: argparse.Namespace) -> None:
    submitted = await quarantine.requeue(options.job_id, options.deadline_s)
    how = "is queued" if submitted.is_new else "was queued before"
    result = {"id": options.job_id, "requeued_as": submitted.job_id, "is_new": submitted.is_new}
    write(result, f"{options.job_id} {how} as {submitted.job_id}", options.json)


def _shown(record: PoisonRecord) -> dict[str, Any]:
    return {
        "id": record.job_id,
        "since": record.since_ms / 1000,
        **record.about,
        "can_run_again": record.is_readable,
        "requeued_as": record.requeued_as,
    }


def _row(record: PoisonRecord) -> tuple[str, ...]:
    about = {name: str(value) for name, value in record.about.items()}
    again = (
        f"as {record.requeued_as}" if record.requeued_as else ("yes", "no")[not record.is_readable]
    )
    names = ("model", "lane", "tenant", "prompt_tokens", "output_tokens")
    values = (about.get(name, "?") for name in names)
    return (record.job_id, date(record.since_ms / 1000), *values, again)


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
    keys, found = Keys(options.namespace), dict[str, list[dict[str, Any]]]()
    async with connect(redis_url) as client:
        for card in await Catalogue(client, keys).models():
            if options.model not in (None, card.name):
                continue
            found[card.name] = []
            for lane in card.lanes:
                with wire_errors("calibration"), broker_errors(client, "LRANGE"):
                    raw: Any = await client.lrange(keys.of("calibration", card.name, lane), 0, -1)
                    waits = [tuple(map(int, entry.split())) for entry in raw]
                errors = [abs(said - ms) / max(_LEAST_WAIT_MS, ms) for said, ms in waits]
                figures = {"p50": percentile(errors, 0.5), "p90": percentile(errors, 0.9)}
                found[card.name].append({"lane": lane, "num_jobs": len(errors), **figures})
    return found


def _percent(error: float | None) -> str:
    return "-" if error is None else f"{100 * error:.0f} %"
