"""vLLM behind the frames: a real engine process in vLLM's environment, on tiny models."""

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bench.models import make_model
from contract.events import TokenLogprob
from contract.jobs import FinishReason, SamplingParams
from tests.infra.processes import any_alive, command_of, descendants, wait_until
from tests.vllm_environment import vllm_python
from workers.ipc.engine_client import EngineClient
from workers.ipc.messages import (
    ChoiceEnded,
    EngineLoad,
    EngineOptions,
    FromEngine,
    JobFailed,
    LoadFailed,
    PromptLogprobs,
    Ready,
    StartJob,
    StopChoice,
    StopJob,
    TokenOut,
)
from workers.settings import VLLM_ENGINE

pytestmark = [pytest.mark.anyio, pytest.mark.campaign]

PROMPT = tuple(range(5, 45))
NUM_TOKENS = 24
# Each is cut after every few tokens and must go on as it would have.
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0},
    "limits": {"temperature": 1.5, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    "penalties": {
        "temperature": 1.0,
        "presence_penalty": 1.5,
        "frequency_penalty": 2.0,
        "repetition_penalty": 1.5,
    },
    "bias": {"temperature": 0.0, "logit_bias": {7: 30.0, 9: -100.0}},
    "choices": {"temperature": 1.0, "n": 3},
    "least length": {"temperature": 1.0, "min_tokens": 20, "ignore_eos": False},
}

# vLLM's own interface for Python, without batchway.
ALONE = """
import json, sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    model, given, found = sys.argv[1:]
    llm = LLM(model=model, dtype="float32", max_model_len=2048, max_num_seqs=64,
              enforce_eager=True, skip_tokenizer_init=True, kv_cache_memory_bytes=2**30)
    params = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": ids} for ids in json.load(open(given))]
    outputs = [list(one.outputs[0].token_ids) for one in llm.generate(prompts, params)]
    json.dump(outputs, open(found, "w"))
"""


class Engine:
    """An engine process and what it has said."""

    def __init__(self) -> None:
        self.client: EngineClient
        self.ready: Ready | None = None
        self.said: list[FromEngine] = []
        self.news = asyncio.Event()

    async def start(self, options: EngineOptions) -> None:
        python = str(vllm_python())
        self.client = await EngineClient.start(VLLM_ENGINE, options, self._hear, python)

    def _hear(self, messages: list[FromEngine]) -> None:
        self.said += messages
        self.news.set()

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(240):
            while not condition():
                refusals = [m.message for m in self.said if isinstance(m, LoadFailed)]
                assert not refusals, refusals
                self.news.clear()
                await self.news.wait()

    async def run(self, *jobs: StartJob) -> dict[tuple[str, int], list[int]]:
        """The new tokens of each choice; all jobs at once, to their ends."""
        self.said.clear()
        self.client.send(jobs)
        choices = {
            (job.job_id, choice)
            for job in jobs
            for choice, has_ended in enumerate(job.finished)
            if not has_ended
        }

        def ended() -> set[tuple[str, int]]:
            found = {
                (m.job_id, m.choice)
                for m in self.said
                if isinstance(m, ChoiceEnded) or (isinstance(m, TokenOut) and m.finish_reason)
            }
            failed = {m.job_id for m in self.said if isinstance(m, JobFailed)}
            return found | {choice for choice in choices if choice[0] in failed}

        await self.until(lambda: choices <= ended())
        tokens: dict[tuple[str, int], list[int]] = {choice: [] for choice in choices}
        for message in self.said:
            if isinstance(message, TokenOut) and (message.job_id, message.choice) in tokens:
                tokens[message.job_id, message.choice].append(message.token_id)
        return tokens


def options_of(path: Path, **arguments: str) -> EngineOptions:
    return EngineOptions(
        model_path=str(path),
        dtype="float32",
        max_model_len=2048,
        max_num_seqs=64,
        engine_args={"enforce_eager": "true", **arguments},
    )


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    vllm_python()
    return make_model("S", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
async def engine(model: Path) -> AsyncIterator[Engine]:
    engine = Engine()
    await engine.start(options_of(model))
    await engine.until(lambda: any(isinstance(m, Ready) for m in engine.said))
    yield engine
    await engine.client.stop()


def job(
    name: str,
    outputs: tuple[tuple[int, ...], ...] = ((),),
    *,
    prompt: tuple[int, ...] = PROMPT,
    **params: Any,
) -> StartJob:
    fields: dict[str, Any] = {"max_tokens": NUM_TOKENS, "seed": 7, "ignore_eos": True, **params}
    finished = (False,) * len(outputs)
    return StartJob(
        name, 1, "t", "standard", (prompt,), SamplingParams(**fields), outputs, finished
    )


@pytest.mark.parametrize("params", KINDS.values(), ids=KINDS.keys())
async def test_a_job_that_was_cut_goes_on_as_if_nothing_had_been(
    engine: Engine, params: dict[str, Any]
) -> None:
    """Noise and penalties belong to the position, not to the process that draws them."""
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


async def test_log_probabilities_are_of_the_model_and_of_each_token(engine: Engine) -> None:
    """Of the output with two beside each, and of the prompt from its second token on."""
    tokens = await engine.run(job("scored", logprobs=2, prompt_logprobs=1, temperature=0.0))
    outs = [message for message in engine.said if isinstance(message, TokenOut)]
    for out in outs:
        assert isinstance(out.logprob, TokenLogprob)
        assert out.logprob.token_id == out.token_id == out.logprob.top[0][0]
        assert out.logprob.logprob == out.logprob.top[0][1] <= 0.0
        assert len(out.logprob.top) == 2
    [prompt] = [message for message in engine.said if isinstance(message, PromptLogprobs)]
    assert [one.token_id for one in prompt.logprobs] == list(PROMPT[1:])
    assert prompt.start == 1
    first_token = next(i for i, m in enumerate(engine.said) if isinstance(m, TokenOut))
    assert engine.said.index(prompt) < first_token

    # The same token has the same score as part of a prompt.
    output = tokens["scored", 0]
    await engine.run(job("again", prompt=(*PROMPT, *output), prompt_logprobs=0, max_tokens=1))
    [prompt] = [message for message in engine.said if isinstance(message, PromptLogprobs)]
    scores = [one.logprob for one in prompt.logprobs[len(PROMPT) - 1 :]]
    expected = [out.logprob.logprob for out in outs if out.logprob is not None]
    assert scores == pytest.approx(expected, abs=1e-3)


async def test_endings_are_ours(engine: Engine) -> None:
    """A stop token ends a choice, and is said; what is complete ends without a token; a deadline
    and what can never run fail their own job alone."""
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
    reasons = {m.job_id: m.finish_reason for m in engine.said if isinstance(m, TokenOut)}
    assert reasons["stopped"] is FinishReason.STOP
    ended = [m for m in engine.said if isinstance(m, ChoiceEnded)]
    assert [(m.job_id, m.finish_reason) for m in ended] == [("complete", FinishReason.LENGTH)]
    failed = {m.job_id: m.code for m in engine.said if isinstance(m, JobFailed)}
    assert failed == {"too long": "prompt_too_long", "unknown token": "bad_parameter"}

    late = job("late", temperature=0.0, max_tokens=1900)
    late = msgspec.structs.replace(late, deadline_s=0.2)
    await engine.run(late)
    [failure] = [m for m in engine.said if isinstance(m, JobFailed)]
    assert failure.code == "deadline"


async def test_two_hundred_cancels_leave_nothing_running_in_vllm(engine: Engine) -> None:
    """By job and by choice, before and after the first token; then vLLM itself counts one."""
    jobs = [
        job(f"c-{i}", ((),) * (1 + i % 2), n=1 + i % 2, temperature=1.0, max_tokens=1900)
        for i in range(200)
    ]
    for start in range(0, 200, 20):
        batch = jobs[start : start + 20]
        engine.said.clear()
        engine.client.send(batch)
        if start % 40:
            await engine.until(lambda: any(isinstance(m, TokenOut) for m in engine.said))
        engine.client.send([StopChoice(one.job_id, 1, 0) for one in batch[::3]])
        engine.client.send([StopJob(one.job_id, 1) for one in batch])
    await engine.run(job("canary", temperature=0.0))
    # What vLLM says of the steps that computed for the canary; the last has ended it.
    canary = (
        i for i, m in enumerate(engine.said) if isinstance(m, TokenOut) and m.job_id == "canary"
    )
    first = next(canary)
    loads = [m for m in engine.said[first:] if isinstance(m, EngineLoad)]
    assert {load.num_running + load.num_waiting for load in loads[:-1]} == {1}
    assert {m.job_id for m in engine.said[first:] if isinstance(m, TokenOut)} == {"canary"}


async def test_tokens_are_those_of_vllm_alone(engine: Engine, model: Path, tmp_path: Path) -> None:
    """Greedy, 64 requests at once, beside vLLM in one process without batchway."""
    prompts = [tuple(range(10 + i, 40 + 3 * i)) for i in range(64)]
    given, found = tmp_path / "prompts.json", tmp_path / "outputs.json"
    given.write_text(json.dumps(prompts))
    alone = await asyncio.to_thread(
        subprocess.run,
        [str(vllm_python()), "-c", ALONE, str(model), str(given), str(found)],
        capture_output=True,
        text=True,
    )
    assert alone.returncode == 0, alone.stderr[-2000:]
    expected = json.loads(found.read_text())

    jobs = [
        job(f"w-{i}", prompt=prompt, max_tokens=32, temperature=0.0)
        for i, prompt in enumerate(prompts)
    ]
    tokens = await engine.run(*jobs)
    assert [tokens[f"w-{i}", 0] for i in range(64)] == expected


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"no_such_argument": "1"}, "no-such-argument"),
        ({"tensor_parallel_size": "many"}, "tensor-parallel-size"),
        ({"max_model_len": "100000"}, "max_model_len"),
    ],
)
async def test_what_vllm_refuses_is_said_before_anything_is_served(
    model: Path, arguments: dict[str, str], word: str
) -> None:
    """By name, in one sentence, and the process ends."""
    engine = Engine()
    await engine.start(options_of(model, **arguments))
    await engine.client.end()
    await engine.client.stop()
    [refusal] = [m for m in engine.said if isinstance(m, LoadFailed)]
    assert word in refusal.message


async def test_a_killed_engine_core_ends_the_engine_and_all_its_processes(model: Path) -> None:
    """In the middle of a stream; the supervisor sees the end, and nothing is left."""
    engine = Engine()
    await engine.start(options_of(model))
    await engine.until(lambda: any(isinstance(m, Ready) for m in engine.said))
    processes = descendants(engine.client.pid)
    [core] = [pid for pid in processes if "EngineCore" in command_of(pid)]
    engine.client.send([job("cut", max_tokens=1900, temperature=0.0)])
    await engine.until(lambda: any(isinstance(m, TokenOut) for m in engine.said))

    os.kill(core, signal.SIGKILL)
    await engine.client.end()
    status = await engine.client.stop()

    assert status != 0
    wait_until(lambda: not any_alive(processes))
