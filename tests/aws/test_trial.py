"""The trial of a deployment over HTTP, against a real gateway."""

import asyncio
import threading
from typing import Any

import pytest
import redis.asyncio

from contract.functions import Functions
from contract.keys import Keys
from contract.starts import ANY_LANE, Starts
from infra.aws.trial import Trial, asker, failures_of
from infra.aws.workforce import EcsService
from infra.embedded_redis import EmbeddedRedis
from tests.aws.lambda_events import KEY
from tests.aws.test_pool_service import ecs
from tests.fleet import until
from tests.gateway.conftest import make_settings, running_gateway
from tests.gateway.fake_worker import MODEL, FakeWorker, publish_model, says
from tests.gateway.vector_worker import CARDS, publish_vector_model

__all__ = ["ecs"]
pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("is_announced", [False, True])
async def test_a_trial_is_a_job_that_a_worker_answers(
    redis_server: EmbeddedRedis,
    redis_client: redis.asyncio.Redis,
    keys: Keys,
    functions: Functions,
    capsys: pytest.CaptureFixture[str],
    is_announced: bool,
) -> None:
    """It asks for a worker, waits for it, and ends with its answer. Neither key nor output is
    printed."""
    starts = Starts(redis_client, keys)
    worker = FakeWorker(functions, script=says("wörld"))
    if is_announced:
        await publish_model(redis_client, keys)
    settings = make_settings(redis_server.url, api_key=KEY, declared_models=(MODEL,))
    sleeping, ready = threading.Event(), threading.Event()

    def sleep(_: float) -> None:
        sleeping.set()
        assert ready.wait(20)

    with running_gateway(settings) as url:
        trial = Trial(asker(url, KEY), MODEL, "interactive", lambda: False, sleep=sleep)
        running = asyncio.create_task(asyncio.to_thread(trial.run))

        async def is_demanded() -> bool:
            waits = await redis_client.hget(
                keys.of("counters", MODEL, "interactive"), "queued_jobs"
            )
            return bool(waits) if is_announced else await starts.is_wanted(MODEL, ANY_LANE)

        await until(is_demanded)
        await asyncio.to_thread(sleeping.wait, 20)
        await publish_model(redis_client, keys)
        await worker.beat()
        serving = asyncio.create_task(worker.serve())
        ready.set()
        try:
            await running
        finally:
            serving.cancel()
    printed = capsys.readouterr().out
    expected = "accepted" if is_announced else "no_workers: the first worker"
    assert printed.startswith("trial job")
    assert expected in printed
    assert KEY not in printed
    assert "wörld" not in printed


@pytest.mark.parametrize("model", CARDS)
async def test_any_kind_of_model_can_be_tried(
    redis_server: EmbeddedRedis, redis_client: redis.asyncio.Redis, keys: Keys, model: str
) -> None:
    """Embedders, rerankers, classifiers, also of pairs alone: a job of theirs is accepted."""
    await publish_vector_model(redis_client, keys, model)
    ids = []

    def sleep(_: float) -> None:
        raise StopTrial

    with running_gateway(make_settings(redis_server.url)) as url:

        def ask(*asked: Any) -> tuple[int, dict[str, Any]]:
            status, answer = asker(url, KEY)(*asked)
            if status == 202:
                ids.append(answer["id"])
            return status, answer

        trial = Trial(ask, model, "standard", lambda: False, sleep=sleep)
        with pytest.raises(StopTrial):
            await asyncio.to_thread(trial.run)
    assert len(ids) == 1


class StopTrial(Exception):
    """The job was submitted."""


def test_a_failed_task_of_this_deployment_ends_the_trial(ecs: EcsService) -> None:
    """Not one that failed before it."""
    shown = ecs.client.describe_services(cluster="c", services=["s"])
    [primary] = shown["services"][0]["deployments"]

    class Client:
        num_failed = 2

        def describe_services(self, **_: object) -> dict[str, object]:
            return {"services": [{"deployments": [primary | {"failedTasks": self.num_failed}]}]}

    client = Client()
    has_failed = failures_of(client, "c", "s")
    assert not has_failed()
    client.num_failed = 3
    assert has_failed()


def test_a_gateway_without_an_answer_is_asked_again() -> None:
    """A name that DNS does not know yet, for example."""
    status, answer = asker("http://127.0.0.1:1", KEY)("GET", "/v1/models/m", None)
    assert (status, answer["error"]["code"]) == (0, "no_answer")
