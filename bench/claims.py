"""What Redis takes for a claim: python -m bench.claims

Jobs whose prompts begin like no other are claimed one at a time, while workers hold other prompts:
what it costs to look for content where none is shared. `--before` names another checkout, which
takes turns with this one. The time is that of the functions, by the server's own statistics.
"""

import argparse
import asyncio
import itertools
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Sequence as Seq
from inspect import signature
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from bench.queue_peers.with_batchway import LANE, LEASE_S, MODEL, TERMS, make_job
from bench.tables import markdown_table
from contract.connection import connect
from contract.events import ChoiceDelta, Tokens
from contract.function_types import Append, Claimed, Submission
from contract.jobs import FinishReason, JobStatus
from contract.keys import Keys
from contract.library import ensure_library
from contract.roster import Roster
from infra.embedded_redis import EmbeddedRedis

HAS_MARKS = "marks" in Submission.__struct_fields__  # not in a checkout from before them
if HAS_MARKS:
    from contract.residence import marks_of, prefix_marks

_NUM_WORKERS = 4


async def claim_us(num_held: int = 500, num_claimed: int = 3000) -> float:
    """Microseconds of a claim."""
    with EmbeddedRedis() as server:
        async with connect(server.url, Keys()) as client:
            await ensure_library(client)
            roster = Roster(client, Keys())
            workers = itertools.cycle([f"w{number}" for number in range(_NUM_WORKERS)])
            for worker in itertools.islice(workers, _NUM_WORKERS):
                await roster.heartbeat(worker, MODEL, [], lease_s=LEASE_S, info="{}")
            await _submit(roster, num_held)
            for worker in itertools.islice(workers, num_held):
                items = [_end(claimed) for claimed in await _claim(roster, worker)]
                await roster.append(worker, items, lease_s=LEASE_S)
            await _submit(roster, num_claimed)
            before = await client.info("commandstats")
            for worker in itertools.islice(workers, num_claimed):
                assert len(await _claim(roster, worker)) == 1
            after = await client.info("commandstats")
    used_us = after["cmdstat_fcall"]["usec"] - before["cmdstat_fcall"]["usec"]
    return float(used_us / num_claimed)


async def _submit(roster: Roster, num: int) -> None:
    """Submits jobs as a gateway does."""
    rng = random.Random(num)
    for number in range(num):
        ids = tuple(rng.randrange(4, 50_000) for _ in range(400))
        job = replace(make_job(number), prompt_ids=ids)
        terms = replace(TERMS, marks=marks_of(job)) if HAS_MARKS else TERMS
        await roster.submit(job, terms)


async def _claim(roster: Roster, worker: str) -> Seq[Claimed]:
    terms: dict[str, Any] = {"lease_s": LEASE_S, "max_jobs": 1, "max_tokens": 2**40}
    if "prompt_token_s" in signature(roster.claim).parameters:
        terms["prompt_token_s"] = 1e-3
    return await roster.claim(worker, MODEL, (LANE,), **terms)


def _end(claimed: Claimed) -> Append:
    event, job = Tokens((ChoiceDelta(0, 0, (7, 8), "done", FinishReason.STOP),)), claimed.job
    end = Append(job.id, claimed.epoch, 1, event, 2, JobStatus.SUCCEEDED)
    return replace(end, held=prefix_marks(job.tenant, job.prompt_ids)) if HAS_MARKS else end


def measure_in(checkout: Path) -> float:
    """Measures in a checkout, in a process of its own."""
    done = subprocess.run(  # noqa: S603
        [sys.executable, __file__, "--once"],
        cwd=checkout,
        env=os.environ | {"PYTHONPATH": f"{checkout}"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return float(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--before", type=Path, help="another checkout")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.once:
        print(asyncio.run(claim_us()))
        return
    checkouts = {"before": given.before.absolute()} if given.before else {}
    checkouts["this"] = Path(__file__).parents[1]
    found: dict[str, list[float]] = {name: [] for name in checkouts}
    for _ in range(given.rounds):
        for name, checkout in checkouts.items():
            found[name].append(measure_in(checkout))
    rows = [["checkout", "a claim, µs: median", "least", "most"]]
    rows += [
        [name, *(f"{f(us):.1f}" for f in (statistics.median, min, max))]
        for name, us in found.items()
    ]
    print(markdown_table(rows))


if __name__ == "__main__":
    main()
