"""The figures as one page of Markdown. Uses only the standard library."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from infra.tables import markdown_table

Figures = Mapping[str, Any]  # of a stage

BUSY = 70  # percent: what the GPU's utilisation is held against
_NAMES = ("torch", "cuda", "triton", "transformers", "vllm")


def report(stages: Mapping[str, Figures]) -> str:
    """Returns Markdown. What has not run yet is left out."""
    machine = stages.get("machine", {})
    every = [check for found in stages.values() for check in found.get("checks", ())]
    failed = [f"- {c['name']} FAILED: {c['detail']}" for c in every if not c["passed"]]
    counted = f"{len(every) - len(failed)} of {len(every)} checks passed."
    parts = [
        _about(machine),
        _loads(stages),
        _strategies(stages.get("strategies", {}).get("strategies", {})),
        "\n".join([counted, *failed, *_told(every)]),
        _ends(stages),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def _about(machine: Figures) -> str:
    about = machine.get("about", {})
    line = f"{about.get('device', 'no device')}: "
    line += ", ".join(f"{name} {about[name]}" for name in _NAMES if name in about)
    if roofs := machine.get("roofs"):
        copy, product = roofs["bytes_per_s"] / 1e12, roofs["flops"] / 1e12
        line += f". Copy {copy:.2f} TB/s, matrix product {product:.0f} TFLOP/s"
    if model := machine.get("model"):
        line += f". {model['name']}, random weights, untied, {machine['num_in']} tokens in, "
        line += f"{machine['num_out']} out"
    return f"{line}."


def _loads(stages: Mapping[str, Figures]) -> str:
    rows = [
        [
            *("engine, over HTTP", "streams", "output tokens/s", "first token, ms, p50"),
            *("time per output token, ms, p50", f"GPU's utilisation, median (wanted: {BUSY} %)"),
        ]
    ]
    for name, figures in stages.items():
        for streams, load in figures.get("loads", {}).items():
            cells = [f"{load['tokens_per_s']:,.0f}", _ms(load["first_token_s"], 1)]
            cells += [_ms(load["per_token_s"], 2), _used(load["utilisation"])]
            rows.append([name, streams, *cells])
    return markdown_table(rows) if len(rows) > 1 else ""


def _ms(seconds: float, digits: int) -> str:
    return f"{seconds * 1e3:,.{digits}f}"


def _used(samples: Sequence[float]) -> str:
    if not samples:
        return "not known"
    median = statistics.median(samples)
    return f"{median:.0f} %, {'reached' if median >= BUSY else 'MISSED'}"


def _strategies(found: Mapping[str, Figures]) -> str:
    rows = [["own engine, strategy", "output tokens/s", "steps", "whole answer, s, p99"]]
    for name, run in found.items():
        cells = [f"{run['tokens_per_s']:,.0f}", f"{run['steps']}", f"{run['p99_s']:.2f}"]
        rows.append([name, *cells])
    return markdown_table(rows) if found else ""


def _told(checks: Sequence[Figures]) -> list[str]:
    """Checks whose details matter where they pass, too."""
    told = ("CUDA graphs", "engine's tokens", "killed worker", "memcheck", "racecheck")
    return [
        f"- {c['name']}: {c['detail']}"
        for c in checks
        if c["passed"] and c["name"].startswith(told)
    ]


def _ends(stages: Mapping[str, Figures]) -> str:
    rows = [["stage", "ended", "seconds", "start, s", "reason"]]
    for name, figures in stages.items():
        reason = figures.get("reason", "").replace("|", " ").replace("\n", " ")
        times = [str(figures.get("seconds", "")), f"{figures.get('start_s', '')}"]
        rows.append([name, figures.get("state", ""), *times, reason])
    return markdown_table(rows)
