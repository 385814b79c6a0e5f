"""vLLM as an engine process: real processes in vLLM's environment, on tiny models."""

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer

from contract.events import TokenLogprob
from contract.jobs import FinishReason
from contract.model_cards import Capabilities
from gateway.grammars.compiled import Kind, compile_grammar
from tests.infra.processes import any_alive, command_of, descendants, wait_until
from tests.workers.vllm_engine.driven import (
    NUM_TOKENS,
    PENALTIES,
    PROMPT,
    Engine,
    job,
    options_of,
    refusal_of,
    started,
    workload_jobs,
)
from workers.ipc.messages import (
    ChoiceEnded,
    EngineLoad,
    EngineReady,
    JobFailed,
    PrefixFound,
    PromptLogprobsOut,
    StopChoice,
    StopJob,
    TokenOut,
)

pytestmark = [pytest.mark.anyio, pytest.mark.campaign]

# Parameters of jobs that are resumed after every third token and must have the same output.
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0},
    "limits": {"temperature": 1.5, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    "penalties": PENALTIES,
    "bias": {"temperature": 0.0, "logit_bias": {7: 30.0, 9: -100.0}},
    "listed tokens": {
        "temperature": 1.0,
        "allowed_token_ids": tuple(range(5, 25)),
        "bad_words": (
            (7,),
            *((first, second) for first in range(5, 15) for second in range(5, 15)),
        ),
    },
    "choices": {"temperature": 1.0, "n": 3},
    "least length": {"temperature": 1.0, "min_tokens": 20, "ignore_eos": False},
}


@pytest.mark.parametrize("params", KINDS.values(), ids=KINDS.keys())
async def test_a_resumed_job_has_the_same_output(engine: Engine, params: dict[str, Any]) -> None:
    """Noise and penalties depend on the position in the output, not on the process."""
    num_choices = params.get("n", 1)
    whole = await engine.run(job("whole", ((),) * num_choices, **params))
    wholes = [whole["whole", choice] for choice in range(num_choices)]
    assert all(len(tokens) == NUM_TOKENS for tokens in wholes)

    cuts = range(1, NUM_TOKENS, 3)
    known = {cut: tuple(tuple(tokens[:cut]) for tokens in wholes) for cut in cuts}
    rest = await engine.run(*(job(f"cut-{cut}", known[cut], **params) for cut in cuts))

    for cut in cuts:
        for choice, tokens in enumerate(wholes):
            assert rest[f"cut-{cut}", choice] == tokens[cut:], (cut, choice)
    assert len(set(map(tuple, wholes))) == num_choices


SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "maximum": 99}, "c": {"enum": ["ab", "cd"]}},
    "required": ["n", "c"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_a_constrained_job_matches_and_resumes_from_every_token(
    engine: Engine, model: Path, temperature: float
) -> None:
    """Three choices beside a free job. An output that is whole ends with its last token."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    params: dict[str, Any] = {
        "grammar": compile_grammar(Kind.JSON_SCHEMA, SCHEMA),
        "temperature": temperature,
        "ignore_eos": False,
        "max_tokens": 60,
    }
    whole = await engine.run(job("whole", ((),) * 3, n=3, **params), job("free"))
    wholes = [whole["whole", choice] for choice in range(3)]
    for tokens in wholes:
        answer = json.loads(tokenizer.decode(tokens))
        assert answer["n"] <= 99
        assert answer["c"] in ("ab", "cd")
    ended = engine.of(ChoiceEnded)
    assert {(m.job_id, m.finish_reason) for m in ended} == {("whole", FinishReason.STOP)}

    cuts = range(1, max(map(len, wholes)))
    known = {cut: tuple(tuple(tokens[:cut]) for tokens in wholes) for cut in cuts}
    rest = await engine.run(*(job(f"cut-{cut}", known[cut], n=3, **params) for cut in cuts))

    for cut in cuts:
        for choice, tokens in enumerate(wholes):
            assert rest.get((f"cut-{cut}", choice), []) == tokens[cut:], (cut, choice)


async def test_a_grammar_that_does_not_compile_fails_only_its_job(engine: Engine) -> None:
    found = await engine.run(
        job("bad", grammar="start: /(/", ignore_eos=False), job("free", temperature=0.0)
    )
    assert len(found["free", 0]) == NUM_TOKENS
    failed = {m.job_id: m.code for m in engine.of(JobFailed)}
    assert failed == {"bad": "bad_parameter"}


async def test_a_job_is_stopped_while_its_grammar_is_compiled(engine: Engine) -> None:
    """The whole job, or its only choice. vLLM never sees it."""
    names = [f"^k{i}_[a-z]+$" for i in range(200)]  # half a second; a gateway would refuse it
    patterns: dict[str, Any] = {name: {"type": "null"} for name in names}
    schema = {"type": "object", "patternProperties": patterns, "additionalProperties": False}
    grammar = json.dumps({"grammars": [{"name": "answer", "json_schema": schema}]})
    params: dict[str, Any] = {"grammar": grammar, "ignore_eos": False}
    engine.client.send([job("stopped", **params), job("choice", **params)])
    engine.client.send([StopJob("stopped", 1), StopChoice("choice", 1, 0)])

    found = await engine.run(job("free", temperature=0.0))

    assert len(found["free", 0]) == NUM_TOKENS
    reported = [m for m in engine.received if isinstance(m, TokenOut | ChoiceEnded | JobFailed)]
    assert {m.job_id for m in reported} == {"free"}
    assert {m.num_running + m.num_waiting for m in engine.of(EngineLoad)} <= {
        0,
        1,
    }


async def test_every_token_has_log_probabilities_of_the_model(engine: Engine) -> None:
    """Output tokens have those of two alternatives, too; the prompt has them from its second token
    on."""
    tokens = await engine.run(job("scored", logprobs=2, prompt_logprobs=1, temperature=0.0))
    outs = engine.of(TokenOut)
    for out in outs:
        assert isinstance(out.logprob, TokenLogprob)
        assert out.logprob.token_id == out.token_id == out.logprob.top[0][0]
        assert out.logprob.logprob == out.logprob.top[0][1] <= 0.0
        assert len(out.logprob.top) == 2
    [prompt] = engine.of(PromptLogprobsOut)
    assert [one.token_id for one in prompt.logprobs] == list(PROMPT[1:])
    assert prompt.start == 1
    first_token = next(i for i, m in enumerate(engine.received) if isinstance(m, TokenOut))
    assert engine.received.index(prompt) < first_token

    # The same token has the same score as part of a prompt.
    output = tokens["scored", 0]
    await engine.run(job("again", prompt=(*PROMPT, *output), prompt_logprobs=0, max_tokens=1))
    [prompt] = engine.of(PromptLogprobsOut)
    scores = [one.logprob for one in prompt.logprobs[len(PROMPT) - 1 :]]
    expected = [out.logprob.logprob for out in outs if out.logprob is not None]
    assert scores == pytest.approx(expected, abs=1e-3)


async def test_a_prompt_tells_what_was_found_of_it(engine: Engine) -> None:
    """Of its first choice, once: nothing of a new one, whole blocks of one that is equal to it."""
    prompt = (*range(100, 300), *range(200))
    asked: dict[str, Any] = {"prompt": prompt, "temperature": 1.0, "n": 3}
    await engine.run(job("new", ((),) * 3, **asked))
    assert engine.of(PrefixFound) == []
    await engine.run(job("equal", ((),) * 3, **asked), job("other", prompt=prompt[::-1]))
    [found] = engine.of(PrefixFound)
    assert (found.job_id, found.epoch, found.choice) == ("equal", 1, 0)
    assert found.num_tokens % 16 == 0
    assert 0 < len(prompt) - found.num_tokens <= 128  # the largest block


async def test_jobs_end_as_in_our_engine(engine: Engine) -> None:
    """A stop token ends a choice and is reported. A complete choice ends without a token. A passed
    deadline, or a request that can never run, fails only its own job."""
    whole = (await engine.run(job("plain", temperature=0.0)))["plain", 0]
    stop = whole[9]
    first = whole.index(stop)
    found = await engine.run(
        job("stopped", temperature=0.0, stop_token_ids=(stop,)),
        job("complete", (tuple(whole),), temperature=0.0),
        job("too long", prompt=PROMPT * 60),
        job("unknown token", prompt=(4096,)),
    )
    assert found["stopped", 0] == whole[: first + 1]
    reasons = {m.job_id: m.finish_reason for m in engine.of(TokenOut)}
    assert reasons["stopped"] is FinishReason.STOP
    ended = engine.of(ChoiceEnded)
    assert [(m.job_id, m.finish_reason) for m in ended] == [("complete", FinishReason.LENGTH)]
    failed = {m.job_id: m.code for m in engine.of(JobFailed)}
    assert failed == {"too long": "prompt_too_long", "unknown token": "bad_parameter"}

    late = job("late", temperature=0.0, max_tokens=1900)
    late = msgspec.structs.replace(late, deadline_s=0.2)
    await engine.run(late)
    [failure] = engine.of(JobFailed)
    assert failure.code == "deadline"


async def test_two_hundred_cancels_leave_nothing_running_in_vllm(engine: Engine) -> None:
    """Cancels jobs and choices, before and after the first token. Afterwards vLLM reports that one
    request runs."""
    jobs = [
        job(f"c-{i}", ((),) * (1 + i % 2), n=1 + i % 2, temperature=1.0, max_tokens=1900)
        for i in range(200)
    ]
    for start in range(0, 200, 20):
        batch = jobs[start : start + 20]
        engine.received.clear()
        engine.client.send(batch)
        if start % 40:
            await engine.until_output()
        engine.client.send([StopChoice(one.job_id, 1, 0) for one in batch[::3]])
        engine.client.send([StopJob(one.job_id, 1) for one in batch])
    await engine.run(job("canary", temperature=0.0))
    # The load that vLLM reports after each step for the canary; in the last one it ended.
    canary = (
        i for i, m in enumerate(engine.received) if isinstance(m, TokenOut) and m.job_id == "canary"
    )
    first = next(canary)
    loads = [m for m in engine.received[first:] if isinstance(m, EngineLoad)]
    assert {load.num_running + load.num_waiting for load in loads[:-1]} == {1}
    assert {m.job_id for m in engine.received[first:] if isinstance(m, TokenOut)} == {"canary"}


async def test_vllm_generates_the_same_tokens_without_batchway(
    engine: Engine, alone: list[list[int]]
) -> None:
    """Greedy, with all requests at once; compared with the newest vLLM in one process."""
    tokens = await engine.run(*workload_jobs())
    assert [tokens[f"w-{number}", 0] for number in range(len(alone))] == alone


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"no_such_argument": "1"}, "no-such-argument"),
        ({"tensor_parallel_size": "many"}, "tensor-parallel-size"),
        ({"max_model_len": "100000"}, "max_model_len"),
    ],
)
async def test_arguments_that_vllm_refuses_end_the_start(
    model: Path, arguments: dict[str, str], word: str
) -> None:
    """The message names the argument, and the process ends."""
    assert word in await refusal_of(options_of(model, **arguments))


async def test_without_the_plugin_jobs_resume_by_distribution(model: Path) -> None:
    """vLLM supports no plugin with speculative decoding. A job that needs the plugin fails; others
    run."""
    guesses = '{"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}'
    engine = await started(options_of(model, speculative_config=guesses, max_logprobs="1"))
    [ready] = engine.of(EngineReady)
    assert ready.capabilities == Capabilities(resume="distribution")

    whole = (await engine.run(job("whole", temperature=1.0)))["whole", 0]
    found = await engine.run(
        job("same", temperature=1.0),
        job("cut", (tuple(whole[:5]),), temperature=1.0),
        job("biased", logit_bias={7: 30.0}),
        job("scored", logprobs=2, temperature=0.0),
    )
    assert found["same", 0] == whole
    assert len(found["cut", 0]) == NUM_TOKENS - 5
    assert (
        found["cut", 0] != whole[: NUM_TOKENS - 5]
    )  # the noise differs from that of the first run
    failed = {m.job_id: (m.code, m.message) for m in engine.of(JobFailed)}
    assert failed == {
        "biased": ("bad_parameter", "logit_bias has no effect beside speculative decoding"),
        "scored": ("bad_parameter", "vLLM refuses logprobs: its arguments allow less"),
    }
    await engine.client.stop()


async def test_a_killed_engine_core_ends_the_engine_and_all_its_processes(model: Path) -> None:
    """Killed in the middle of a stream. The supervisor notices, and no process is left."""
    engine = await started(options_of(model))
    processes = descendants(engine.client.pid)
    [core] = [pid for pid in processes if "EngineCore" in command_of(pid)]
    engine.client.send([job("cut", max_tokens=1900, temperature=0.0)])
    await engine.until_output()

    os.kill(core, signal.SIGKILL)
    await engine.client.end()
    status = await engine.client.stop()

    assert status != 0
    wait_until(lambda: not any_alive(processes))


async def test_a_killed_engine_process_leaves_no_process_of_vllm(model: Path) -> None:
    """Also without a supervisor to end them; vLLM alone would keep them running."""
    engine = await started(options_of(model))
    processes = descendants(engine.client.pid)
    assert any("EngineCore" in command_of(pid) for pid in processes)

    os.kill(engine.client.pid, signal.SIGKILL)
    await engine.client.end()
    await asyncio.to_thread(wait_until, lambda: not any_alive(processes))
    await engine.client.stop()
