"""Drives an engine process of vLLM, and runs vLLM without batchway for comparison."""

import asyncio
import contextlib
import json
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from bench.models import SIZES
from contract.jobs import SamplingParams
from infra.measure.workloads import log_uniform_workload
from tests.vllm_environment import vllm_python
from workers.ipc.channel import EngineClient
from workers.ipc.messages import (
    ChoiceEnded,
    EngineOptions,
    EngineReady,
    FromEngine,
    JobFailed,
    LoadFailed,
    Request,
    TokenOut,
)
from workers.settings import VLLM_ENGINE

PROMPT = tuple(range(5, 45))
NUM_TOKENS = 24

# Uses vLLM's Python interface, without batchway.
ALONE = """
import json, sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    model, given, found = sys.argv[1:]
    llm = LLM(model=model, dtype="float32", max_model_len=2048, max_num_seqs=64,
              enforce_eager=True, skip_tokenizer_init=True, kv_cache_memory_bytes=2**30)
    requests = json.load(open(given))["requests"]
    params = [SamplingParams(temperature=0.0, max_tokens=one["max_tokens"], ignore_eos=True,
                             detokenize=False) for one in requests]
    prompts = [{"prompt_token_ids": one["prompt_token_ids"]} for one in requests]
    outputs = [list(one.outputs[0].token_ids) for one in llm.generate(prompts, params)]
    json.dump(outputs, open(found, "w"))
"""


# 64 requests of 16 to 512 tokens with outputs of 8 to 256, all at once.
WORKLOAD = log_uniform_workload(64, SIZES["S"]["vocab_size"])


def tokens_of_vllm_alone(python: Path, model: Path, folder: Path) -> list[list[int]]:
    """The token ids that vLLM without batchway generates for each request of WORKLOAD."""
    given, found = folder / "workload.json", folder / "outputs.json"
    given.write_bytes(msgspec.json.encode(WORKLOAD))
    alone = subprocess.run(
        [str(python), "-c", ALONE, str(model), str(given), str(found)],
        capture_output=True,
        text=True,
    )
    assert alone.returncode == 0, alone.stderr[-2000:]
    outputs: list[list[int]] = json.loads(found.read_text())
    return outputs


M = TypeVar("M", bound=FromEngine)


class Engine:
    """An engine process, and the messages received from it."""

    def __init__(self) -> None:
        self.client: EngineClient
        self.ready: EngineReady | None = None
        self.received: list[FromEngine] = []
        self.news = asyncio.Event()

    async def start(self, options: EngineOptions, python: Path | None = None) -> None:
        """`python`: that of another environment (default: that of the newest vLLM)."""
        path = str(python or vllm_python())
        self.client = await EngineClient.start(VLLM_ENGINE, options, self._receive, path)

    def _receive(self, messages: list[FromEngine]) -> None:
        self.received += messages
        self.news.set()

    def of(self, kind: type[M]) -> list[M]:
        """The messages of a kind."""
        return [message for message in self.received if isinstance(message, kind)]

    async def until_ready(self) -> None:
        await self.until(lambda: bool(self.of(EngineReady)))

    async def until_output(self) -> None:
        await self.until(lambda: bool(self.of(TokenOut)))

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(240):
            while not condition():
                assert not self.of(LoadFailed)
                self.news.clear()
                await self.news.wait()

    async def run(self, *jobs: Request) -> dict[tuple[str, int], list[int]]:
        """Runs all jobs at once to their ends; returns the new tokens of each job and choice."""
        self.received.clear()
        self.client.send(jobs)
        choices = {
            (job.job_id, choice)
            for job in jobs
            for choice, is_finished in enumerate(job.finished)
            if not is_finished
        }

        def ended() -> set[tuple[str, int]]:
            found = {
                (m.job_id, m.choice)
                for m in self.received
                if isinstance(m, ChoiceEnded) or (isinstance(m, TokenOut) and m.finish_reason)
            }
            failed = {m.job_id for m in self.of(JobFailed)}
            return found | {choice for choice in choices if choice[0] in failed}

        await self.until(lambda: choices <= ended())
        tokens: dict[tuple[str, int], list[int]] = {choice: [] for choice in choices}
        for message in self.of(TokenOut):
            if (message.job_id, message.choice) in tokens:
                tokens[message.job_id, message.choice].append(message.token_id)
        return tokens


async def started(options: EngineOptions, python: Path | None = None) -> Engine:
    """An engine that is ready; `python` as in Engine.start."""
    engine = Engine()
    await engine.start(options, python)
    await engine.until_ready()
    return engine


@contextlib.asynccontextmanager
async def running(options: EngineOptions, python: Path | None = None) -> AsyncIterator[Engine]:
    """The same, and it is stopped at exit."""
    engine = await started(options, python)
    yield engine
    await engine.client.stop()


async def refusal_of(options: EngineOptions) -> str:
    """Why an engine ends that is started with these options."""
    engine = Engine()
    await engine.start(options)
    await engine.client.end()
    await engine.client.stop()
    assert not engine.of(EngineReady)
    [refusal] = engine.of(LoadFailed)
    return refusal.message


PENALTIES: dict[str, Any] = {
    "temperature": 1.0,
    "presence_penalty": 1.5,
    "frequency_penalty": 2.0,
    "repetition_penalty": 1.5,
}


def options_of(path: Path, **arguments: str) -> EngineOptions:
    return EngineOptions(
        model_path=str(path),
        dtype="float32",
        max_model_len=2048,
        max_num_seqs=64,
        engine_args={"enforce_eager": "true", **arguments},
    )


def job(
    name: str,
    outputs: tuple[tuple[int, ...], ...] = ((),),
    *,
    prompt: tuple[int, ...] = PROMPT,
    **params: Any,
) -> Request:
    fields: dict[str, Any] = {"max_tokens": NUM_TOKENS, "seed": 7, "ignore_eos": True, **params}
    finished = (False,) * len(outputs)
    return Request(name, 1, "t", "standard", (prompt,), SamplingParams(**fields), outputs, finished)


def workload_jobs() -> list[Request]:
    return [
        job(
            f"w-{number}",
            prompt=request.prompt_token_ids,
            max_tokens=request.max_tokens,
            temperature=0.0,
        )
        for number, request in enumerate(WORKLOAD.requests)
    ]
