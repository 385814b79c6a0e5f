"""`batchway drain`: orders workers to drain and shows their progress."""

import argparse
import asyncio
import sys

from contract.catalogue import Catalogue
from contract.roster import Roster
from contract.shards import OpenShards
from infra import options as opts
from infra.preconditions import Failed
from infra.tables import write

_POLL_S = 0.5


def add_drain_options(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument(
        "--worker",
        action="append",
        metavar="INCARNATION",
        help="a worker, as its log line `ready` names it; may be repeated (default: refused)",
    )
    which.add_argument(
        "--all", action="store_true", help="every worker that takes jobs (default: refused)"
    )
    parser.add_argument(
        "--wait",
        action="store_true",
        help="return once they have left, and show what they still hold (default: return at once)",
    )
    opts.add_shared_options(parser, redis_default=opts.OF_RUNNING_UP)
    opts.add_options(parser, opts.JSON)


def run_drain(options: argparse.Namespace, redis_url: str) -> int:
    """Returns the exit status. Raises Failed, BrokerUnavailable."""
    asyncio.run(_run(options, redis_url))
    return 0


async def _run(options: argparse.Namespace, redis_url: str) -> None:
    async with OpenShards(redis_url, options.namespace) as shards:
        drained = await _drain(shards, options)
        if options.wait:
            await asyncio.gather(*(_follow(*found) for found in drained.items()))
        text = f"workers that {'have left' if options.wait else 'must drain'}: {len(drained)}"
        write({"workers": list(drained), "have_left": options.wait}, text, options.json)


async def _drain(shards: OpenShards, options: argparse.Namespace) -> dict[str, Roster]:
    """The workers that must drain, each with the roster of its partition."""
    cards = await Catalogue(shards.first.client, shards.first.keys).models()
    models = [card.name for card in cards]
    rosters = [Roster(shard.client, shard.keys) for shard in await shards.all()]
    there = {view.incarnation: r for r in rosters for view in await r.workers(models)}
    wanted = there if options.all else dict.fromkeys(options.worker)
    found = {name: r for name in wanted for r in rosters if await r.worker(name) is not None}
    if missing := [name for name in wanted if name not in found]:
        names = ", ".join(there) or "none"
        raise Failed(
            f"there is no worker {', '.join(missing)}; nothing was changed. Workers: {names}"
        )
    for name, roster in found.items():
        await roster.drain([name])
    return found


async def _follow(incarnation: str, roster: Roster) -> None:
    """Prints each change to standard error until the worker has left."""
    before = ""
    while (view := await roster.worker(incarnation)) is not None:
        state = "draining" if view.is_draining else "drain ordered"
        now = f"{state}, jobs held: {view.num_jobs_held}"
        if now != before:
            print(f"{incarnation}: {now}", file=sys.stderr)
        before = now
        await asyncio.sleep(_POLL_S)
    print(f"{incarnation}: has left", file=sys.stderr)
