"""`batchway bench serve`: sends load to a server over HTTP and reports the results."""

import argparse
import asyncio
import csv
import logging
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from infra.measure.load import (
    KEY_VARIABLES,
    Call,
    Load,
    LoadClient,
    LoadRun,
    Outcome,
    authorization,
    run_load,
)
from infra.measure.plots import draw_runs
from infra.measure.workloads import (
    BadWorkload,
    Workload,
    arriving,
    chosen_workload,
    draw_arrivals,
    log_uniform_workload,
    read_trace,
)
from infra.tables import progress_line, spread, table, write

_CONNECT_S = 10.0
_CALLERS = 16  # of a closed loop, by default

_RATES = (
    *("wall s", "requests/s", "output tokens/s", "prompt tokens/s"),
    *("within SLO", "goodput requests/s"),
)
_COLUMNS = ("p50", "p99", "p99.9", "max")
_LATENCIES = {
    "ttft_s": "first token, from arrival",
    "ttft_from_sending_s": "first token, from sending",
    "itl_s": "between tokens",
    "e2e_s": "whole answer, from arrival",
}


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
    slo = Slo(*(ms and ms / 1000 for ms in (options.slo_ttft_ms, options.slo_itl_ms)))
    summaries = [summarise_load(run, slo) for run in runs]
    result = {"base_url": options.base_url, "model": model, "seed": options.seed, "runs": summaries}
    write(result, load_tables(summaries), options.json)
    if options.csv is not None:
        write_csv(runs, options.csv)
    if options.png is not None:
        draw_runs(runs, summaries, options.png)
    return 0 if any(found["num_succeeded"] for found in summaries) else 1


def make_loads(options: argparse.Namespace) -> list[Load]:
    """Returns one load per rate, or one closed loop, or a trace. Raises BadWorkload.

    Each rate has its own prompts, so that no prefix cache has them; those of a workload file are
    the same every time.
    """
    common = {"hang_up_share": options.cancel_share, "seed": options.seed}
    limit = options.max_concurrency
    if options.rate is None:
        workload = _workload(options, f"{options.seed}")
        is_open = options.trace is not None or any(r.arrival_s > 0 for r in workload.requests)
        if not is_open and limit is None:
            limit = _CALLERS
        return [Load(workload, is_open, limit, **common)]
    loads = []
    for rate_per_s in options.rate:
        seed = f"{options.seed} {rate_per_s:g}"
        workload = _workload(options, seed)
        arrivals = draw_arrivals(
            len(workload.requests), rate_per_s, options.arrivals, options.burstiness, seed
        )
        loads.append(Load(arriving(workload, arrivals), True, limit, rate_per_s, **common))
    return loads


def _workload(options: argparse.Namespace, seed: str) -> Workload:
    if options.workload is None and options.trace is not None:
        return read_trace(options.trace, options.vocab_size, seed)
    return chosen_workload(options, options.vocab_size, seed)


async def _measure(options: argparse.Namespace, loads: list[Load]) -> tuple[str, list[LoadRun]]:
    client = httpx.AsyncClient(
        base_url=options.base_url,
        headers=authorization(),
        timeout=httpx.Timeout(options.timeout_s, connect=_CONNECT_S),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
    )
    async with client:
        model = options.model or await _first_model(client)
        caller = LoadClient(client, model, options.prompt, options.plain)
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


@dataclass(frozen=True, slots=True)
class Slo:
    """Latency bounds of a good answer. None: no bound."""

    ttft_s: float | None = None  # from arrival
    itl_s: float | None = None  # mean time per token after the first

    def is_kept(self, call: Call) -> bool:
        """Whether a call succeeded within all bounds."""
        if call.outcome is not Outcome.SUCCEEDED:
            return False
        bounds = ((call.ttft_s, self.ttft_s), (call.mean_itl_s, self.itl_s))
        return all(found is None or bound is None or found <= bound for found, bound in bounds)


def summarise_load(run: LoadRun, slo: Slo) -> dict[str, Any]:
    """Seconds, tokens and requests per second. Latencies are of successful answers only;
    `output_tokens_received` also counts broken and cancelled answers."""
    calls = run.calls
    good = [call for call in calls if call.outcome is Outcome.SUCCEEDED]
    num_kept = sum(map(slo.is_kept, calls))
    num_output, num_prompt = (
        sum(getattr(call, name) for call in good)
        for name in ("num_output_tokens", "num_prompt_tokens")
    )
    outcomes = Counter(call.outcome for call in calls)
    reasons = Counter(f"{c.outcome}: {c.reason}" for c in calls if c.reason)
    return {
        "load": run.load.name,
        "rate_per_s": run.load.rate_per_s,
        "max_concurrency": run.load.max_concurrency,
        "is_open": run.load.is_open,
        "wall_s": run.wall_s,
        "num_requests": len(calls),
        **{f"num_{outcome}": outcomes[outcome] for outcome in Outcome},
        "reasons": dict(sorted(reasons.items())),
        "requests_per_s": len(good) / run.wall_s,
        "output_tokens_per_s": num_output / run.wall_s,
        "prompt_tokens_per_s": num_prompt / run.wall_s,
        "output_tokens": num_output,
        "prompt_tokens": num_prompt,
        "output_tokens_received": sum(call.num_output_tokens for call in calls),
        "slo": {"ttft_s": slo.ttft_s, "itl_s": slo.itl_s},
        "num_within_slo": num_kept,
        "goodput_requests_per_s": num_kept / run.wall_s,
        "sent_late_s": spread([call.sent_s - call.arrival_s for call in calls]),
        "ttft_s": spread(_known(call.ttft_s for call in good)),
        "ttft_from_sending_s": spread(_known(call.ttft_from_sending_s for call in good)),
        "itl_s": spread([itl for call in good for itl in call.itls_s]),
        "e2e_s": spread([call.e2e_s for call in good]),
    }


def load_tables(summaries: Sequence[dict[str, Any]]) -> str:
    """Returns separate tables of outcomes, throughput and latencies."""
    names = [found["load"] for found in summaries]
    heads = ("load", "requests", *(str(o) for o in Outcome))
    counts: list[Sequence[str]] = [heads]
    counts += [
        (name, str(found["num_requests"]), *(str(found[f"num_{o}"]) for o in Outcome))
        for name, found in zip(names, summaries, strict=True)
    ]
    rates: list[Sequence[str]] = [("load", *_RATES)]
    rates += [(name, *_rates(found)) for name, found in zip(names, summaries, strict=True)]
    parts = [table(counts), table(rates)]
    for name, found in zip(names, summaries, strict=True):
        rows: list[Sequence[str]] = [(f"{name}: latency, ms", *_COLUMNS)]
        rows += [(text, *_cells(found[key])) for key, text in _LATENCIES.items()]
        if found["is_open"]:
            rows.append(("sent later than due", *_cells(found["sent_late_s"])))
        parts.append(table(rows))
        if found["reasons"]:
            shown = [(reason, str(num)) for reason, num in found["reasons"].items()]
            parts.append(table([(f"{name}: not answered because", "requests"), *shown]))
    return "\n\n".join(parts)


def write_csv(runs: Sequence[LoadRun], path: Path) -> None:
    """Writes one line per request, in seconds from the start of its run; no content."""
    names = (
        *("rate_per_s", "number", "outcome", "reason", "status", "arrival_s", "sent_s"),
        *("first_token_s", "end_s", "prompt_tokens", "output_tokens", "ttft_s", "mean_itl_s"),
        *("max_itl_s", "e2e_s"),
    )
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        for run in runs:
            writer.writerows(_line(run, call) for call in run.calls)


def _line(run: LoadRun, call: Call) -> tuple[object, ...]:
    return (
        *(run.load.rate_per_s, call.number, call.outcome, call.reason, call.status),
        *(call.arrival_s, call.sent_s, call.chunk_times_s[0] if call.chunk_times_s else None),
        *(call.end_s, call.num_prompt_tokens, call.num_output_tokens, call.ttft_s),
        *(call.mean_itl_s, max(call.itls_s, default=None), call.e2e_s),
    )


def _rates(found: dict[str, Any]) -> tuple[str, ...]:
    num_wanted = found["num_requests"] - found["num_cancelled"]
    return (
        f"{found['wall_s']:.2f}",
        f"{found['requests_per_s']:.2f}",
        f"{found['output_tokens_per_s']:.1f}",
        f"{found['prompt_tokens_per_s']:.1f}",
        "-" if not num_wanted else f"{found['num_within_slo'] / num_wanted:.1%}",
        f"{found['goodput_requests_per_s']:.2f}",
    )


def _cells(found: dict[str, float | None]) -> list[str]:
    values = [found[column] for column in _COLUMNS]
    return ["-" if value is None else f"{1000 * value:.1f}" for value in values]


def _known(values: Any) -> list[float]:
    return [value for value in values if value is not None]
