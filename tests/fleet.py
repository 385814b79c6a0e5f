"""Programs as processes, workers above all, and a caller that submits jobs and reads their logs."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import IO, Any, TypeVar

import msgspec
import redis.asyncio

from contract.events import End, LogEntry, Prompt, TokenLogprob, Tokens
from contract.function_types import JobView, Submission
from contract.functions import Functions
from contract.jobs import Endpoint, Job, SamplingParams
from contract.keys import Keys, new_job_id
from tests.fakes import HashModelOptions, encode_text
from tests.hash_engine import HASH_MODEL_VARIABLE

TENANT = "t"
P = TypeVar("P", bound="Program")


async def until(condition: Callable[[], Awaitable[bool]], timeout_s: float = 60.0) -> None:
    """Returns once the condition holds; raises TimeoutError after a while."""
    async with asyncio.timeout(timeout_s):
        while not await condition():  # noqa: ASYNC110 - other processes set no event here
            await asyncio.sleep(0.01)


class Program:
    """`python -m MODULE …`, in its own session. `output` receives what it prints."""

    def __init__(
        self,
        *words: str,
        environ: Mapping[str, str] = MappingProxyType({}),
        output: IO[bytes] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", *words],
            env={**os.environ, **environ},
            pass_fds=pass_fds,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """kill -9 of this process alone. An engine below it must end by itself."""
        self._process.kill()
        self._process.wait()

    def terminate_group(self) -> None:
        """SIGTERM to this process and those below it, as some service managers do."""
        os.killpg(self.pid, signal.SIGTERM)

    def kill_group(self) -> None:
        """kill -9 of this process and those below it, also of stopped ones."""
        if self.is_alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()

    def terminate(self) -> None:
        """SIGTERM, without waiting."""
        self._process.terminate()

    async def stop(self, timeout_s: float = 60.0) -> int:
        """Sends SIGTERM; returns the exit status."""
        self.terminate()
        return await asyncio.to_thread(self.wait, timeout_s)

    def wait(self, timeout_s: float) -> int:
        """Waits for a process that ends by itself; returns its exit status."""
        return self._process.wait(timeout_s)

    async def close(self) -> None:
        if self.is_alive:
            try:
                await self.stop()
            except subprocess.TimeoutExpired:
                self.kill()


class WorkerProcess(Program):
    """One worker on the hash model."""

    def __init__(
        self,
        redis_url: str,
        model: HashModelOptions,
        *,
        output: IO[bytes] | None = None,
        **settings: Any,
    ) -> None:
        environ = {HASH_MODEL_VARIABLE: msgspec.json.encode(model).decode()}
        fields = json.dumps({"redis_url": redis_url, **settings})
        super().__init__("tests.hash_worker", fields, environ=environ, output=output)


@dataclass
class Answer:
    """A job's complete log."""

    token_ids: dict[int, list[int]] = field(default_factory=dict)
    text: dict[int, str] = field(default_factory=dict)
    finish_reason: dict[int, str | None] = field(default_factory=dict)
    logprobs: dict[int, list[Any]] = field(default_factory=dict)
    vectors: dict[int, bytes] = field(default_factory=dict)
    # For each prompt, from its second token on.
    prompts: dict[int, list[TokenLogprob]] = field(default_factory=dict)
    ends: list[End] = field(default_factory=list)

    def add(self, entry: LogEntry) -> None:
        assert not self.ends, "nothing follows the end"
        if isinstance(entry.event, End):
            self.ends.append(entry.event)
            return
        if isinstance(entry.event, Prompt):
            prompt = self.prompts.setdefault(entry.event.prompt, [])
            assert entry.event.start == 1 + len(prompt), "no position is lost or repeated"
            prompt += entry.event.logprobs
            return
        assert isinstance(entry.event, Tokens)
        for delta in entry.event.deltas:
            ids = self.token_ids.setdefault(delta.choice, [])
            assert delta.start == len(ids), "no token is lost or repeated"
            assert self.finish_reason.get(delta.choice) is None, "nothing follows a finish"
            ids += delta.token_ids
            if delta.vector:
                self.vectors[delta.choice] = delta.vector
            self.text[delta.choice] = self.text.get(delta.choice, "") + delta.text
            self.finish_reason[delta.choice] = delta.finish_reason
            self.logprobs.setdefault(delta.choice, []).extend(delta.logprobs or ())


@dataclass
class Caller:
    """Submits a tenant's jobs and reads them, as a gateway does."""

    functions: Functions
    client: redis.asyncio.Redis
    keys: Keys
    retention_s: float = 600.0
    tenant: str = TENANT
    weight: float = 1.0

    async def submit(
        self,
        *prompts: str,
        deadline_s: float = 120.0,
        lane: str = "standard",
        needs_worker: bool = False,
        **params: Any,
    ) -> Job:
        fields: dict[str, Any] = {"max_tokens": 40, "seed": 7, "temperature": 0.0, **params}
        sampling = SamplingParams(**fields)
        prompt_list = tuple(map(encode_text, prompts))
        job = Job(
            id=new_job_id(),
            tenant=self.tenant,
            model="m",
            lane=lane,
            endpoint=Endpoint.COMPLETIONS,
            prompt_ids=prompt_list[0] if len(prompts) == 1 else (),
            prompt_list=prompt_list if len(prompts) > 1 else (),
            params=sampling,
            created_s=0,
            weight=self.weight,
        )
        cap = job.num_choices * sampling.max_tokens
        await self.functions.submit(
            job,
            Submission(
                max_output_tokens=cap,
                deadline_s=deadline_s,
                retention_s=self.retention_s,
                needs_worker=needs_worker,
            ),
        )
        return job

    async def view(self, job: Job) -> JobView:
        found = await self.functions.read(job.id, self.tenant)
        assert found is not None
        return found[0]

    async def entries(self, job: Job) -> list[LogEntry]:
        found = await self.functions.read(job.id, self.tenant, max_events=100_000)
        assert found is not None
        return found[1]

    async def answer(self, job: Job, timeout_s: float = 60.0) -> Answer:
        """Waits for the job's end and reads its log."""

        async def ended() -> bool:
            return (await self.view(job)).is_terminal

        await until(ended, timeout_s)
        answer = Answer()
        entries = await self.entries(job)
        assert [e.number for e in entries] == list(range(1, len(entries) + 1))
        for entry in entries:
            answer.add(entry)
        assert len(answer.ends) == 1
        return answer

    async def has_output(self, job: Job, num_tokens: int = 1) -> None:
        """Returns once the job has logged this many tokens."""

        async def enough() -> bool:
            return (await self.view(job)).num_output_tokens >= num_tokens

        await until(enough)

    async def worker_info(self) -> list[dict[str, Any]]:
        """The last report of each live worker."""
        incarnations: Any = await self.client.zrange(self.keys.of("workers", "m"), 0, -1)
        raw = [
            await self.client.hget(self.keys.of("worker", i.decode()), "info") for i in incarnations
        ]
        return [json.loads(info) for info in raw if info]

    async def num_workers(self, number: int) -> None:
        async def enough() -> bool:
            return await self.client.zcard(self.keys.of("workers", "m")) >= number

        await until(enough)


@contextlib.asynccontextmanager
async def fleet(
    redis_url: str, number: int, model: HashModelOptions | None = None, **settings: Any
) -> AsyncIterator[list[WorkerProcess]]:
    """Runs this many workers."""
    hash_model = model or HashModelOptions()
    async with running(
        WorkerProcess(redis_url, hash_model, **settings) for _ in range(number)
    ) as workers:
        yield workers


@contextlib.asynccontextmanager
async def running(programs: Iterable[P]) -> AsyncIterator[list[P]]:
    """Those that still run are ended at exit. Callers may replace items of the list."""
    started: list[P] = []
    try:
        started += programs
        yield started
    finally:
        await asyncio.gather(*(program.close() for program in started))
