"""The stages' figures as one page of tables. Uses only the standard library.

Spreads are written "median (least to most)" of the repeats.
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from infra.tables import markdown_table

Figures = Mapping[str, Any]  # of a stage

# vLLM 0.30's output tokens per second on an H100, by streams: given to us, not measured here.
_GIVEN = {"Qwen3-8B": {"1": "146", "32": "3,910", "256": "13,567"}}
_NUM_KERNELS = 10


def has_passed(stages: Mapping[str, Figures]) -> bool:
    """Whether every check passed and every stage could measure. Failures of transformers' own
    batching, and what did not fit into the time, do not count."""
    ours = [figures for name, figures in stages.items() if name != "transformers"]
    return all(check["passed"] for check in _checks(stages)) and not any(
        figures["failed"] for figures in ours
    )


def report(stages: Mapping[str, Figures]) -> str:
    """Returns Markdown. A stage that has not run yet is left out."""
    parts = [_about(stages)]
    roofs = stages.get("kernels", {}).get("roofs")
    if "decoding" in stages:
        figures = stages["decoding"]
        theirs = stages.get("transformers", {}).get("closed", {})
        parts += [
            _decoding(figures, roofs),
            _prefill(figures, roofs, theirs),
            _sampling(figures),
        ]
    if "http" in stages:
        parts.append(_http(stages["http"], stages.get("decoding", {})))
    if "strategies" in stages:
        parts.append(_strategies(stages["strategies"]))
    parts.append(_check_lines(stages))
    if "decoding" in stages:
        parts += [
            _profile(streams, found) for streams, found in _group(stages["decoding"], "profile")
        ]
    parts.append(_left_out(stages))
    return "\n\n".join(filter(None, parts)) + "\n"


def _about(stages: Mapping[str, Figures]) -> str:
    found = [figures["about"] for figures in stages.values() if "about" in figures]
    about: Figures = found[0] if found else {}
    roofs = stages.get("kernels", {}).get("roofs")
    names = ("torch", "cuda", "triton", "transformers")
    line = f"{about.get('device')}: " + ", ".join(f"{n} {about.get(n)}" for n in names) + "."
    if roofs is not None:
        copy, product = roofs["bytes_per_s"] / 1e12, roofs["flops"] / 1e12
        line += f" Copy {copy:.2f} TB/s, matrix product {product:.0f} TFLOP/s."
    return line


def _decoding(figures: Figures, roofs: Figures | None) -> str:
    """A table of steps of the default path, in which each stream gets a token."""
    groups = _group(figures, "decoding")
    rows = [
        [
            f"{figures.get('num_in')} tokens in, {figures.get('num_out')} out",
            *(_streams(n) for n, _ in groups),
        ]
    ]

    def row(name: str, cells: Sequence[str]) -> None:
        rows.append([name, *cells])

    every = [runs for _, runs in groups]
    row("output tokens/s", [_spread([r["tokens_per_s"] for r in runs]) for runs in every])
    if given := _GIVEN.get(figures.get("shape", "")):
        row("vLLM 0.30 on an H100 (given, not measured)", [given.get(n, "") for n, _ in groups])
    steady = [[run["decoding"] for run in runs if run["decoding"]] for runs in every]
    row("step, ms", [_spread([r["step_s"] * 1e3 for r in runs], 2) for runs in steady])
    row("mean context, tokens", [_median(runs, "mean_context", ",.0f") for runs in steady])
    if roofs is not None:
        for what, key in (("copy", "bytes_per_s"), ("matrix product", "flops")):
            shares = [[r[key] / roofs[key] for r in runs] for runs in steady]
            row(f"share of the {what}'s rate", [_percent(values) for values in shares])
    gaps = dict(_group(figures, "host gap"))
    row("host gap", [_percent([r["share"] for r in gaps.get(n, [])], 1) for n, _ in groups])
    row("first token, ms, median request", [_latency(runs, "first_token_s") for runs in every])
    row("between tokens, ms, p99", [_latency(runs, "between_tokens_s", "p99") for runs in every])
    return _table(figures, rows) if groups else ""


def _http(figures: Figures, decoding: Figures) -> str:
    """A table of `batchway up` compared with the engine alone."""
    groups = _group(figures, "http")
    rows = [["over HTTP", *(_streams(n) for n, _ in groups)]]
    alone = dict(_group(decoding, "decoding"))

    def row(name: str, cells: Sequence[str]) -> None:
        rows.append([name, *cells])

    every = [runs for _, runs in groups]
    row("output tokens/s", [_spread([r["tokens_per_s"] for r in runs]) for runs in every])
    if all(n in alone for n, _ in groups):
        rates = [
            [statistics.median(r["tokens_per_s"] for r in runs) for runs in (served, alone[n])]
            for n, served in groups
        ]
        row("share of the engine's", [f"{served / engine:.0%}" for served, engine in rates])
    row("first token, ms, median request", [_latency(runs, "first_token_s") for runs in every])
    row("between pieces, ms, p99", [_latency(runs, "between_tokens_s", "p99") for runs in every])
    samples = [[s for run in runs for s in run["utilisation"]] for runs in every]
    row("GPU's utilisation, median", [f"{statistics.median(s):.0f}%" if s else "" for s in samples])
    return _table(figures, rows) if groups else ""


def _prefill(figures: Figures, roofs: Figures | None, theirs: Figures) -> str:
    rows = [["throughput", "tokens/s", ""]]
    for _, runs in _group(figures, "prefill"):
        share = _percent([run["flops"] / roofs["flops"] for run in runs]) if roofs else ""
        rates = _spread([run["tokens_per_s"] for run in runs])
        rows.append(["prefill", rates, f"{share} of the matrix product's rate" if share else ""])
    ours = dict(_group(figures, "closed")).get("ours", [])
    others = theirs.get("transformers", [])
    if ours:
        rows.append(["the requests that transformers gets too, output", _spread(ours), ""])
    if others:
        ratio = f"{statistics.median(ours) / statistics.median(others):.2f} times" if ours else ""
        rows.append(["transformers' continuous batching, output", _spread(others), ratio])
    return _table(figures, rows) if len(rows) > 1 else ""


def _sampling(figures: Figures) -> str:
    groups = _group(figures, "sampling")
    rows = [["sampling", "streams", "step, ms"]]
    for kind, runs in groups:
        steps_ms = [step_s * 1e3 for run in runs for step_s in run["steps_s"]]
        rows.append([kind, str(runs[0]["num_streams"]), _spread(steps_ms, 2)])
    return _table(figures, rows) if groups else ""


def _strategies(figures: Figures) -> str:
    groups = _group(figures, "strategies")
    rates = {name: [run["tokens_per_s"] for run in runs] for name, runs in groups}
    rows = [
        ["strategy", "output tokens/s", "continuous beside it", "steps", "whole answer, s, p99"]
    ]
    for name, runs in groups:
        ratio = ""
        if name != "continuous" and "continuous" in rates:
            median = statistics.median(rates["continuous"]) / statistics.median(rates[name])
            ratio = f"{median:.2f} times"
        whole = _spread([run["whole_s"]["p99"] for run in runs], 2)
        steps = _spread([run["num_steps"] for run in runs])
        rows.append([name, _spread(rates[name]), ratio, steps, whole])
    return _table(figures, rows) if groups else ""


def _check_lines(stages: Mapping[str, Figures]) -> str:
    checks = list(_checks(stages))
    lines = [f"{sum(check['passed'] for check in checks)} of {len(checks)} checks passed."]
    lines += [f"- {c['name']} FAILED: {c['detail']}" for c in checks if not c["passed"]]
    told = ("engine's tokens", "a killed worker", "tokens around the kill")
    lines += [f"- {c['name']}: {c['detail']}" for c in checks if c["name"] in told]
    if state := stages.get("sanitizer", {}).get("state"):
        lines.append(f"- compute-sanitizer: {state}")
    return "\n".join(lines)


def _profile(streams: str, runs: Sequence[Figures]) -> str:
    run = runs[-1]
    head = f"{_streams(streams)}: a step of {run['step_s'] * 1e3:.2f} ms, kernels of"
    rows = [[f"{head} {run['device_s'] * 1e3:.2f} ms", "calls", "ms", "share"]]
    for kernel in run["kernels"][:_NUM_KERNELS]:
        name = kernel["name"].replace("|", " ")[:80]
        cells = [f"{kernel['calls']:.0f}", f"{kernel['s'] * 1e3:.3f}", f"{kernel['share']:.1%}"]
        rows.append([name, *cells])
    return markdown_table(rows)


def _left_out(stages: Mapping[str, Figures]) -> str:
    lines = []
    for name, figures in stages.items():
        lines += [f"- {name}, not within the time: {what}" for what in figures["skipped"]]
        lines += [f"- {name}, failed: {what}" for what in figures["failed"]]
        lines += [f"- {name}: {text}" for text in figures.get("log", [])]
    return "\n".join(lines)


def _checks(stages: Mapping[str, Figures]) -> list[dict[str, Any]]:
    return [check for figures in stages.values() for check in figures["checks"]]


def _group(figures: Figures, name: str) -> list[tuple[str, list[Any]]]:
    """What was measured under each name of a group, in order."""
    return list(figures.get(name, {}).items())


def _table(figures: Figures, rows: list[list[str]]) -> str:
    """A table with the shape's name before the heading."""
    rows[0][0] = f"{figures.get('shape')}: {rows[0][0]}"
    return markdown_table(rows)


def _streams(number: str) -> str:
    return "1 stream" if number == "1" else f"{number} streams"


def _spread(values: Sequence[float], digits: int = 0) -> str:
    if not values:
        return ""
    middle = f"{statistics.median(values):,.{digits}f}"
    if len(values) == 1:
        return middle
    return f"{middle} ({min(values):,.{digits}f} to {max(values):,.{digits}f})"


def _percent(values: Sequence[float], digits: int = 0) -> str:
    return f"{statistics.median(values):.{digits}%}" if values else ""


def _median(runs: Sequence[Figures], key: str, form: str) -> str:
    return f"{statistics.median(run[key] for run in runs):{form}}" if runs else ""


def _latency(runs: Sequence[Figures], key: str, share: str = "p50") -> str:
    return _spread([run[key][share] * 1e3 for run in runs if run[key][share] is not None], 1)
