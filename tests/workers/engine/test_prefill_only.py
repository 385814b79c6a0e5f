"""An engine on a prefill-only model: whole prompts under one budget, no output."""

import struct
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.errors import ErrorCode
from contract.jobs import Pooling, SamplingParams
from tests.fakes import VOCAB_SIZE
from workers.engine.engine import Engine
from workers.engine.interface import Chunk, EngineLimits, Padding, Row, RowFailed, Vector
from workers.engine.masks import StepMasks
from workers.engine.sequence import RequestRefused
from workers.engine.strategy import ContinuousBatching, DynamicBatching, Strategy
from workers.ipc.messages import Request

BUDGET = 32
MAX_MODEL_LEN = 40
BAD_ID = 13


@dataclass
class SumModel:
    """A prompt's vector is the sum of its tokens. `steps` has the prompts' lengths of each step."""

    num_blocks: int = 80
    block_size: int = 4
    shares_blocks: bool = False
    num_state_slots: int = 0
    max_model_len: int = MAX_MODEL_LEN
    eos_token_ids: frozenset[int] = frozenset()
    steps: list[list[int]] = field(default_factory=list)
    jobs: list[list[str]] = field(default_factory=list)

    def run(
        self, chunks: Seq[Chunk], padding: Seq[Padding] = (), masks: StepMasks | None = None
    ) -> list[Row]:
        assert all(chunk.start == 0 and chunk.samples for chunk in chunks)
        assert all(chunk.num_tokens == chunk.sequence.num_known for chunk in chunks)
        self.steps.append([chunk.num_tokens for chunk in chunks])
        self.jobs.append([chunk.sequence.job_id for chunk in chunks])
        return [
            RowFailed("no finite vector")
            if BAD_ID in chunk.sequence.token_ids
            else Vector(vector_of(chunk.sequence.token_ids))
            for chunk in chunks
        ]


def vector_of(token_ids: Seq[int]) -> bytes:
    return struct.pack("<f", sum(token_ids))


def make_engine(strategy: Strategy | None = None, **limits: Any) -> tuple[Engine, SumModel]:
    model = SumModel()
    arguments = {"max_num_batched_tokens": BUDGET, "max_num_seqs": 8, **limits}
    engine = Engine(
        model,
        EngineLimits(vocab_size=VOCAB_SIZE, prefill_only=True, **arguments),
        strategy or ContinuousBatching(),
        clock_s=lambda: 0.0,
    )
    return engine, model


def job(job_id: str, *lengths: int, lane: str = "scoring", **changes: Any) -> Request:
    """A job whose prompts have these lengths."""
    fields: dict[str, Any] = {
        "job_id": job_id,
        "epoch": 1,
        "tenant": "t",
        "lane": lane,
        "prompts": tuple((20 + number,) * length for number, length in enumerate(lengths)),
        "params": SamplingParams(max_tokens=0, seed=0),
        "outputs": ((),) * len(lengths),
        "finished": (False,) * len(lengths),
        "pooling": Pooling(),
    }
    return Request(**(fields | changes))


def run(engine: Engine) -> dict[tuple[str, int], bytes]:
    """Steps to the end; the vectors by job and prompt, each once."""
    found: dict[tuple[str, int], bytes] = {}
    for _ in range(1000):
        if not engine.has_work:
            break
        report = engine.step()
        engine.audit()
        assert not report.outputs
        assert not report.ended
        for out in report.vectors:
            assert (out.job_id, out.choice) not in found
            found[out.job_id, out.choice] = out.vector
    assert not engine.has_work
    assert engine.step().num_free_blocks == 80
    return found


def test_a_step_takes_whole_prompts_in_order_as_far_as_the_budget_goes() -> None:
    """None is cut, and none passes one that does not fit. Callers share a step."""
    engine, model = make_engine()
    engine.add(job("a", 10, 12))
    engine.add(job("b", 20, 5))
    engine.add(job("c", 5))

    run(engine)

    assert model.steps == [[10, 12], [20, 5, 5]]
    assert model.jobs[1] == ["b", "b", "c"]


def test_an_urgent_lane_goes_first() -> None:
    """Also before prompts of a job that has begun."""
    engine, model = make_engine()
    engine.add(job("slow", *[16] * 6, lane="batch"))
    engine.step()
    engine.add(job("fast", 16, lane="interactive"))

    run(engine)

    assert "fast" in model.jobs[1]


def test_a_job_stops_between_its_steps() -> None:
    """A cancelled job; others are not affected."""
    engine, model = make_engine()
    engine.add(job("a", *[16] * 6))
    engine.add(job("b", 16))
    engine.step()
    engine.stop_job("a", 1)

    found = run(engine)

    assert set(found) == {("b", 0)}
    assert sum("a" in jobs for jobs in model.jobs) == 1


def test_a_resumed_job_computes_what_its_log_lacks() -> None:
    engine, model = make_engine()
    engine.add(job("a", 3, 4, 5, finished=(True, False, True)))

    assert set(run(engine)) == {("a", 1)}
    assert model.steps == [[4]]


def test_a_prompt_that_fails_costs_its_job_only() -> None:
    engine, _ = make_engine()
    engine.add(job("bad", 3, 3, prompts=((20, 21), (BAD_ID,))))
    engine.add(job("good", 3))

    report = engine.step()

    assert [(e.job_id, e.code) for e in report.failed] == [("bad", ErrorCode.ENGINE_ERROR)]
    assert "good" in {out.job_id for out in report.vectors}
    assert not engine.has_work


@pytest.mark.parametrize(
    ("request_", "word"),
    [
        (job("a", 4, MAX_MODEL_LEN + 1), "prompt 1 has 41 tokens"),
        (job("a", 4, 0), "prompt 1 has no tokens"),
        (job("a"), "no prompt"),
        (job("a", 4, prompts=((VOCAB_SIZE,),)), "vocabulary"),
        (job("a", 4, 4, pooling=Pooling(first_parts=(2,))), "first_parts"),
        (job("a", 4, pooling=Pooling(first_parts=(5,))), "first_parts 0"),
        (job("a", 4, pooling=None), "generates no text"),
    ],
)
def test_what_cannot_be_is_refused(request_: Request, word: str) -> None:
    """With the index of the prompt where one is at fault."""
    engine, _ = make_engine()

    with pytest.raises(RequestRefused, match=word):
        engine.add(request_)
    assert not engine.has_work


def test_other_strategies_batch_vectors_too() -> None:
    """A batch that is full before its window is over."""
    engine, model = make_engine(DynamicBatching(batch_size=2, window_s=60.0))
    engine.add(job("a", 3, 4))

    run(engine)

    assert model.steps == [[3, 4]]


@given(
    lengths=st.lists(st.lists(st.integers(1, MAX_MODEL_LEN), min_size=1, max_size=6), max_size=6),
    lanes=st.lists(st.sampled_from(["interactive", "scoring", "batch"]), min_size=6, max_size=6),
    budget=st.integers(1, 64),
    max_num_seqs=st.integers(1, 6),
)
def test_steps_keep_to_the_budget_and_lose_nothing(
    lengths: list[list[int]], lanes: list[str], budget: int, max_num_seqs: int
) -> None:
    """For any jobs and limits."""
    engine, model = make_engine(max_num_batched_tokens=budget, max_num_seqs=max_num_seqs)
    requests = [job(str(i), *some, lane=lanes[i]) for i, some in enumerate(lengths)]
    for request in requests:
        engine.add(request)

    found = run(engine)

    assert found == {
        (request.job_id, i): vector_of(ids)
        for request in requests
        for i, ids in enumerate(request.prompts)
    }
    for step in model.steps:
        assert sum(step) <= budget or len(step) == 1
        assert len(step) <= max_num_seqs
