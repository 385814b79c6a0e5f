"""`batchway record`: writes lengths, times, lanes and tenants of a fleet's jobs, never text.

A recording is what `batchway simulate` replays and `batchway plan --calibrate` compares with. Jobs
that were refused left no record.
"""

import argparse
import asyncio
import contextlib
import json
import sys
import time
from pathlib import Path
from typing import Any

from contract.connection import broker_errors, connect
from contract.errors import wire_errors
from contract.jobs import TERMINAL_STATUSES
from contract.keys import Keys
from infra import options as opts

_EVERY_S = 1.0
_FIELDS = (
    *("state", "tenant", "model", "lane", "owner", "prompt_tokens", "tokens", "max_tokens"),
    *("created", "claimed", "first_token", "finished", "attempt"),
)
_SIZES = ("num_blocks", "block_size", "step_tokens")  # of a worker, as it reports them
_RECORDED = {
    "out": opts.Option("the file", opts.FILE, shown="required"),
    "seconds": opts.Option("how long to record", opts.SECONDS, shown="until Ctrl-C"),
    "model_name": opts.Option("of this model only", opts.NAME, shown="all"),
}


def add_record_options(parser: argparse.ArgumentParser) -> None:
    opts.add_options(parser, _RECORDED)
    opts.add_shared_options(parser, redis_default=opts.OF_RUNNING_UP)


def run_record(options: argparse.Namespace, redis_url: str) -> int:
    """Returns the exit status. Raises BrokerUnavailable, WireError."""
    if options.out is None:
        raise argparse.ArgumentTypeError("--out is missing: the file of the recording")
    jobs: dict[str, dict[str, Any]] = {}
    fleet: dict[str, Any] = {}
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_watch(redis_url, options, jobs, fleet))
    print(f"{_write(options.out, jobs, fleet)} jobs in {options.out}", file=sys.stderr)
    return 0


async def _watch(
    redis_url: str,
    options: argparse.Namespace,
    jobs: dict[str, dict[str, Any]],
    fleet: dict[str, Any],
) -> None:
    """Reads all jobs once a second, until the time is up or it is cancelled."""
    keys, until_s = Keys(options.namespace), time.monotonic() + (options.seconds or float("inf"))
    async with connect(redis_url) as client:
        is_over = False
        while not is_over:
            is_over = await _waited(min(_EVERY_S, until_s - time.monotonic()))
            with wire_errors("records"), broker_errors(client, "HMGET"):
                await _look(client, keys, options.model_name, jobs, fleet)


async def _waited(seconds: float) -> bool:
    """Waits; returns whether to look a last time: the time is up, or Ctrl-C came."""
    try:
        await asyncio.sleep(max(0.0, seconds))
    except asyncio.CancelledError:
        return True
    return seconds < _EVERY_S


async def _look(
    client: Any,
    keys: Keys,
    model: str | None,
    jobs: dict[str, dict[str, Any]],
    fleet: dict[str, Any],
) -> None:
    ids = [raw.decode() for raw in await client.hkeys(keys.of("stored", "jobs"))]
    new = [i for i in ids if jobs.get(i, {}).get("state") not in TERMINAL_STATUSES]
    async with client.pipeline(transaction=False) as pipe:
        for job_id in new:
            pipe.hmget(keys.of("job", job_id), _FIELDS)
        replies = await pipe.execute()
    models = set()
    for job_id, values in zip(new, replies, strict=True):
        found = {name: (raw or b"").decode() for name, raw in zip(_FIELDS, values, strict=True)}
        if found["state"] and model in (None, found["model"]):
            models.add(found["model"])
            before = jobs.get(job_id, {"owner": "", "attempt": "1", "again": 0})
            again = before["again"]
            if found["owner"] and int(found["attempt"] or 1) > int(before["attempt"] or 1):
                # While a job runs, its record has the tokens that were logged before.
                again += int(found["prompt_tokens"]) + int(found["tokens"] or 0)
            owner = found["owner"] or before["owner"]
            jobs[job_id] = found | {"owner": owner, "again": again}
    for name in models:
        workers = await client.zrange(keys.of("workers", name), 0, -1)
        if len(workers) > fleet.get("workers", 0):
            start_ms = await client.hget(keys.of("pool", name), "start_ms")
            raw = await client.hmget(keys.of("worker", workers[0].decode()), "info", "max_jobs")
            info, most = json.loads(raw[0] or "{}"), int(raw[1] or 0)
            sizes = {size: info.get(size, 0) for size in _SIZES}
            fleet |= {"workers": len(workers), "max_num_seqs": most, **sizes}
            fleet["load_s"] = int(start_ms or 0) / 1000


def _write(path: Path, jobs: dict[str, dict[str, Any]], fleet: dict[str, Any]) -> int:
    """Writes what is known of the fleet, and a line for each job. Returns their number."""
    rows = sorted(jobs.values(), key=lambda job: int(job["created"]))
    first_ms = int(rows[0]["created"]) if rows else 0

    def since(text: str) -> float | None:
        return (int(text) - first_ms) / 1000 if text else None

    names = {owner: f"worker-{i}" for i, owner in enumerate(sorted({r["owner"] for r in rows}), 1)}
    path.touch(mode=0o600)
    with path.open("w") as file:
        file.write(json.dumps({"fleet": fleet}) + "\n")
        for row in rows:
            state = row["state"]
            job = {
                "arrival_s": since(row["created"]),
                "prompt_tokens": int(row["prompt_tokens"] or 0),
                "output_tokens": int(row["tokens"] or 0),
                "max_tokens": int(row["max_tokens"] or 0),
                "lane": row["lane"],
                "tenant": row["tenant"],
                "state": "running" if state in ("claimed", "streaming") else state,
                "worker": names[row["owner"]] if row["owner"] else "",
                "claimed_s": since(row["claimed"]),
                "first_token_s": since(row["first_token"]),
                "finished_s": since(row["finished"]),
                "attempts": int(row["attempt"] or 1),
                "recomputed_tokens": row["again"],
            }
            file.write(json.dumps(job) + "\n")
    return len(rows)
