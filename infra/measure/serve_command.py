"""`batchway bench serve`: sends load to a server over HTTP and reports the results."""

import argparse
import asyncio
import logging
import os
import random
import sys
from collections.abc import Callable

import httpx

from infra.measure.arrivals import TraceEntry, draw_arrivals, read_trace
from infra.measure.http_calls import Call, Caller
from infra.measure.load import Load, LoadRun, run_load
from infra.measure.serve_report import Slo, load_tables, summarise_load, write_csv
from infra.measure.workloads import (
    BadWorkload,
    Workload,
    arriving,
    draw_request,
    log_uniform_workload,
    read_workload,
)
from infra.tables import progress_line, write

KEY_VARIABLES = ("BATCHWAY_API_KEY", "OPENAI_API_KEY")
_CONNECT_S = 10.0
_CALLERS = 16  # of a closed loop, by default


class ServerRefuses(RuntimeError):
    """The server lists no model. The message is one sentence."""


def run(options: argparse.Namespace) -> int:
    logging.getLogger("httpx").setLevel("WARNING")  # it would log every request
    try:
        loads = make_loads(options)
        model, runs = asyncio.run(_measure(options, loads))
    except (BadWorkload, ServerRefuses) as exc:
        print(f"batchway bench serve: {exc}", file=sys.stderr)
        return 1
    slo = Slo(_seconds(options.slo_ttft_ms), _seconds(options.slo_itl_ms))
    summaries = [summarise_load(run, slo) for run in runs]
    result = {"base_url": options.base_url, "model": model, "seed": options.seed, "runs": summaries}
    write(result, load_tables(summaries), options.json)
    if options.csv is not None:
        write_csv(runs, options.csv)
    if options.png is not None:
        from infra.measure.serve_plot import draw_runs

        draw_runs(runs, summaries, options.png)
    return 0 if any(found["num_succeeded"] for found in summaries) else 1


def make_loads(options: argparse.Namespace) -> list[Load]:
    """Returns one load per rate, or one closed loop, or a trace. Raises BadWorkload.

    Each rate has its own prompts, so that no prefix cache has them; those of a workload file are
    the same every time.
    """
    trace = None if options.trace is None else read_trace(options.trace)
    common = {"hang_up_share": options.cancel_share, "seed": options.seed}
    limit = options.max_concurrency
    if options.rate is None:
        workload = _workload(options, trace, f"{options.seed}")
        is_open = trace is not None or any(r.arrival_s > 0 for r in workload.requests)
        if not is_open and limit is None:
            limit = _CALLERS
        return [Load(workload, is_open, limit, **common)]
    loads = []
    for rate_per_s in options.rate:
        seed = f"{options.seed} {rate_per_s:g}"
        workload = _workload(options, trace, seed)
        arrivals = draw_arrivals(
            len(workload.requests), rate_per_s, options.arrivals, options.burstiness, seed
        )
        loads.append(Load(arriving(workload, arrivals), True, limit, rate_per_s, **common))
    return loads


def _workload(options: argparse.Namespace, trace: list[TraceEntry] | None, seed: str) -> Workload:
    if options.workload is not None:
        return read_workload(options.workload)
    if trace is not None:
        rng, size = random.Random(seed), options.vocab_size
        drawn = (draw_request(rng, size, e.prompt_tokens, e.max_tokens, e.arrival_s) for e in trace)
        return Workload(tuple(drawn))
    return log_uniform_workload(
        options.requests,
        options.vocab_size,
        prompt_tokens=options.prompt_tokens,
        output_tokens=options.output_tokens,
        seed=seed,
    )


async def _measure(options: argparse.Namespace, loads: list[Load]) -> tuple[str, list[LoadRun]]:
    key = next((os.environ[name] for name in KEY_VARIABLES if os.environ.get(name)), None)
    client = httpx.AsyncClient(
        base_url=options.base_url,
        headers={"authorization": f"Bearer {key}"} if key else {},
        timeout=httpx.Timeout(options.timeout_s, connect=_CONNECT_S),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
    )
    async with client:
        model = options.model or await _first_model(client)
        caller = Caller(client, model, options.prompt, options.plain)
        if options.warm_up:
            await run_load(caller, _warm_up_load(options))
        runs = [await run_load(caller, load, progress=_progress(load)) for load in loads]
    return model, runs


def _warm_up_load(options: argparse.Namespace) -> Load:
    """A load that is not counted, of prompts that share no prefix with measured requests."""
    workload = log_uniform_workload(
        options.warm_up,
        options.vocab_size,
        prompt_tokens=options.prompt_tokens,
        output_tokens=(1, 8),
        seed=f"{options.seed} warm-up",
    )
    return Load(workload, is_open=False, max_concurrency=options.warm_up)


async def _first_model(client: httpx.AsyncClient) -> str:
    try:
        answer = await client.get("models")
        answer.raise_for_status()
        return str(answer.json()["data"][0]["id"])
    except httpx.HTTPStatusError as exc:
        hint = f": set {KEY_VARIABLES[0]}" if exc.response.status_code == 401 else ""
        status = exc.response.status_code
        raise ServerRefuses(f"{client.base_url}models answers {status}{hint}") from exc
    except httpx.HTTPError as exc:
        raise ServerRefuses(f"{client.base_url} does not answer: {type(exc).__name__}") from exc
    except (ValueError, KeyError, IndexError, TypeError) as exc:
        raise ServerRefuses(f"{client.base_url}models lists no model: give --model") from exc


def _progress(load: Load) -> Callable[[Call], None]:
    name = "" if load.rate_per_s is None else f" at {load.rate_per_s:g}/s"
    show, num_done = progress_line(f"requests{name}"), 0

    def note(call: Call) -> None:
        nonlocal num_done
        num_done += 1
        show(num_done, len(load.workload.requests))

    return note


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000
