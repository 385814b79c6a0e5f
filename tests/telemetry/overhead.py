"""The cost of metrics: `python -m tests.telemetry.overhead`.

Three figures for each batch size: a decode step of the demo model, the supervisor's meter for it,
and the cost of counting inside Redis when its tokens are appended. The latter two run in other
processes than the engine; their shares of the step are printed.
"""

import argparse
import asyncio
import statistics
import time
from typing import Any

from tokenizers import Tokenizer

from contract.connection import connect
from contract.events import ChoiceDelta, Tokens
from contract.function_types import Append, Claimed, Submission
from contract.functions import Functions
from contract.jobs import Endpoint, Job, SamplingParams
from contract.keys import Keys, new_job_id
from contract.library import library_source
from infra.demo_model import demo_model_path
from infra.embedded_redis import EmbeddedRedis
from infra.measure.engine import run_workload, warm_up
from infra.measure.workloads import Workload, WorkloadRequest
from infra.tables import table, write
from tests.fakes import hash_tokenizer
from workers.engine_process.engine_setup import build_engine
from workers.ipc.messages import EngineLoad, EngineOptions
from workers.supervisor.held_job import HeldJob
from workers.supervisor.metrics import Meter

_BATCHES = (1, 8, 32, 128)
_PROMPT_TOKENS = 64
_TIMES = 9  # the shortest counts: longer ones were disturbed
_COUNTED = "  gains.tokens = gains.tokens + num_tokens\n"


def make_job(index: int) -> Job:
    return Job(
        id=new_job_id(),
        tenant="t",
        model="m",
        lane="standard",
        endpoint=Endpoint.COMPLETIONS,
        prompt_ids=tuple(4 + (7919 * (index + i)) % 250 for i in range(_PROMPT_TOKENS)),
        params=SamplingParams(max_tokens=10_000, seed=0, temperature=0.0, ignore_eos=True),
        created_s=0,
    )


def step_us(num_seqs: int, num_steps: int) -> float:
    """Microseconds of a decode step of the demo model with this many sequences, on one core."""
    from workers.model.loader import load_model

    path = str(demo_model_path())
    options = EngineOptions(model_path=path, num_threads=1, max_num_seqs=num_seqs)
    loaded = load_model(options, lambda _: None)
    engine = build_engine(loaded.model, loaded.vocab_size, options)
    prompts = [make_job(index).prompt_ids for index in range(num_seqs)]
    workload = Workload(tuple(WorkloadRequest(p, num_steps) for p in prompts))
    warm_up(engine, workload, loaded.vocab_size)
    run = run_workload(engine, workload)
    gaps = [gap for timeline in run.timelines for gap in timeline.itls_s]
    return 1e6 * statistics.median(gaps)


def meter_us(num_seqs: int, num_steps: int) -> float:
    """Microseconds of the supervisor's meter for a decode step with this many sequences."""
    tokenizer = Tokenizer.from_str(hash_tokenizer().tokenizer_json)
    held = [
        HeldJob(Claimed(make_job(i), 1, 1, 1, "", 0, 60.0, False), tokenizer)
        for i in range(num_seqs)
    ]
    meter = Meter()
    took = []
    for step in range(num_steps):
        load = EngineLoad(
            num_running=num_seqs,
            num_waiting=0,
            num_free_blocks=0,
            num_step_tokens=num_seqs,
            step_s=0.01,
            num_step_seqs=num_seqs,
            num_decode_tokens=num_seqs,
            ended_s=step * 0.01,
        )
        started_s = time.perf_counter()
        for job in held:
            meter.note_token(job, 0)
        meter.note_step(load)
        took.append(time.perf_counter() - started_s)
    return 1e6 * statistics.median(took)


async def append_us(source: str, num_jobs: int, num_calls: int) -> float:
    """Processor microseconds of Redis to append one token to each of this many jobs."""
    with EmbeddedRedis() as server:
        keys = Keys("overhead")
        client = connect(server.url, keys, command_timeout_s=None)
        await client.function_load(source, replace=True)
        functions = Functions(client, keys)
        for index in range(num_jobs):
            terms = Submission(max_output_tokens=10_000, deadline_s=600, retention_s=60)
            await functions.submit(make_job(index), terms)
        claimed: list[Claimed] = []
        while len(claimed) < num_jobs:
            claimed += await functions.claim(
                "w", "m", ["standard"], lease_s=600, max_jobs=64, max_tokens=10**9
            )
        before_s = await _cpu_s(client)
        for number in range(1, num_calls + 1):
            event = Tokens((ChoiceDelta(0, number - 1, (97,), "a"),))
            items = [Append(c.job.id, c.epoch, number, event, 1) for c in claimed]
            await functions.append("w", items, lease_s=600)
        took_s = await _cpu_s(client) - before_s
        await client.aclose()
        return 1e6 * took_s / num_calls


async def _cpu_s(client: Any) -> float:
    """Processor time of Redis's main thread."""
    spent = await client.info("cpu")
    return float(spent["used_cpu_user_main_thread"] + spent["used_cpu_sys_main_thread"])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.telemetry.overhead", description=__doc__)
    parser.add_argument("--steps", type=int, default=200, help="of each batch (default: 200)")
    parser.add_argument("--json", metavar="OUT")
    options = parser.parse_args()
    source = library_source()
    assert source.count(_COUNTED) == 2, "both ways of appending"
    uncounted = source.replace(_COUNTED, "")
    rows, found = [], []
    for num_seqs in _BATCHES:
        step = step_us(num_seqs, options.steps)
        meter = min(meter_us(num_seqs, options.steps) for _ in range(_TIMES))
        pairs = [
            [asyncio.run(append_us(text, num_seqs, options.steps)) for text in (uncounted, source)]
            for _ in range(_TIMES)
        ]
        without, counted = (min(pair[i] for pair in pairs) for i in (0, 1))
        found.append(
            {
                "num_seqs": num_seqs,
                "step_us": step,
                "meter_us": meter,
                "append_us": counted,
                "append_without_us": without,
            }
        )
        added = counted - without
        cells = (f"{step:.0f}", f"{meter:.1f}", f"{meter / step:.2%}", f"{without:.0f}")
        rows.append((str(num_seqs), *cells, f"{added:.0f}", f"{added / step:.2%}"))
    heading = ("sequences", "step (us)", "meter (us)", "of a step", "append (us)", "added (us)",
               "of a step")  # fmt: skip
    write(found, table([heading, *rows]), options.json)


if __name__ == "__main__":
    main()
