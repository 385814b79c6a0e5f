"""`batchway record`: writes lengths, times, lanes and tenants of a fleet's jobs, never text.

A recording is what `batchway simulate` replays and `batchway plan --calibrate` compares with. Jobs
that were refused left no record.
"""

import argparse
import asyncio
import contextlib
import json
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from contract.connection import broker_errors
from contract.errors import BrokerUnavailable
from contract.function_types import JobRun
from contract.functions import decode_runs
from contract.jobs import TERMINAL_STATUSES
from contract.shards import OpenShards, Shard
from infra import options as opts

_EVERY_S = 1.0
_FIELDS = (
    *("state", "tenant", "model", "lane", "prompt_tokens", "tokens", "max_tokens"),
    *("created", "claimed", "first_token", "finished", "next", "runs"),
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
    num = record(
        redis_url, options.namespace, options.out, options.seconds, model=options.model_name
    )
    print(f"{num} jobs in {options.out}", file=sys.stderr)
    return 0


def record(
    redis_url: str, namespace: str, out: Path, seconds: float | None, *, model: str | None = None
) -> int:
    """Records for so long, or until Ctrl-C or SIGTERM (None); returns the number of jobs. Raises
    BrokerUnavailable if Redis does not answer at the start, WireError."""
    recording = _Recording(model)
    with contextlib.suppress(KeyboardInterrupt, asyncio.CancelledError):
        asyncio.run(_watch(OpenShards(redis_url, namespace), recording, seconds or float("inf")))
    return recording.write(out)


async def _watch(shards: OpenShards, recording: "_Recording", seconds: float) -> None:
    """Looks once a second, until the time is up or it is cancelled. If Redis does not answer any
    more, it goes on: what was seen is kept."""
    until_s, has_seen, is_over = time.monotonic() + seconds, False, False
    task = asyncio.current_task()
    if threading.current_thread() is threading.main_thread() and task is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    async with shards:
        while not is_over:
            is_over = await _waited(min(_EVERY_S, until_s - time.monotonic()))
            try:
                for shard in await shards.all():
                    with broker_errors(shard.client, "HMGET", record="records"):
                        await recording.look(shard)
                has_seen = True
            except BrokerUnavailable as exc:
                if not has_seen:
                    raise
                print(f"not read: {exc}", file=sys.stderr)


async def _waited(seconds: float) -> bool:
    """Waits; returns whether to look a last time: the time is up, or a signal came."""
    try:
        await asyncio.sleep(max(0.0, seconds))
    except asyncio.CancelledError:
        return True
    return seconds < _EVERY_S


class _Recording:
    """The jobs seen so far, by id, and what is known of their workers."""

    def __init__(self, model: str | None) -> None:
        self._model = model
        self._jobs: dict[str, dict[str, Any]] = {}
        self._fleet: dict[str, Any] = {}

    async def look(self, shard: Shard) -> None:
        """Reads a partition's jobs that had not ended before, and their workers."""
        client, keys, jobs = shard.client, shard.keys, self._jobs
        found_ids: Any = await client.hkeys(keys.of("stored", "jobs"))
        ids = [raw.decode() for raw in found_ids]
        new = [i for i in ids if jobs.get(i, {}).get("state") not in TERMINAL_STATUSES]
        async with client.pipeline(transaction=False) as pipe:
            for job_id in new:
                pipe.hmget(keys.of("job", job_id), _FIELDS)
            replies = await pipe.execute()
        for job_id, values in zip(new, replies, strict=True):
            found = {name: (raw or b"").decode() for name, raw in zip(_FIELDS, values, strict=True)}
            if found["state"] and self._model in (None, found["model"]):
                jobs[job_id] = found
        for model in {job["model"] for job in jobs.values()}:
            await self._look_at_workers(shard, model)

    async def _look_at_workers(self, shard: Shard, model: str) -> None:
        """Keeps the most live workers at a time, and the sizes of one."""
        client: Any = shard.client
        workers = (await shard.functions.snapshot(model, [])).workers
        if len(workers) <= self._fleet.get("workers", 0):
            return
        record = shard.keys.of("worker", workers[0].incarnation)
        raw = await client.hmget(record, "info", "max_jobs")
        start_ms = await client.hget(shard.keys.of("pool", model), "start_ms")
        info = json.loads(raw[0] or "{}")
        self._fleet = {
            "workers": len(workers),
            "max_num_seqs": int(raw[1] or 0),
            "load_s": int(start_ms or 0) / 1000,
            **{size: info.get(size, 0) for size in _SIZES},
        }

    def write(self, path: Path) -> int:
        """Writes what is known of the fleet, and a line for each job. Returns their number."""
        rows = sorted(self._jobs.values(), key=lambda job: int(job["created"]))
        first_ms = int(rows[0]["created"]) if rows else 0

        def since(text: str) -> float | None:
            return (int(text) - first_ms) / 1000 if text else None

        claims = [decode_runs(row["runs"].encode()) for row in rows]
        owners = sorted({claim.worker for runs in claims for claim in runs})
        names = {owner: f"worker-{number}" for number, owner in enumerate(owners, 1)}
        models = sorted({row["model"] for row in rows})
        path.touch(mode=0o600)
        with path.open("w", encoding="utf-8") as file:
            file.write(json.dumps({"fleet": self._fleet | {"models": models}}) + "\n")
            for row, runs in zip(rows, claims, strict=True):
                state = row["state"]
                job = {
                    "arrival_s": since(row["created"]),
                    "prompt_tokens": int(row["prompt_tokens"] or 0),
                    "output_tokens": int(row["tokens"] or 0),
                    "max_tokens": int(row["max_tokens"] or 0),
                    "lane": row["lane"],
                    "tenant": row["tenant"],
                    "state": "running" if state in ("claimed", "streaming") else state,
                    "worker": names[runs[-1].worker] if runs else "",
                    "claimed_s": since(row["claimed"]),
                    "first_token_s": since(row["first_token"]),
                    "finished_s": since(row["finished"]),
                    "attempts": max(1, len(runs)),
                    "recomputed_tokens": _recomputed(row, runs),
                }
                file.write(json.dumps(job) + "\n")
        return len(rows)


def _recomputed(row: dict[str, str], runs: Sequence[JobRun]) -> int:
    """Tokens that later claims computed again: each time the prompt and what had been logged. An
    event is taken to have as many tokens as another."""
    num_tokens, num_events = int(row["tokens"] or 0), int(row["next"] or 1) - 1
    num_events -= row["state"] in TERMINAL_STATUSES  # its end has a number too
    logged = [claim.first_number - 1 for claim in runs[1:] if claim.first_number > 1]
    return sum(int(row["prompt_tokens"]) + num_tokens * each // num_events for each in logged)
