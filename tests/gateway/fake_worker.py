"""A fake worker on the real protocol: claims jobs and appends what a script returns."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import redis.asyncio

from contract.catalogue import Catalogue
from contract.codec import encode_tokenizer
from contract.errors import BrokerUnavailable
from contract.events import ChoiceDelta, Prompt, TokenLogprob, Tokens
from contract.function_types import Append, Claimed, JobMark, Verdict, WorkerCapacity, WorkerState
from contract.functions import Functions
from contract.jobs import Endpoint, FinishReason, Job, JobStatus, SamplingParams
from contract.keys import Keys
from contract.library import ensure_library
from contract.model_cards import (
    Capabilities,
    GenerationDefaults,
    ModelCard,
    PoolingCard,
    TokenizerFiles,
)
from tests.fakes import EOS_ID, VOCAB_SIZE, encode_text, hash_tokenizer
from tests.fleet import until

MODEL = "hash"
LANES = ("interactive", "standard", "batch")
LEASE_S = 10.0
CONTEXT_LENGTH = 512

Script = Callable[[Job], Sequence[Prompt | Tokens]]


def says(*texts: str, finish: FinishReason = FinishReason.STOP) -> Script:
    """A script: each choice outputs the texts, one event each; the last ends the choice.
    Requested log probabilities of prompts come first, one token and then the rest."""

    def script(job: Job) -> list[Prompt | Tokens]:
        events, start = _prompts(job), 0
        for i, text in enumerate(texts):
            token_ids = encode_text(text)
            is_last = i == len(texts) - 1
            deltas = [
                ChoiceDelta(
                    choice,
                    start,
                    token_ids,
                    text,
                    finish if is_last else None,
                    _logprobs(job, token_ids),
                )
                for choice in range(job.num_choices)
            ]
            start += len(token_ids)
            events.append(Tokens(tuple(deltas)))
        return events

    return script


def finds(num_cached: int, script: Script) -> Script:
    """The script, with so many tokens of the prompt found in the cache."""

    def found(job: Job) -> list[Prompt | Tokens]:
        events, is_first = list[Prompt | Tokens](), True
        for event in script(job):
            if isinstance(event, Tokens) and is_first:
                event, is_first = Tokens(event.deltas, num_cached), False
            events.append(event)
        return events

    return found


def _prompts(job: Job) -> list[Prompt | Tokens]:
    num_top = job.params.prompt_logprobs
    if num_top is None:
        return []
    top = tuple((token_id, -0.5 * rank) for rank, token_id in enumerate(range(97, 97 + num_top), 1))
    parts = []
    for number, prompt_ids in enumerate(job.prompts):
        scores = [TokenLogprob(i, -float(p), top) for p, i in enumerate(prompt_ids)]
        parts += [Prompt(1, tuple(scores[1:2]), number), Prompt(2, tuple(scores[2:]), number)]
    return [part for part in parts if part.logprobs]


def _logprobs(job: Job, token_ids: Sequence[int]) -> tuple[TokenLogprob, ...] | None:
    num_top = job.params.logprobs
    if num_top is None:
        return None
    top = [(token_id, -0.5 * rank) for rank, token_id in enumerate(range(65, 65 + num_top), 1)]
    return tuple(TokenLogprob(token_id, -0.25, tuple(top)) for token_id in token_ids)


async def publish_model(
    client: redis.asyncio.Redis,
    keys: Keys,
    name: str = MODEL,
    *,
    files: TokenizerFiles | None = None,
    context_length: int = CONTEXT_LENGTH,
    vocab_size: int = VOCAB_SIZE,
    lanes: tuple[str, ...] = LANES,
    capabilities: Capabilities | None = None,
    pooling: PoolingCard | None = None,
    truncates: bool = False,
    generation: GenerationDefaults | None = None,
) -> ModelCard:
    files = files or hash_tokenizer()
    card = ModelCard(
        name=name,
        context_length=context_length,
        vocab_size=vocab_size,
        eos_token_ids=(EOS_ID,),
        tokenizer_sha256=encode_tokenizer(files)[0],
        created_s=1_700_000_000,
        lanes=lanes,
        capabilities=capabilities or Capabilities(structured_output=True, tools=True),
        pooling=pooling,
        truncates=truncates,
        generation=generation or GenerationDefaults(),
    )
    await Catalogue(client, keys).publish(card, files)
    return card


@dataclass
class FakeWorker:
    """Live after `beat`. `serve` runs each job by the script; tests may also call the steps
    themselves."""

    functions: Functions
    model: str = MODEL
    incarnation: str = "w1"
    capacity: WorkerCapacity = field(default_factory=WorkerCapacity)
    script: Script = field(default_factory=lambda: says("Hello", " wörld", "!"))
    seen: list[Job] = field(default_factory=list)
    lanes: tuple[str, ...] = LANES
    info: str = "{}"  # JSON, of its status
    state: WorkerState = "up"
    prompt_token_s: float | None = None  # of a worker that keeps prefixes

    @property
    def client(self) -> redis.asyncio.Redis:
        return self.functions._client

    @property
    def keys(self) -> Keys:
        return self.functions._keys

    async def beat(self, *held: Claimed) -> list[str]:
        pairs = [(claimed.job.id, claimed.epoch) for claimed in held]
        return await self.functions.heartbeat(
            self.incarnation,
            self.model,
            pairs,
            lease_s=LEASE_S,
            info=self.info,
            capacity=self.capacity,
            state=self.state,
        )

    async def claim(self) -> Claimed:
        """Waits for the next job."""
        if (found := await self._claimed()) is not None:
            return found
        async with self.client.pubsub() as pubsub:
            await pubsub.subscribe(self.keys.of("wake", self.model))
            while (found := await self._claimed()) is None:
                # A clock that was moved wakes nobody.
                await pubsub.get_message(ignore_subscribe_messages=True, timeout=0.05)
            return found

    async def _claimed(self) -> Claimed | None:
        jobs: list[Claimed]
        try:
            jobs = await self.functions.claim(
                self.incarnation,
                self.model,
                self.lanes,
                lease_s=LEASE_S,
                max_jobs=1,
                max_tokens=10**6,
                prompt_token_s=self.prompt_token_s,
            )
        except BrokerUnavailable:  # a fixture has blocked this loop for longer than a command
            seen = [job.id for job in self.seen]
            jobs = await self.functions.mine(self.incarnation, seen, lease_s=LEASE_S)
        if not jobs:
            return None
        self.seen.append(jobs[0].job)
        return jobs[0]

    async def say(
        self, claimed: Claimed, number: int, event: Prompt | Tokens, *marks: JobMark
    ) -> tuple[Verdict | JobStatus, int]:
        deltas = event.deltas if isinstance(event, Tokens) else ()
        num_tokens = sum(len(delta.token_ids) for delta in deltas)
        item = Append(claimed.job.id, claimed.epoch, number, event, num_tokens, marks=marks)
        [verdict] = await self.functions.append(self.incarnation, [item], lease_s=LEASE_S)
        return verdict

    async def finish(
        self, claimed: Claimed, number: int, code: str = "", message: str = ""
    ) -> None:
        fin = Append(
            claimed.job.id,
            claimed.epoch,
            number,
            fin=JobStatus.FAILED if code else JobStatus.SUCCEEDED,
            code=code,
            message=message,
        )
        await self.functions.append(self.incarnation, [fin], lease_s=LEASE_S)

    async def run(self, claimed: Claimed, script: Script | None = None) -> None:
        """Runs one job from its first event to its end."""
        events = (script or self.script)(claimed.job)
        for number, event in enumerate(events, 1):
            await self.say(claimed, number, event)
        await self.finish(claimed, len(events) + 1)

    async def serve(self) -> None:
        while True:
            await self.run(await self.claim())

    async def wait_until_ended(self, claimed: Claimed) -> JobStatus:
        """Waits until another party has ended the job, as a worker learns by its heartbeat."""
        while not await self.beat(claimed):  # noqa: ASYNC110 - another process's state
            await asyncio.sleep(0.005)
        found = await self.functions.read(claimed.job.id, claimed.job.tenant)
        assert found is not None
        return found[0].status


async def live_worker(client: redis.asyncio.Redis) -> FakeWorker:
    """Publishes a model and returns its live worker."""
    await ensure_library(client)
    keys = Keys("test")
    await publish_model(client, keys)
    worker = FakeWorker(Functions(client, keys))
    await worker.beat()
    return worker


async def until_followers(client: redis.asyncio.Redis, keys: Keys, job: Job, wanted: int) -> None:
    """Returns once this many gateways follow the job, or another one of the same channel."""

    async def is_so() -> bool:
        [(_, num_followers)] = await client.pubsub_numsub(keys.of("ev", job.channel or job.id))
        return bool(num_followers == wanted)

    await until(is_so)


def job_of_one() -> Job:
    """A job whose prompt has one token."""
    params = SamplingParams(max_tokens=64, seed=1)
    return Job(
        id="x",
        tenant="t",
        model=MODEL,
        lane="standard",
        endpoint=Endpoint.COMPLETIONS,
        prompt_ids=(1,),
        params=params,
        created_s=0,
    )
