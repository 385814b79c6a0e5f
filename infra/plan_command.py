"""Options and tables of `batchway plan`; infra/planning computes."""

import argparse
import importlib
import itertools
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from contract.errors import BrokerUnavailable
from infra import options as opts
from infra.option_values import integer, number
from infra.planning.devices import DEVICES, ENGINES, ITEM_BYTES
from infra.preconditions import Failed
from infra.record_command import record
from infra.tables import table, write

_HEADING = ("callers", "tokens/s", "first token", "p99", "between tokens", "answer")
_MS = opts.Value(number(may_be_zero=False), "MS")


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(map(integer(1), text.split(",")))


DEVICE = {
    "model": opts.Option("a model's folder, or its config.json", opts.FILE, shown="required"),
    "device": opts.Option("the GPU", tuple(DEVICES), "h100_sxm"),
    "engine": opts.Option("the engine", tuple(ENGINES), "vllm"),
    "precision": opts.Option("of the weights", tuple(ITEM_BYTES), shown="the configuration's"),
    "memory_share": opts.Option("of the GPU's memory that the engine may use", opts.SHARE, 0.9),
}
_WORK = {
    "isl": opts.Option("tokens of a prompt", opts.COUNT, 1024),
    "osl": opts.Option("tokens of an output", opts.COUNT, 256),
    "rate": opts.Option(
        "requests per second, for replicas and waiting",
        opts.Value(number(may_be_zero=False), "PER_S"),
    ),
    "ttft": opts.Option("longest time to a first token, in ms", _MS),
    "itl": opts.Option("longest time between two tokens, in ms", _MS),
    "at": opts.Option("numbers of callers to report on", opts.Value(_sizes, "N,N"), ()),
    "price": opts.Option(
        "of one GPU for an hour, in any currency",
        opts.Value(number(may_be_zero=False), "PRICE"),
        shown="the cost is shown in seconds of a GPU",
    ),
    "yaml": opts.Option("write a batching.yaml there", opts.FILE, shown="shown only"),
    "explain": opts.Option(
        "say in words which strategy suits the workload, and try all on it", None, shown="no"
    ),
    "trace": opts.Option(
        "the workload to explain, as `batchway simulate` takes it", opts.FILE, shown="--rate"
    ),
}
_CALIBRATION = {
    "calibrate": opts.Option(
        "compare with a recording, or with the fleet at a Redis URL; needs no --model",
        opts.NAME,
        shown="no",
    ),
    **opts.NAMESPACE,
    "seconds": opts.Option("how long to watch the fleet", opts.SECONDS, 300.0),
    "costs": opts.Option(
        "write step times with their errors there, for `batchway simulate`", opts.FILE, shown="no"
    ),
}


def add_plan_options(parser: argparse.ArgumentParser) -> None:
    opts.add_options(parser.add_argument_group("the model and its device"), DEVICE)
    opts.add_options(parser.add_argument_group("what is asked of it"), _WORK)
    opts.add_options(parser.add_argument_group("a running fleet"), _CALIBRATION)
    opts.add_options(parser, opts.JSON)


def run_plan(options: argparse.Namespace) -> int:
    if options.calibrate is not None:
        return _run_calibration(options)
    if options.model is None:
        raise argparse.ArgumentTypeError("--model is missing: a model's folder, or its config.json")
    # Imported by name: the command line itself must not load torch.
    planning: Any = importlib.import_module("infra.planning.plan")
    shapes: Any = importlib.import_module("infra.planning.shapes")
    shape = shapes.read_shape(options.model)
    server = planning.server_of(
        shape,
        options.device,
        options.engine,
        options.precision or shape.precision,
        options.memory_share,
    )
    goal = planning.Goal(
        options.ttft and options.ttft / 1000, options.itl and options.itl / 1000, options.rate
    )
    work = planning.RequestLengths(options.isl, options.osl)
    plan = planning.make_plan(server, work, goal, options.at, _say)
    if options.explain:
        return _explain(options, plan)
    file = planning.batching_yaml(plan)
    if options.yaml is not None:
        Path(options.yaml).write_text(file, encoding="utf-8")
    result = plan.as_dict() | {"device": options.device, "engine": options.engine}
    reasons = {name: why for name, (_, why) in planning.PRESETS.items()}
    write(result, _text(plan, options, file, reasons), options.json)
    return 0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _text(plan: Any, options: argparse.Namespace, file: str, reasons: Mapping[str, str]) -> str:
    sizes, work = plan.server.sizes, plan.work
    parts = [
        f"{sizes.shape.name} in {sizes.precision} on {options.device} with {options.engine}, "
        f"{work.isl} tokens in and {work.osl} out: weights {sizes.weight_bytes / 1e9:.1f} GB, "
        f"{sizes.kv_bytes(work.length) / 1e6:.1f} MB of KV for each of at most "
        f"{plan.largest_batch} sequences",
        f"Times between tokens are wrong by {plan.server.engine.error:.0%} on average, over the "
        "points that the engine's figures are fitted to.",
    ]
    if plan.points:
        parts.append(_table("asked for", {"": plan.points}))
    parts.append(_table("by the number of callers", {"": plan.curve}))
    parts.append(_table("presets", {name: (point,) for name, point in plan.presets.items()}))
    parts.append("\n".join(f"{name}: {why}" for name, why in reasons.items()))
    parts.append(
        _table(
            f"{plan.batch} callers whose outputs differ by half",
            {name: (point,) for name, point in plan.strategies.items()},
        )
    )
    cost = f", {plan.gpu_s_per_million * options.price / 3600:.3g}" if options.price else ""
    parts.append(
        f"Batch size {plan.batch}: {plan.binds} binds. Throughput for the time of an answer is "
        f"best at {plan.knee}. A million output tokens take {plan.gpu_s_per_million:,.0f} s of "
        f"a GPU{cost}. Use up to {plan.utilisation:.0%} of the places."
    )
    if queue := plan.queue:
        times_s = (queue.wait_s, queue.simulated_ttft_s, queue.simulated_ttft_p99_s, queue.window_s)
        wait, first, p99, window = (f"{1000 * each:.0f} ms" for each in times_s)
        parts.append(
            f"{queue.replicas} replicas, {queue.utilisation:.0%} used. Mean wait for a place "
            f"{wait} by M/G/k; simulated first token {first}, p99 {p99}. A dynamic batch would "
            f"gather for {window}."
        )
    rows = [("device", "precision", "tokens/s")]
    rows += [(device, precision, f"{rate:,.0f}") for device, precision, rate in plan.alternatives]
    parts.append(f"alternatives, each with half of the sequences that fit\n{table(rows)}")
    parts.append(f"batching.yaml\n{file}")
    return "\n\n".join(parts)


def _table(title: str, rows: dict[str, tuple[Any, ...]]) -> str:
    named = any(rows)
    cells = [(*(("",) if named else ()), *_HEADING)]
    for name, points in rows.items():
        cells += [(*((name,) if named else ()), *_cells(point)) for point in points]
    return f"{title}\n{table(cells)}"


def _cells(point: Any) -> tuple[str, ...]:
    times = (point.ttft_s, point.ttft_p99_s, point.itl_s, point.e2e_s)
    return (
        f"{point.concurrency:g}",
        f"{point.output_tokens_per_s:,.0f}",
        *(f"{1000 * each:,.1f} ms" for each in times),
    )


# --- a running fleet --------------------------------------------------------------------------


def _run_calibration(options: argparse.Namespace) -> int:
    calibration: Any = importlib.import_module("infra.planning.calibration")
    traces: Any = importlib.import_module("infra.planning.traces")
    messages: Any = importlib.import_module("workers.ipc.messages")
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(options.calibrate)
            if "://" in options.calibrate:
                path = Path(folder) / "recording.jsonl"
                _say(f"watching for {options.seconds:g} s")
                record(options.calibrate, options.namespace, path, options.seconds)
            fleet, jobs = traces.read_recording(path)
        found = calibration.calibrate(fleet, jobs, messages.EngineOptions(model_path=""), _say)
    except BrokerUnavailable as exc:
        raise Failed(str(exc)) from exc
    if options.costs is not None:
        found.costs.write(Path(options.costs))
    rows = [("", "recorded", "simulated", "error")]
    rows += [
        (name, *(_figure(name, value) for value in pair), f"{found.costs.errors[name]:+.0%}")
        for name, pair in found.figures.items()
    ]
    weak = [
        f"{group.name} ({group.num} jobs): first token {_change(group.ttft_s)}, whole answer "
        f"{_change(group.e2e_s)}"
        for group in found.weak
    ]
    text = "\n\n".join(
        [
            "Step times are fitted to the first half of the recording; the second half is "
            "simulated.",
            table(rows),
            "Weak, by medians:\n" + "\n".join(weak)
            if weak
            else "No group of jobs is off by more than 15 %, by medians.",
        ]
    )
    write(
        {"figures": found.figures, "errors": found.costs.errors, "weak": weak}, text, options.json
    )
    return 0


def _figure(name: str, value: float) -> str:
    return f"{value:,.0f}" if name == "output_tokens_per_s" else f"{1000 * value:,.1f} ms"


def _change(pair: tuple[float, float]) -> str:
    return f"{pair[1] / pair[0] - 1:+.0%}"


# --- advice -----------------------------------------------------------------------------------

_MOST_EXPLAINED = 2000  # requests of a trace


def _explain(options: argparse.Namespace, plan: Any) -> int:
    advice: Any = importlib.import_module("infra.planning.advice")
    traces: Any = importlib.import_module("infra.planning.traces")
    fleets: Any = importlib.import_module("infra.planning.fleets")
    messages: Any = importlib.import_module("workers.ipc.messages")
    if options.trace is not None:
        arrivals = list(itertools.islice(traces.read_arrivals(options.trace), _MOST_EXPLAINED))
    else:
        rate = options.rate or plan.batch / plan.strategies["continuous"].e2e_s
        arrivals = list(traces.drawn(400, rate, options.isl, options.osl, 0.5, 1))
    traits = advice.traits_of(arrivals, plan.curve[0].e2e_s, plan.goal)
    found = advice.advise(traits)
    sized = messages.EngineOptions(model_path="", max_num_seqs=plan.batch)
    tried = advice.tried(fleets.fleet_of_server(plan.server, sized), arrivals, traits)
    rows = [("", "tokens/s", "first token", "p99", "answer")]
    rows += [
        (each.strategy, f"{each.output_tokens_per_s:,.0f}", f"{1000 * each.ttft_p50_s:,.0f} ms",
         f"{1000 * each.ttft_p99_s:,.0f} ms", f"{1000 * each.e2e_p50_s:,.0f} ms")
        for each in tried
    ]  # fmt: skip
    reasons = "".join(f"\n- {reason[0].upper()}{reason[1:]}." for reason in found.reasons)
    text = (
        f"Use {found.strategy} batching.{reasons}\n\nSimulated with this workload:\n{table(rows)}"
    )
    write(
        {"strategy": found.strategy, "reasons": found.reasons, "traits": asdict(traits),
         "simulated": [asdict(each) for each in tried]},
        text,
        options.json,
    )  # fmt: skip
    return 0
