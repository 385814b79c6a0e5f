"""Summarises runs under load as JSON, tables and CSV: counts, throughput and latencies."""

import csv
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.measure.http_calls import Call, Outcome
from infra.measure.load import LoadRun
from infra.tables import spread, table

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
    names = [load_name(found) for found in summaries]
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


def load_name(found: dict[str, Any]) -> str:
    """A load's name in tables and plots."""
    if found["rate_per_s"] is not None:
        return f"{found['rate_per_s']:g}/s"
    return "as traced" if found["is_open"] else f"{found['max_concurrency']} callers"


def write_csv(runs: Sequence[LoadRun], path: Path) -> None:
    """Writes one line per request, in seconds from the start of its run; no content."""
    names = (
        *("rate_per_s", "number", "outcome", "reason", "status", "arrival_s", "sent_s"),
        *("first_token_s", "end_s", "prompt_tokens", "output_tokens", "ttft_s", "mean_itl_s"),
        *("max_itl_s", "e2e_s"),
    )
    with path.open("w", newline="") as file:
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
