"""Batch jobs that urgent ones displace on vLLM have the output of an undisturbed run."""

from collections.abc import AsyncIterator, Set
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.grammars.compiled import Kind, compile_grammar
from tests.workers.vllm_engine.driven import PENALTIES, Engine, job, options_of, running
from workers.ipc.messages import ChoiceEnded, EngineLoad, PromptLogprobsOut, Request, TokenOut

pytestmark = [pytest.mark.anyio, pytest.mark.campaign]

_NUM_PLACES = 6
_NUM_WAVES = 3
_SCHEMA = {
    "type": "array",
    "items": {"type": "integer", "maximum": 99},
    "minItems": 20,
    "maxItems": 30,
}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.0, "n": 2},
    "penalties": PENALTIES,
    "grammar": {
        "grammar": compile_grammar(Kind.JSON_SCHEMA, _SCHEMA),
        "temperature": 1.0,
        "ignore_eos": False,
    },
    "scores": {"temperature": 0.0, "logprobs": 2, "prompt_logprobs": 1},
}


@pytest.fixture
async def small(model: Path, python: Path) -> AsyncIterator[Engine]:
    options = msgspec.structs.replace(options_of(model), max_num_seqs=_NUM_PLACES)
    async with running(options, python) as engine:
        yield engine


def batch_job(kind: str) -> Request:
    params = {"max_tokens": 90, **KINDS[kind]}
    outputs: tuple[tuple[int, ...], ...] = ((),) * params.get("n", 1)
    return msgspec.structs.replace(job(kind, outputs, **params), lane="batch")


def scores(engine: Engine) -> list[list[float]]:
    """Of the job with scores: those of its prompt, each time they came, and of its output."""
    prompts = [[one.logprob for one in m.logprobs] for m in engine.of(PromptLogprobsOut)]
    outs = [m for m in engine.of(TokenOut) if m.job_id == "scores"]
    return [*prompts, [out.logprob.logprob for out in outs if out.logprob is not None]]


async def displace(engine: Engine, name: str, running: Set[tuple[str, int]]) -> None:
    """Waits for a token of each of the running ones; then urgent jobs take all places and end."""
    num_before = len(engine.received)
    urgent = [
        msgspec.structs.replace(job(f"{name}-{number}", max_tokens=4), lane="interactive")
        for number in range(_NUM_PLACES)
    ]

    def outs() -> list[TokenOut]:
        return [m for m in engine.received[num_before:] if isinstance(m, TokenOut)]

    await engine.until(lambda: {(m.job_id, m.choice) for m in outs()} >= running)
    engine.client.send(urgent)
    ends = {each.job_id for each in urgent}
    await engine.until(lambda: {m.job_id for m in outs() if m.finish_reason} >= ends)


async def test_the_displaced_have_the_same_tokens_and_scores(small: Engine) -> None:
    """Three waves of urgent jobs take all places, each when all batch jobs have gone on. Greedy,
    seeded, with penalties, a grammar, and scores."""
    jobs = [batch_job(kind) for kind in KINDS]
    expected = await small.run(*jobs)
    expected_scores = scores(small)
    ends = {(m.job_id, m.choice) for m in small.of(ChoiceEnded)}

    small.received.clear()
    small.client.send([msgspec.structs.replace(each, epoch=2) for each in jobs])
    for wave in range(_NUM_WAVES):
        await displace(small, f"urgent-{wave}", expected.keys())

    def is_over() -> bool:
        ended = [m for m in small.received if isinstance(m, ChoiceEnded | TokenOut)]
        return expected.keys() <= {(m.job_id, m.choice) for m in ended if m.finish_reason}

    await small.until(is_over)
    tokens: dict[tuple[str, int], list[int]] = {key: [] for key in expected}
    for message in small.of(TokenOut):
        if (key := (message.job_id, message.choice)) in tokens:
            assert message.position == len(tokens[key])
            tokens[key].append(message.token_id)
    assert tokens == expected
    assert {(m.job_id, m.choice) for m in small.of(ChoiceEnded)} == ends
    for found, wanted in zip(scores(small), expected_scores, strict=True):
        assert found == pytest.approx(wanted, abs=1e-3)
    loads = small.of(EngineLoad)
    assert sum(load.num_preemptions for load in loads) == _NUM_WAVES * _NUM_PLACES
    assert max(load.num_running for load in loads) == _NUM_PLACES
