"""`batchway bench engine`: a workload file through the engine, in this process."""

import argparse
import sys

from infra.bench.engine import RequestFailed, run_workload, warm_up
from infra.bench.progress import progress_line
from infra.bench.summary import summarise, tables, write_json
from infra.bench.workloads import BadWorkload, read_workload
from workers.engine.model import ModelRefused
from workers.engine.request import RequestRefused
from workers.engine_process.engine_setup import build_engine
from workers.ipc.batching import StrategyOptions
from workers.ipc.messages import EngineOptions
from workers.model.loader import load_model

_NUM_WARM_UP = 4  # requests


def run(options: argparse.Namespace) -> int:
    """Measures, prints, writes; returns the exit status."""
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
        lengths = [len(r.prompt_token_ids) for r in workload.requests[:_NUM_WARM_UP]]
        warm_up(engine, lengths, loaded.vocab_size)
        summary = summarise(run_workload(engine, workload, progress=progress_line("tokens")))
    except (BadWorkload, ModelRefused, RequestFailed, RequestRefused) as exc:
        print(f"batchway bench engine: {exc}", file=sys.stderr)
        return 1
    print(tables(summary))
    if options.json is not None:
        write_json(summary, options.json)
    return 0
