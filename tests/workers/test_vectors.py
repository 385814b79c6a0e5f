"""Prefill-only jobs from the log's point of view: each vector once, also after a killed worker."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from contract.catalogue import Catalogue
from contract.events import ChoiceDelta, Tokens
from contract.function_types import Submission
from contract.jobs import (
    Endpoint,
    FinishReason,
    Job,
    JobStatus,
    Pooling,
)
from contract.keys import new_job_id
from contract.model_cards import ModelCard, PoolingCard
from contract.payloads.directory import DirectoryStore
from contract.payloads.encoding import decode_log
from contract.vector_answers import num_vector_bytes
from infra.embedded_redis import EmbeddedRedis
from tests.fakes import HashModelOptions, hash_tokenizer
from tests.fleet import Answer, Caller, WorkerProcess, fleet, until
from tests.tiny_encoders import save_embedder
from tests.workers.held import hold, job_of
from workers.ipc.messages import EngineReady, VectorOut
from workers.supervisor.held_job import HeldJob
from workers.supervisor.publisher import ResultKeeper
from workers.supervisor.worker_broker import make_card

pytestmark = pytest.mark.anyio

NUM_PROMPTS = 500
NUM_DIMENSIONS = 32


def pooled_job(prompts: list[tuple[int, ...]], **changes: Any) -> Job:
    fields: dict[str, Any] = {
        "id": new_job_id(),
        "lane": "scoring",
        "endpoint": Endpoint.EMBEDDINGS,
        "prompt_list": tuple(prompts),
        "pooling": Pooling(),
    }
    return job_of(params={"max_tokens": 0, "seed": 0}, **(fields | changes))


def hold_three(*logged: Tokens, **changes: Any) -> HeldJob:
    """A held job of three prompts, with a log."""
    job = pooled_job([(1, 2), (3,), (4, 5)], id="job", **changes)
    return hold(job, *logged, cost_tokens=5)


def delta(choice: int, vector: bytes) -> ChoiceDelta:
    return ChoiceDelta(choice, 0, (), "", FinishReason.STOP, vector=vector)


def test_a_step_s_vectors_are_one_event() -> None:
    """No tokens, no text, and the job is complete with the last one."""
    held = hold_three()
    held.take(VectorOut("job", 1, 2, b"cccc"))
    held.take(VectorOut("job", 1, 0, b"aaaa"))

    assert held.take_event() == (Tokens((delta(0, b"aaaa"), delta(2, b"cccc"))), 0)
    assert not held.has_news
    assert not held.is_complete
    held.take(VectorOut("job", 1, 1, b"bbbb"))
    assert held.take_event() == (Tokens((delta(1, b"bbbb"),)), 0)
    assert held.is_complete


def test_a_resumed_job_starts_with_what_its_log_lacks() -> None:
    """The engine is told which prompts have ended, and not the texts of the answer."""
    held = hold_three(
        Tokens((delta(1, b"bbbb"),)), pooling=Pooling(dimensions=4, documents=("secret",))
    )

    message = held.start_message()

    assert message.finished == (False, True, False)
    assert message.outputs == ((), (), ())
    assert message.pooling == Pooling(dimensions=4)
    assert not held.has_news
    held.take(VectorOut("job", 1, 1, b"late"))
    assert not held.has_news, "a vector that the log has is not logged again"


def test_a_job_fills_one_place_until_it_has_ended() -> None:
    """However many prompts it has; and each prompt holds its share of the cost."""
    held = hold_three()
    assert (held.num_open, held.held_tokens) == (1, 5)
    for choice in range(3):
        held.take(VectorOut("job", 1, choice, b"aaaa"))
    assert (held.num_open, held.held_tokens) == (0, 0)


def test_events_are_limited_in_size() -> None:
    """Redis would serve no one else while it takes a very large one."""
    held = hold_three()
    for choice in range(3):
        held.take(VectorOut("job", 1, choice, bytes(600_000)))

    sizes = []
    while held.has_news:
        event, _ = held.take_event()
        assert isinstance(event, Tokens)
        sizes.append(len(event.deltas))
    assert sizes == [1, 1, 1]


def test_many_vectors_are_due_for_the_object_store(tmp_path: Path) -> None:
    """More than one event may hold, also where another worker has logged some; fewer stay in
    Redis, whatever texts may take there."""
    broker: Any = None  # only reads logs
    keeper = ResultKeeper(DirectoryStore(tmp_path), 1, broker)
    held = hold_three()
    for choice in range(2):
        held.take(VectorOut("job", 1, choice, bytes(2**19)))
    assert not keeper.is_due(held)
    held.take(VectorOut("job", 1, 2, b"a"))
    assert keeper.is_due(held)
    resumed = hold_three(Tokens((delta(1, bytes(2**20)),)))
    resumed.take(VectorOut("job", 1, 0, b"a"))
    assert keeper.is_due(resumed)


def test_the_card_of_a_model_for_vectors_names_its_lane_first() -> None:
    """Gateways take the first for jobs that name none."""
    pooling = PoolingCard(kind="embedding", num_outputs=4)
    ready = EngineReady(10, 10, (), hash_tokenizer(), 1, 1, 1, pooling=pooling)

    card = make_card("m", ready, ("interactive", "standard", "scoring", "batch"))

    assert card.lanes == ("scoring", "interactive", "standard", "batch")
    assert card.pooling == pooling
    assert Endpoint.EMBEDDINGS in card.endpoints


# --- a worker process with a tiny BERT --------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_embedder("bert", tmp_path_factory.mktemp("bert"))


def settings(folder: Path) -> dict[str, Any]:
    """Small steps, so that a job takes many."""
    engine = {
        "model_path": str(folder),
        "device": "cpu",
        "num_threads": 1,
        "max_num_batched_tokens": 64,
    }
    return {"engine_module": "workers.engine_process.engine_loop", "engine": engine}


def prompts() -> list[tuple[int, ...]]:
    return [
        (1, *((4 + (number * 7 + place) % 250) for place in range(1 + number % 40)), 2)
        for number in range(NUM_PROMPTS)
    ]


async def submit(caller: Caller, job: Job) -> Job:
    await caller.functions.submit(
        job, Submission(max_output_tokens=0, deadline_s=200.0, retention_s=600.0)
    )
    return job


def floats(vector: bytes) -> npt.NDArray[np.float32]:
    return np.frombuffer(vector, dtype="<f4")


def assert_whole(answer: Answer, job: Job) -> None:
    [end] = answer.ends
    assert end.status is JobStatus.SUCCEEDED
    assert (end.prompt_tokens, end.output_tokens) == (job.num_prompt_tokens, 0)
    assert sorted(answer.vectors) == list(range(job.num_prompts))
    assert {len(vector) for vector in answer.vectors.values()} == {4 * NUM_DIMENSIONS}
    assert set(answer.finish_reason.values()) == {"stop"}


@pytest.mark.e2e
@pytest.mark.campaign
async def test_a_killed_worker_s_job_has_each_vector_once(
    folder: Path, caller: Caller, redis_server: EmbeddedRedis
) -> None:
    """500 prompts; the worker is killed in the middle, and another goes on from the log. The
    vectors are those of an undisturbed run, up to the rounding of other batches."""
    async with fleet(redis_server.url, 1, **settings(folder), lease_s=1.0) as workers:
        whole = await submit(caller, pooled_job(prompts()))
        expected = await caller.answer(whole)
        assert_whole(expected, whole)

        job = await submit(caller, pooled_job(prompts()))

        async def has_begun() -> bool:
            return len(await caller.entries(job)) > 2

        await until(has_begun)
        workers[0].kill()
        num_before = sum(
            len(entry.event.deltas)
            for entry in await caller.entries(job)
            if isinstance(entry.event, Tokens)
        )
        assert 0 < num_before < NUM_PROMPTS
        workers[:] = [
            WorkerProcess(redis_server.url, HashModelOptions(), **settings(folder), lease_s=1.0)
        ]
        answer = await caller.answer(job)

    assert_whole(answer, job)
    assert (await caller.view(job)).attempt == 2
    for number, vector in answer.vectors.items():
        np.testing.assert_allclose(floats(vector), floats(expected.vectors[number]), atol=2e-6)


@pytest.mark.e2e
@pytest.mark.campaign
async def test_many_vectors_are_in_the_object_store_and_jobs_of_the_other_kind_fail(
    tmp_path: Path, caller: Caller, redis_server: EmbeddedRedis
) -> None:
    """2,100 of 512 bytes. Redis keeps the end alone.

    Gateways refuse jobs of the other kind first; a worker does if one gets through, and so it does
    a text that is too long, whose index it names."""
    folder = save_embedder("bert", tmp_path, mode=("mean", "max", "cls", "lasttoken"))
    fields = settings(folder) | {"object_store": str(tmp_path / "objects")}
    fields["engine"]["max_num_batched_tokens"] = 2_048
    async with fleet(redis_server.url, 1, **fields):
        job = await submit(caller, pooled_job([(1, 4 + n % 250, 2) for n in range(2_100)]))

        async def has_ended() -> bool:
            return (await caller.view(job)).is_terminal

        await until(has_ended)

        text = await caller.submit("write on")
        long = await submit(caller, pooled_job([(1, 2), (4,) * 401]))
        good = await submit(caller, pooled_job([(1, 5, 2)]))
        ends = [(await caller.answer(each)).ends[0] for each in (text, long, good)]
        card: ModelCard | None = None

        async def is_published() -> bool:
            nonlocal card
            card = await Catalogue(caller.client, caller.keys).model("m")
            return card is not None

        await until(is_published)
    async with fleet(redis_server.url, 1):
        vectors = await submit(caller, pooled_job([(100, 101)]))
        ends.append((await caller.answer(vectors)).ends[0])
    view = await caller.view(job)
    assert view.result is not None
    assert await caller.client.xlen(caller.keys.of("log", job.id)) == 1
    kept = DirectoryStore(tmp_path / "objects").get(view.result)
    entries = decode_log(kept)
    assert len(entries) > 1
    assert num_vector_bytes(entries) == 2_100 * 512
    assert [end.code for end in ends] == ["bad_parameter", "prompt_too_long", "", "bad_parameter"]
    assert "prompt 1" in ends[1].message
    assert card is not None
    assert card.pooling is not None
    assert msgspec.structs.astuple(card.pooling)[:2] == ("embedding", 128)
