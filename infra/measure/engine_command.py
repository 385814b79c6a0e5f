"""`batchway bench engine`: runs a workload file through an engine in this process."""

import argparse
import sys
from typing import Any

from infra.measure.engine import EngineRun, RequestFailed, run_workload, warm_up
from infra.measure.workloads import BadWorkload, read_workload
from infra.tables import progress_line, spread, table, write
from workers.engine.interface import ModelRefused
from workers.engine.request import RequestRefused
from workers.engine_process.engine_setup import build_engine
from workers.ipc.messages import EngineOptions, StrategyOptions
from workers.model.loader import load_model


def run(options: argparse.Namespace) -> int:
    try:
        workload = read_workload(options.workload)
        engine_options = EngineOptions(
            model_path=options.model,
            dtype=options.dtype,
            quantization=options.quantization,
            max_num_seqs=options.max_running,
            max_num_batched_tokens=options.max_batched_tokens,
            kv_high_water=1.0,
            strategy=StrategyOptions(name=options.strategy, batch_size=options.max_running),
            num_threads=options.threads,
            fused=not options.torch_only,
        )
        loaded = load_model(engine_options, lambda text: print(text, file=sys.stderr))
        engine = build_engine(
            loaded.model, loaded.vocab_size, engine_options, loaded.num_step_tokens
        )
        warm_up(engine, workload, loaded.vocab_size)
        summary = summarise(run_workload(engine, workload, progress=progress_line("tokens")))
    except (BadWorkload, ModelRefused, RequestFailed, RequestRefused) as exc:
        print(f"batchway bench engine: {exc}", file=sys.stderr)
        return 1
    write(summary, tables(summary), options.json)
    return 0


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


def tables(summary: dict[str, Any]) -> str:
    """Returns separate tables of throughput and of latencies in milliseconds."""
    rows = [
        ("output tokens/s", f"{summary['output_tokens_per_s']:.1f}"),
        ("output tokens", str(summary["num_output_tokens"])),
        ("wall time, s", f"{summary['wall_s']:.2f}"),
        ("share in the model", f"{summary['model_s'] / summary['wall_s']:.1%}"),
        ("steps", str(summary["num_steps"])),
        ("peak memory, MiB", f"{summary['peak_rss_bytes'] / 2**20:.0f}"),
    ]
    latencies = [["latency, ms", "p50", "p99", "max"]]
    names = {"ttft_s": "first token", "itl_s": "between tokens", "e2e_s": "whole answer"}
    for key, name in names.items():
        cells = [summary[key][column] for column in ("p50", "p99", "max")]
        latencies.append([name, *("-" if c is None else f"{c * 1000:.1f}" for c in cells)])
    return f"{table(rows)}\n\n{table(latencies)}"
