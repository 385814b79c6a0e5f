"""`batchway callbacks`: delivers callbacks and shows undeliverable ones."""

import argparse
import asyncio
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from contract.callback_urls import AllowList
from contract.callbacks import Secrets
from contract.operations import OperationKind
from contract.outbox import DeadLetter
from contract.shards import OpenShards
from infra import options as opts
from infra.jobs_command import add_tenant_option
from infra.operations_command import add_filter_options, has_filter, run_operation
from infra.option_values import checked, integer
from infra.options import Option, Value
from infra.preconditions import UsageError
from infra.tables import date, table, write

if TYPE_CHECKING:
    from workers.callbacks.deliverer import CallbackSettings

KEY_VARIABLE = "BATCHWAY_CALLBACK_KEY"
SECRETS_VARIABLE = "BATCHWAY_CALLBACK_SECRETS"
ALLOW_VARIABLE = "BATCHWAY_CALLBACK_ALLOW"
AWS_VARIABLE = "BATCHWAY_CALLBACK_AWS"
URL_VARIABLE = "BATCHWAY_PUBLIC_URL"
ACTIONS = ("list", "show", "replay")
EXIT_UNKNOWN = 1
DRAIN_S = 20.0
_MAX_LETTERS = 100
_COLUMNS = ("job", "type", "attempts", "last_error", "died")
_UNKNOWN = "no such callback"


def add_callbacks_options(parser: argparse.ArgumentParser) -> None:
    """Without an action it delivers; `dead` manages undeliverable messages."""
    opts.add_shared_options(parser, redis_default="refused")
    opts.add_object_store_option(parser, "they stay in Redis")
    opts.add_drain_option(parser, DRAIN_S, "on SIGTERM, how long deliveries may continue")
    add_allow_option(parser)
    number = Value(integer(1, 512), "N")
    limits = {
        "max_concurrent": Option("deliveries at a time", number, 32),
        "max_per_target": Option(
            "deliveries at a time to one destination of one tenant", number, 8
        ),
    }
    opts.add_options(parser, limits)
    words = parser.add_subparsers(dest="callbacks", metavar="dead")
    actions = words.add_parser(
        "dead", help="callbacks that were given up", description="Callbacks that were given up."
    ).add_subparsers(dest="action", required=True, metavar="ACTION")
    for action, summary in zip(
        ACTIONS,
        (
            "list those of a tenant",
            "show one of them",
            "deliver one or many again, with the same id",
        ),
        strict=True,
    ):
        one = opts.add_action(actions, action, summary)
        add_tenant_option(one)
        if action == "show":
            one.add_argument("job", metavar="JOB", help="the id of the callback's job")
        elif action == "replay":
            one.add_argument("job", metavar="JOB", nargs="?", help="its job; without it by filter")
            add_filter_options(one, ("succeeded", "failed", "cancelled", "expired"))


def add_allow_option(parser: argparse.ArgumentParser) -> None:
    allow = Option(
        "for development: addresses, networks and host names that callbacks may reach though they "
        "are private, also without TLS",
        Value(checked(lambda raw: AllowList.parse(_parts(raw))), "ADDRESSES"),
        "",
        variable=ALLOW_VARIABLE,
    )
    opts.add_options(parser, {"callback_allow": allow})


def run_callbacks_command(options: argparse.Namespace, url: str) -> int:
    """Raises BrokerUnavailable, and ValueError for invalid settings."""
    if options.callbacks == "dead":
        return asyncio.run(_dead(options, url))

    from infra.child import end_with_parent
    from workers.callbacks.service import run_callbacks

    settings = callback_settings(options, url)
    end_with_parent(options.drain_s + opts.LIFELINE_GRACE_S)
    return asyncio.run(run_callbacks(settings))


def callback_settings(options: argparse.Namespace, url: str) -> "CallbackSettings":
    """Settings from options and environment variables. Raises ValueError."""
    from workers.callbacks.deliverer import CallbackSettings

    try:
        secrets = Secrets.parse(os.environ.get(SECRETS_VARIABLE, ""))
    except ValueError as exc:
        raise ValueError(f"{SECRETS_VARIABLE}: {exc}") from exc
    return CallbackSettings(
        redis_url=url,
        key=os.environ.get(KEY_VARIABLE, ""),
        namespace=options.namespace,
        secrets=secrets,
        allow=AllowList.parse(_parts(options.callback_allow)),
        aws_targets=tuple(_parts(os.environ.get(AWS_VARIABLE, ""))),
        public_url=os.environ.get(URL_VARIABLE, "").rstrip("/"),
        object_store=options.object_store,
        max_concurrent=options.max_concurrent,
        max_per_target=options.max_per_target,
        drain_s=options.drain_s,
    )


def _parts(raw: str) -> Sequence[str]:
    return [part.strip() for part in raw.split(",") if part.strip()]


async def _dead(options: argparse.Namespace, url: str) -> int:
    async with OpenShards(url, options.namespace) as shards:
        if options.action == "replay" and options.job is not None and has_filter(options):
            raise UsageError("give a JOB or filters, not both")
        if options.action == "replay" and options.job is None:
            await run_operation(shards, options, OperationKind.REPLAY_CALLBACKS)
            return 0
        if options.action == "replay":
            outbox = (await shards.of(options.job)).outbox
            state = await outbox.replay(options.job, options.tenant)
            text = f"{options.job}: {state}" if state else _UNKNOWN
            write({"job": options.job, "state": state}, text, options.json)
            return 0 if state else EXIT_UNKNOWN
        job_id = options.job if options.action == "show" else ""
        outbox = (await shards.home(options.tenant)).outbox
        letters = await outbox.dead(options.tenant, job_id=job_id, limit=_MAX_LETTERS)
    shown = [_fields(letter) for letter in letters]
    if options.action == "list":
        rows = [tuple(str(fields[name]) for name in _COLUMNS) for fields in shown]
        write({"callbacks": shown}, table([_COLUMNS, *rows]), options.json)
        return 0
    if not shown:
        print(_UNKNOWN)
        return EXIT_UNKNOWN
    write(shown[0], "\n".join(f"{n}: {value}" for n, value in shown[0].items()), options.json)
    return 0


def _fields(letter: DeadLetter) -> dict[str, Any]:
    """The fields to show: no secret, and only the kind of the target, as its URL may hold one."""
    record = letter.record
    return {
        "job": record.job_id,
        "message": record.message_id,
        "type": record.kind.event_type,
        "model": record.model,
        "lane": record.lane,
        "to": record.callback.kind if record.callback else "-",
        "attempts": record.attempt,
        "last_error": record.note,
        "happened": date(record.at_ms / 1000),
        "died": date(letter.died_ms / 1000),
    }
