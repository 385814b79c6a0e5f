"""What a run comes to: throughput and latencies apart, as JSON and as a table."""

import json
from pathlib import Path
from typing import Any

from infra.bench.engine import EngineRun
from infra.bench.spread import spread


def summarise(run: EngineRun) -> dict[str, Any]:
    """Seconds, tokens per second, bytes; `outputs` are the token ids of each request."""
    return {
        "output_tokens_per_s": run.output_tokens_per_s,
        "wall_s": run.wall_s,
        "num_output_tokens": run.num_output_tokens,
        "num_steps": run.num_steps,
        "model_s": run.model_s,
        "ttft_s": spread([timeline.ttft_s for timeline in run.timelines]),
        "itl_s": spread([itl for timeline in run.timelines for itl in timeline.itls_s]),
        "e2e_s": spread([timeline.e2e_s for timeline in run.timelines]),
        "peak_rss_bytes": run.peak_rss_bytes,
        "outputs": [timeline.token_ids for timeline in run.timelines],
    }


def write_json(summary: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(summary) + "\n")


def tables(summary: dict[str, Any]) -> str:
    """Throughput, then latencies in milliseconds: two tables, never one."""
    rows = [
        ("output tokens/s", f"{summary['output_tokens_per_s']:.1f}"),
        ("output tokens", str(summary["num_output_tokens"])),
        ("wall time, s", f"{summary['wall_s']:.2f}"),
        ("of it in the model", f"{summary['model_s'] / summary['wall_s']:.1%}"),
        ("steps", str(summary["num_steps"])),
        ("peak memory, MiB", f"{summary['peak_rss_bytes'] / 2**20:.0f}"),
    ]
    lines = [f"{name:<20}{value:>12}" for name, value in rows]
    lines += ["", f"{'latency, ms':<20}{'p50':>12}{'p99':>12}{'max':>12}"]
    names = {"ttft_s": "first token", "itl_s": "between tokens", "e2e_s": "whole answer"}
    for key, name in names.items():
        cells = [summary[key][column] for column in ("p50", "p99", "max")]
        shown = ["-" if cell is None else f"{cell * 1000:.1f}" for cell in cells]
        lines.append(f"{name:<20}" + "".join(f"{cell:>12}" for cell in shown))
    return "\n".join(lines)
