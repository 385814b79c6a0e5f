"""Batching strategies and their change in a real engine process, over the socket."""

import time

import msgspec

from tests.fakes import expected_output
from tests.workers.test_engine_process import (
    OPTIONS,
    StartEngine,
    is_idle,
    is_ready,
    start_engine,
    start_message,
    tokens_of,
)
from workers.ipc.messages import (
    EngineLoad,
    FromEngine,
    Reconfigure,
    Request,
    StrategyOptions,
    TokenOut,
)

__all__ = ["start_engine"]

STATIC = msgspec.structs.replace(
    OPTIONS, strategy=StrategyOptions(name="static", batch_size=2, window_s=0.2, padded=True)
)


def loads(messages: list[FromEngine]) -> list[EngineLoad]:
    return [m for m in messages if isinstance(m, EngineLoad)]


def assert_oracle(messages: list[FromEngine], *jobs: Request) -> None:
    for job in jobs:
        assert tokens_of(messages, job.job_id) == expected_output(job.prompts[0], job.params)[0]


def test_a_static_engine_runs_full_batches_one_after_another(start_engine: StartEngine) -> None:
    """Three jobs in batches of two, the last after its wait. Padding is counted and does not change
    tokens."""
    engine = start_engine(STATIC, eos_rate=0.0)
    jobs = [start_message(f"job-{n}", prompt="x" * n, max_tokens=5 * n) for n in (1, 2, 3)]

    engine.receive_until(is_ready)
    engine.send(*jobs)
    received = engine.receive_until(is_idle)

    first_of_last = next(
        i for i, m in enumerate(received) if isinstance(m, TokenOut) and m.job_id == "job-3"
    )
    others = [i for i, m in enumerate(received) if isinstance(m, TokenOut) and m.job_id != "job-3"]
    assert first_of_last > max(others)
    assert sum(load.num_padding_tokens for load in loads(received)) == 1 + 5
    for job in jobs:
        token_ids, _ = expected_output(job.prompts[0], job.params, eos_rate=0.0)
        assert tokens_of(received, job.job_id) == token_ids


def test_an_engine_that_waits_for_a_batch_sleeps(start_engine: StartEngine) -> None:
    """One job alone runs after its 200 ms, and the engine does not spin meanwhile."""
    engine = start_engine(STATIC)
    engine.receive_until(is_ready)
    job = start_message("alone")

    start_s = time.monotonic()
    engine.send(job)
    received = engine.receive_until(lambda m: isinstance(m, TokenOut))
    waited_s = time.monotonic() - start_s
    received += engine.receive_until(is_idle)

    idle = [load for load in loads(received) if load.num_step_tokens == 0]
    assert waited_s >= 0.2
    assert len(idle) <= 3
    assert_oracle(received, job)


def test_a_reload_under_load_loses_no_token(start_engine: StartEngine) -> None:
    """Strategies and limits change five times while twelve jobs run and wait."""
    engine = start_engine(step_s=0.001)
    engine.receive_until(is_ready)
    jobs = [start_message(f"job-{number}", seed=number, temperature=1.0) for number in range(12)]
    dynamic = StrategyOptions(name="dynamic", batch_size=3, window_s=0.01, bucket_edges=(4,))
    changes = [
        STATIC,
        msgspec.structs.replace(OPTIONS, strategy=dynamic, max_num_seqs=3),
        msgspec.structs.replace(OPTIONS, max_num_batched_tokens=2),
        STATIC,
        OPTIONS,
    ]

    received: list[FromEngine] = []
    for number, job in enumerate(jobs):
        engine.send(job)
        if number % 2 == 1 and changes:
            engine.send(Reconfigure(changes.pop(0)))
            received += engine.receive_until(lambda m: isinstance(m, EngineLoad))
    ended: set[str] = set()
    while len(ended) < len(jobs):
        received += engine.receive_until(
            lambda m: isinstance(m, TokenOut) and m.finish_reason is not None
        )
        ended = {
            m.job_id for m in received if isinstance(m, TokenOut) and m.finish_reason is not None
        }

    assert changes == []
    assert_oracle(received, *jobs)
    assert "reconfigured" in engine.end()


def test_an_output_cap_applies_to_later_jobs(start_engine: StartEngine) -> None:
    """The job requests 40 tokens; this engine yields at most seven."""
    engine = start_engine(msgspec.structs.replace(OPTIONS, max_output_tokens=7), eos_rate=0.0)
    engine.send(start_message("long"))

    assert len(tokens_of(engine.receive_until(is_idle), "long")) == 7
