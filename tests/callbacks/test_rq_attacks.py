"""Whoever can write to Redis can put jobs into RQ's queue; none of them runs anything."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import redis
from rq.callbacks import Callback as RqCallback
from rq.serializers import JSONSerializer
from rq.webhook import Webhook

from contract.outbox import Taken
from infra.embedded_redis import EmbeddedRedis
from workers.callbacks.rq_runner import AttemptQueue, RqRunner, open_redis
from workers.callbacks.signed_job import FUNCTION, ForgedJob, SignedJob, derived_key, signed_job

KEY = "a key of this installation"
OURS = Taken("job-0-" + "0" * 32, 1)
LAST = Taken("job-0-" + "f" * 32, 7)


class Hands:
    """A running RQ worker, one delivery at a time, and what it was made to deliver."""

    def __init__(self, url: str) -> None:
        self.client = open_redis(url)
        self.client.flushall()
        self.attempts = AttemptQueue(self.client, "test", KEY)
        self.delivered: list[Taken] = []
        self._heard = threading.Event()
        self._hands = RqRunner(self.attempts, self.client, self._deliver, max_concurrent=1)
        self._hands.start()

    def _deliver(self, taken: Taken) -> None:
        self.delivered.append(taken)
        if taken == LAST:
            self._heard.set()

    def finish(self) -> None:
        """Everything that was queued before has been looked at."""
        self.attempts.put([LAST])
        assert self._heard.wait(20)
        self._hands.stop()
        self.client.close()


@pytest.fixture
def hands(redis_server: EmbeddedRedis) -> Hands:
    return Hands(redis_server.url)


def forge(hands: Hands, job: SignedJob) -> None:
    hands.attempts.queue.enqueue_job(job)


def plain_job(client: redis.Redis, function: str, *args: object, **options: Any) -> SignedJob:
    job = SignedJob.create(
        function, args=args, connection=client, serializer=JSONSerializer, **options
    )
    assert isinstance(job, SignedJob)
    return job


def test_a_forged_function_is_not_run(hands: Hands, tmp_path: Path) -> None:
    """`os.system` in a record of RQ's, with and without a signature copied from a real job."""
    mark = tmp_path / "ran"
    forge(hands, plain_job(hands.client, "os.system", f"touch {mark}"))
    real = signed_job(OURS, derived_key(KEY, "test"), hands.client, JSONSerializer)
    forge(hands, plain_job(hands.client, "os.system", f"touch {mark}", *real.args[1:]))
    forge(hands, plain_job(hands.client, "pathlib.Path.touch", str(mark)))
    hands.finish()
    assert not mark.exists()
    assert hands.delivered == [LAST]


def test_a_tampered_payload_is_not_delivered(hands: Hands) -> None:
    """Another job id, another attempt, another RQ id, another namespace's signature."""
    real = signed_job(OURS, derived_key(KEY, "test"), hands.client, JSONSerializer)
    job_id, attempt, mac = real.args
    forge(hands, plain_job(hands.client, FUNCTION, "job-0-" + "1" * 32, attempt, mac, id=real.id))
    forge(hands, plain_job(hands.client, FUNCTION, job_id, 2, mac, id=f"cb-{job_id}-2"))
    forge(hands, plain_job(hands.client, FUNCTION, job_id, attempt, mac, id="another"))
    forge(hands, signed_job(OURS, derived_key(KEY, "other"), hands.client, JSONSerializer))
    hands.finish()
    assert hands.delivered == [LAST]


def test_a_genuine_payload_brings_nothing_along(hands: Hands, tmp_path: Path) -> None:
    """RQ's own callbacks and webhooks, hung on a job whose signature is right, are cut off."""
    real = signed_job(OURS, derived_key(KEY, "test"), hands.client, JSONSerializer)
    real.webhooks = [Webhook("http://127.0.0.1:9/", job_status="finished")]
    real._success_callback_name = RqCallback("os.getpid").name
    forge(hands, real)
    restored = SignedJob.fetch(real.id, connection=hands.client, serializer=JSONSerializer)
    assert isinstance(restored, SignedJob)
    assert (restored.webhooks, restored.success_callback) == ([], None)
    assert restored.failure_callback is None
    hands.finish()
    assert hands.delivered == [OURS, LAST]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80\x04]",
        b"[]",
        b'["x"]',
        b"[1, 2, 3, 4]",
        json.dumps([FUNCTION, "an instance", ["j", 1, "m"], {}]).encode(),
        json.dumps([FUNCTION, None, ["j", 1, "m"], {"a": 1}]).encode(),
        json.dumps([FUNCTION, None, ["j", True, "m"], {}]).encode(),
        json.dumps([FUNCTION, None, ["j", 1, "ü"], {}]).encode(),
        json.dumps([FUNCTION, None, [["j"], 1, "m"], {}]).encode(),
    ],
)
def test_data_of_any_form_is_refused(redis_server: EmbeddedRedis, data: bytes) -> None:
    """With one error, before anything of it is used."""
    client = open_redis(redis_server.url)
    job = SignedJob("cb-j-1", connection=client, serializer=JSONSerializer)
    job.data = data
    with pytest.raises(ForgedJob):
        job.taken(derived_key(KEY, "test"))
    with pytest.raises(ForgedJob):
        _ = job.func
    client.close()


def test_the_job_holds_a_record_id_only(redis_server: EmbeddedRedis) -> None:
    """Neither URL nor secret nor body goes through RQ."""
    client = open_redis(redis_server.url)
    job = signed_job(OURS, derived_key(KEY, "test"), client, JSONSerializer)
    function, instance, args, kwargs = json.loads(job.data)
    assert (function, instance, kwargs) == (FUNCTION, None, {})
    assert args[:2] == [OURS.job_id, OURS.attempt]
    assert len(args[2]) == 64
    client.close()


def test_commands_written_to_redis_are_ignored(hands: Hands) -> None:
    """RQ's `shutdown` would end the process."""
    for key in hands.client.scan_iter("rq:worker:*"):
        name = key.decode().removeprefix("rq:worker:")
        hands.client.publish(f"rq:pubsub:{name}", json.dumps({"command": "shutdown"}))
    hands.client.set("rq:suspended", 1)
    hands.finish()
    assert hands.delivered == [LAST]
