"""vLLM's `stream_interval`: outputs of several tokens have the tokens of single ones."""

import itertools
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from contract.events import Tokens
from contract.jobs import FinishReason
from gateway.grammars.compiled import Kind, compile_grammar
from infra.embedded_redis import EmbeddedRedis
from tests.fakes import HashModelOptions
from tests.fleet import Caller, WorkerProcess
from tests.workers.vllm_engine.driven import (
    NUM_TOKENS,
    PROMPT,
    Engine,
    job,
    options_of,
    running,
)
from workers.ipc.messages import (
    ChoiceEnded,
    EngineLoad,
    FromEngine,
    PromptLogprobsOut,
    Request,
    StopJob,
    TokenOut,
)
from workers.settings import VLLM_ENGINE

pytestmark = [pytest.mark.anyio, pytest.mark.campaign]

_INTERVAL = 5
_ARRAY = {"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 9}
_GRAMMAR = {"grammar": compile_grammar(Kind.JSON_SCHEMA, _ARRAY), "ignore_eos": False}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "penalties": {"temperature": 1.0, "presence_penalty": 1.5, "frequency_penalty": 2.0},
    "scores": {"temperature": 0.0, "logprobs": 2, "prompt_logprobs": 1},
    "one": {"max_tokens": 1},
    "choices": {"n": 3, "min_tokens": 9, "ignore_eos": False, "logit_bias": {1: 9.0, 2: 9.0}},
    "grammar": {**_GRAMMAR, "n": 3, "max_tokens": 60},
}


def jobs() -> list[Request]:
    return [
        job(kind, ((),) * params.get("n", 1), **{"temperature": 1.0, **params})
        for kind, params in KINDS.items()
    ]


def by_choice(messages: Iterable[FromEngine]) -> dict[tuple[str, int], list[Any]]:
    """Tokens with their positions, and ends."""
    found: dict[tuple[str, int], list[Any]] = {}
    for message in messages:
        if isinstance(message, TokenOut | ChoiceEnded):
            if isinstance(message, TokenOut):
                message = msgspec.structs.replace(message, logprob=None)
            found.setdefault((message.job_id, message.choice), []).append(message)
    return found


def scores(messages: list[FromEngine]) -> list[float]:
    """Of the prompt, then of the output."""
    prompts = [m.logprobs for m in messages if isinstance(m, PromptLogprobsOut)]
    outputs = [m.logprob for m in messages if isinstance(m, TokenOut) and m.logprob is not None]
    return [score for each in (*prompts, outputs) for one in each for _, score in one.top]


@pytest.fixture
async def coarse(model: Path, python: Path) -> AsyncIterator[Engine]:
    async with running(options_of(model, stream_interval=str(_INTERVAL)), python) as engine:
        yield engine


async def test_tokens_scores_and_ends_are_the_same(engine: Engine, coarse: Engine) -> None:
    """The first token comes alone, the others in fives or with the end. A job that is stopped
    between two outputs leaves nothing behind."""
    await engine.run(*jobs())
    expected = by_choice(engine.received)
    expected_scores = scores(engine.received)

    await coarse.run(*jobs())

    assert by_choice(coarse.received) == expected
    assert scores(coarse.received) == pytest.approx(expected_scores, abs=1e-3)
    assert len(expected_scores) == len(PROMPT) - 1 + 2 * NUM_TOKENS
    steps: dict[tuple[str, int], list[int]] = {key: [] for key in expected}
    for is_load, messages in itertools.groupby(
        coarse.received, key=lambda m: isinstance(m, EngineLoad)
    ):
        if not is_load:
            for key, found in by_choice(messages).items():
                steps[key].append(sum(isinstance(m, TokenOut) for m in found))
    for key, counts in steps.items():
        assert counts[0] == 1, key
        assert set(counts[1:-1]) <= {_INTERVAL}, key
    assert steps["greedy", 0] == [1, 5, 5, 5, 5, 3]

    coarse.received.clear()
    coarse.client.send([job("stopped", max_tokens=1900)])
    await coarse.until_output()
    coarse.client.send([StopJob("stopped", 1)])
    await coarse.run(job("canary", temperature=0.0))
    assert {m.job_id for m in coarse.of(TokenOut)} == {"canary"}
    first = next(i for i, m in enumerate(coarse.received) if isinstance(m, TokenOut))
    loads = [m for m in coarse.received[first:] if isinstance(m, EngineLoad)]
    assert {load.num_running for load in loads[:-1]} == {1}


async def test_events_of_the_log_bear_several_tokens(
    caller: Caller, redis_server: EmbeddedRedis, model: Path, python: Path
) -> None:
    """The places that the worker reports are those of vLLM, which an --engine-arg gives."""
    worker = WorkerProcess(
        redis_server.url,
        HashModelOptions(),
        engine_module=VLLM_ENGINE,
        engine_python=str(python),
        engine={
            "model_path": str(model),
            "dtype": "float32",
            "max_model_len": 2048,
            "engine_args": {
                "enforce_eager": "true",
                "stream_interval": str(_INTERVAL),
                "max_num_seqs": "3",
            },
        },
    )
    try:
        params: dict[str, Any] = {"max_tokens": NUM_TOKENS, "ignore_eos": True}
        submitted = await caller.submit("a prompt", deadline_s=240.0, **params)
        answer = await caller.answer(submitted, timeout_s=240.0)
        await caller.num_workers(1)
        [info] = await caller.worker_info()
    finally:
        await worker.close()

    assert info["places"] == 3
    assert answer.finish_reason == {0: FinishReason.LENGTH}
    assert len(answer.token_ids[0]) == NUM_TOKENS
    events = [e.event for e in await caller.entries(submitted) if isinstance(e.event, Tokens)]
    starts = [delta.start for event in events for delta in event.deltas]
    # A busy Redis joins outputs.
    assert starts[0] == 0
    assert {start % _INTERVAL for start in starts[1:]} <= {1}
    assert len(starts) > 1
