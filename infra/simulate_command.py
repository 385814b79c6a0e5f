"""Options and tables of `batchway simulate`; infra/planning simulates."""

import argparse
import importlib
import itertools
import re
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from infra import options as opts
from infra.option_values import integer, names_of, number
from infra.plan_command import DEVICE
from infra.preconditions import check_extra
from infra.tables import progress_line, table, write

_FAULT = re.compile(r"(\d+(?:\.\d+)?):(kill|engine|spot|roll|pause:(\d+(?:\.\d+)?))")
_DRAWN = 1000  # requests, unless --requests says another number
_POSITIVE = number(may_be_zero=False)
_TIMES = {"ttft_s": "first token", "itl_s": "between tokens", "e2e_s": "whole answer"}
_TURN_TIMES = {
    "first_turns_ttft_s": "first token, first turns",
    "later_turns_ttft_s": "first token, later turns",
}


def _fault(raw: str) -> tuple[float, str, float]:
    match = _FAULT.fullmatch(raw)
    if match is None:
        kinds = "kill, engine, spot, roll or pause:SECONDS"
        raise argparse.ArgumentTypeError(f"must be SECONDS:{kinds}, not {raw!r}")
    return float(match[1]), match[2].partition(":")[0], float(match[3] or 0)


def _turns(raw: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)(?::(\d+))?", raw)
    fewest, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= fewest <= most:
        raise argparse.ArgumentTypeError(f"must be N or FEWEST:MOST, not {raw!r}")
    return fewest, most


_LOAD = {
    "trace": opts.Option(
        "arrivals: a recording, or a trace of Azure, of Mooncake or of `bench load`",
        opts.FILE,
        shown="drawn by --rate",
    ),
    "scale": opts.Option(
        "times as many requests as the trace has, in the same pattern",
        opts.Value(_POSITIVE, "N"),
        1.0,
    ),
    "speed": opts.Option("times as fast as the trace's arrivals", opts.Value(_POSITIVE, "N"), 1.0),
    "rate": opts.Option("requests per second, without --trace", opts.Value(_POSITIVE, "N"), 1.0),
    "requests": opts.Option(
        "the most requests", opts.COUNT, shown="all of the trace, or 1000 drawn ones"
    ),
    "isl": opts.Option("tokens of a drawn prompt", opts.COUNT, 1024),
    "osl": opts.Option("tokens of a drawn output, on average", opts.COUNT, 256),
    "turns": opts.Option(
        "each of these requests begins a session of so many turns, or of a number between two",
        opts.Value(_turns, "FEWEST:MOST"),
        (1, 1),
        shown="1",
    ),
    "turn_tokens": opts.Option("that a later turn adds to its prompt", opts.COUNT, 64),
    "pause_s": opts.Option("from an answer to the next turn, on average", opts.SECONDS, 2.0),
    "retries": opts.Option(
        "how often a refused caller comes back, as openai's client does",
        opts.Value(integer(0), "N"),
        2,
    ),
    "seed": opts.Option("of all random choices", opts.Value(int, "N"), 1),
}
_FLEET = {
    "costs": opts.Option(
        "step times, as `plan --calibrate` or `profile --fit` wrote them",
        opts.FILE,
        shown="by --model and --device",
    ),
    **DEVICE,
    "batching": opts.Option("a batching.yaml of the workers", opts.FILE, shown="none"),
    "max_num_seqs": opts.Option(
        "sequences that a worker runs at once", opts.COUNT, shown="the file's, or that of --costs"
    ),
    "workers": opts.Option("workers at the start", opts.Value(integer(0), "N"), 1),
    "max_workers": opts.Option(
        "the number of workers follows the work, up to this", opts.COUNT, shown="it does not"
    ),
    "load_s": opts.Option("from a worker's start to its first job", opts.SECONDS, 60.0),
    "fault": opts.Option(
        "what happens when: a worker is killed, its engine dies, it is reclaimed, all workers are "
        "replaced, Redis does not answer; may be repeated",
        opts.Value(_fault, "SECONDS:KIND"),
        [],
    ),
    "without": opts.Option(
        "left out, to compare: claims that look where content lies (residence), names of sessions "
        "in calls (sessions), blocks that stay while a tool runs (retention)",
        opts.Value(names_of(("residence", "sessions", "retention")), "NAMES"),
        (),
    ),
}
_SHOWN = {
    "ttft": opts.Option(
        "goodput counts answers whose first token came within these ms",
        opts.Value(_POSITIVE, "MS"),
        shown="any",
    ),
    "itl": opts.Option(
        "and whose mean time between tokens is within these ms",
        opts.Value(_POSITIVE, "MS"),
        shown="any",
    ),
    "price": opts.Option(
        "of a GPU for an hour, in any currency", opts.Value(_POSITIVE, "PRICE"), shown="no cost"
    ),
    "html": opts.Option("write a report with plots there", opts.FILE),
}


def add_simulate_options(parser: argparse.ArgumentParser) -> None:
    opts.add_options(parser.add_argument_group("the requests"), _LOAD)
    opts.add_options(parser.add_argument_group("the fleet"), _FLEET)
    opts.add_options(parser.add_argument_group("the results"), _SHOWN)
    opts.add_options(parser, opts.JSON)


def run_simulate(options: argparse.Namespace) -> int:
    """Returns the exit status. Raises UsageError."""
    check_extra("serve")
    if options.html is not None:
        check_extra("bench")
    # Imported by name: the command line itself must not load torch.
    fleets: Any = importlib.import_module("infra.planning.fleets")
    simulation: Any = importlib.import_module("infra.planning.simulation")
    traces: Any = importlib.import_module("infra.planning.traces")
    outcomes: Any = importlib.import_module("infra.planning.outcome")
    embedded: Any = importlib.import_module("infra.embedded_redis")
    fleet = fleets.fleet_of(options)
    arrivals: Iterable[Any] = _arrivals(options, traces)
    goal = outcomes.Goal(options.ttft and options.ttft / 1000, options.itl and options.itl / 1000)
    faults = [simulation.Fault(*each) for each in options.fault]
    started_s = time.monotonic()
    with embedded.EmbeddedRedis() as server:
        run = simulation.Simulation(
            fleet,
            server.url,
            outcomes.SimulationOutcome(goal),
            seed=options.seed,
            retries=options.retries,
            without=options.without,
        )
        found = run.run(arrivals, faults, _shown(options))
    took_s = time.monotonic() - started_s
    result = found.as_dict(options.price)
    result["errors"] = fleets.errors_of(fleet)
    text = "\n\n".join([_text(result), _band(result["errors"])])
    if options.html is not None:
        report: Any = importlib.import_module("infra.planning.report")
        Path(options.html).write_text(report.html(found, text), encoding="utf-8")
    write(result, text, options.json)
    num_tokens = found.all_calls().num_tokens
    print(
        f"{took_s:.1f} s for {found.num_arrivals} requests: {found.num_arrivals / took_s:,.0f} "
        f"requests and {num_tokens / took_s:,.0f} tokens a second",
        file=sys.stderr,
    )
    return 0


def _arrivals(options: argparse.Namespace, traces: Any) -> Iterable[Any]:
    found = _first_turns(options, traces)
    if options.turns == (1, 1):
        return found
    turns = options.turns, options.turn_tokens, options.pause_s
    return traces.conversing(found, *turns, options.seed)  # type: ignore[no-any-return]


def _first_turns(options: argparse.Namespace, traces: Any) -> Iterable[Any]:
    if options.trace is None:
        num = options.requests or _DRAWN
        return traces.drawn(num, options.rate, options.isl, options.osl, 0.5, options.seed)  # type: ignore[no-any-return]
    found = traces.read_arrivals(options.trace)
    if options.scale != 1.0:
        found = traces.scaled(found, options.scale, options.seed)
    if options.speed != 1.0:
        found = traces.faster(found, options.speed)
    return itertools.islice(found, options.requests)


def _shown(options: argparse.Namespace) -> Any:
    if options.turns == (1, 1) and (options.trace is None or options.requests):
        bar, num_all = progress_line("requests"), options.requests or _DRAWN
        return lambda now_s, num: bar(num, num_all)
    if not sys.stderr.isatty():
        return lambda now_s, num: None
    return lambda now_s, num: print(
        f"\r{num} requests in {now_s:.0f} s", end="", file=sys.stderr, flush=True
    )


def _text(result: dict[str, Any]) -> str:
    states = ", ".join(f"{num} {state}" for state, num in result["states"].items())
    refusals = ", ".join(f"{num} by {reason}" for reason, num in result["refusals"].items())
    retry = result["retry_after_s"]["p50"]
    parts = [
        f"{result['requests']} requests in {result['duration_s']:,.0f} s: {states}. "
        f"{result['requests_per_s']:,.2f} answers and {result['output_tokens_per_s']:,.0f} output "
        "tokens a second"
    ]
    if refusals:
        told = "" if retry is None else f"; half were told to wait {retry:.1f} s or less"
        parts.append(f"refused {result['refused_share']:.1%}: {refusals}{told}")
    rows: list[tuple[str, ...]] = [("", "mean", "p50", "p90", "p99")]
    is_of_sessions = result["later_turns_ttft_s"]["p50"] is not None
    times = _TIMES | (_TURN_TIMES if is_of_sessions else {})
    rows += [(title, *map(_ms, result[name].values())) for name, title in times.items()]
    parts.append(table(rows))
    parts.append(
        f"{result['found_share']:.1%} of the tokens of prompts were found in a cache, "
        f"{result['prompt_tokens_computed']:,} were computed"
    )
    lanes = [("lane, tenant", "answers", "good", "goodput/s", "first token p50", "p99")]
    lanes += [
        (name, f"{part['requests']}", f"{part['good_share']:.1%}", f"{part['goodput_per_s']:.2f}",
         _ms(part["ttft_s"]["p50"]), _ms(part["ttft_s"]["p99"]))
        for name, part in result["lanes"].items()
    ]  # fmt: skip
    parts.append(table(lanes))
    cost = result["cost"]
    price = "" if cost is None else (
        f", {cost:.3g} in all, {result['cost_per_million_tokens']:.3g} for a million output tokens"
    )  # fmt: skip
    parts.append(
        f"{result['gpu_hours']:.3g} hours of a GPU, {result['gpu_used']:.0%} of them in steps, "
        f"{result['batch_size']:.1f} sequences in a step{price}"
    )
    if result["resumes"]:
        parts.append(
            f"{result['resumes']} jobs were resumed, {result['recomputed_tokens']} tokens of their "
            "prompts and outputs computed again"
        )
    return "\n\n".join(parts)


def _band(errors: dict[str, float]) -> str:
    """What is known of how wrong the figures are."""
    if not errors:
        return (
            "How wrong this is was not measured: `batchway plan --calibrate` compares with a fleet."
        )
    known = ", ".join(f"{name} {error:+.0%}" for name, error in errors.items())
    return f"Off in calibration by: {known}"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:,.1f} ms"
