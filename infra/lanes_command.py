"""`batchway lanes`: pauses and resumes lanes and tenants, by Redis alone."""

import argparse
import asyncio

from contract.pauses import Pause, PauseLine
from contract.shards import OpenShards
from infra import options as opts
from infra.option_values import model_name
from infra.options import Option, Value
from infra.preconditions import UsageError
from infra.tables import date, table, write
from workers.settings import LANES

LANES_ACTIONS = ("list", "pause", "resume")
EXIT_NOT_PAUSED = 1
_ALL = "all"


def add_lanes_options(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    opts.add_action(kinds, "list", "list what is paused")
    pause = opts.add_action(kinds, "pause", "accept no new jobs, keep the waiting ones in order")
    resume = opts.add_action(kinds, "resume", "end a pause, given the same options")
    for action in (pause, resume):
        which = {
            "lane": Option("only this lane", LANES, shown="every lane"),
            "tenant": Option("only this tenant", opts.NAME, shown="every tenant"),
            "model": Option("only this model", Value(model_name, "NAME"), shown="every model"),
        }
        opts.add_options(action, which)


def run_lanes(options: argparse.Namespace, redis_url: str) -> int:
    """Runs one action; returns the exit status. Raises BrokerUnavailable, WireError,
    UsageError."""
    return asyncio.run(_run(options, redis_url))


async def _run(options: argparse.Namespace, redis_url: str) -> int:
    async with OpenShards(redis_url, options.namespace) as shards:
        if options.kind == "list":
            return _list(options, await shards.first.pauses.all())
        line = PauseLine(options.model or "", options.lane or "", options.tenant or "")
        if line == PauseLine():
            raise UsageError("give --lane, --tenant or --model")
        if options.kind == "pause":
            begun = await shards.each(lambda shard: shard.pauses.pause(line, "operator"))
            write(_shown(begun[0]), f"paused: {_words(line)}", options.json)
            return 0
        was_paused = any(await shards.each(lambda shard: shard.pauses.resume(line, "operator")))
        text = f"resumed: {_words(line)}" if was_paused else f"not paused: {_words(line)}"
        write({"resumed": was_paused}, text, options.json)
        return 0 if was_paused else EXIT_NOT_PAUSED


def _list(options: argparse.Namespace, found: list[Pause]) -> int:
    rows = [("lane", "tenant", "model", "since", "by")]
    for pause in found:
        names = (name or _ALL for name in (pause.line.lane, pause.line.tenant, pause.line.model))
        lane, tenant, model = names
        rows.append((lane, tenant, model, date(pause.since_ms / 1000), pause.by))
    text = table(rows) if found else "nothing is paused"
    write({"pauses": [_shown(pause) for pause in found]}, text, options.json)
    return 0


def _words(line: PauseLine) -> str:
    return f"lane {line.lane or _ALL}, tenant {line.tenant or _ALL}, model {line.model or _ALL}"


def _shown(pause: Pause) -> dict[str, str | float | None]:
    line = pause.line
    return {
        "lane": line.lane or None,
        "tenant": line.tenant or None,
        "model": line.model or None,
        "since": pause.since_ms / 1000,
        "by": pause.by,
    }
