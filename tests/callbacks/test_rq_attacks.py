"""A writer to Redis can add jobs to RQ's queue, but none of them runs code."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import redis
from rq.callbacks import Callback as RqCallback
from rq.defaults import RQ_KEY_PREFIX
from rq.serializers import JSONSerializer
from rq.webhook import Webhook

from contract.outbox import Taken
from infra.embedded_redis import EmbeddedRedis
from workers.callbacks.rq_runner import (
    FUNCTION,
    AttemptQueue,
    ForgedJob,
    RqRunner,
    SignedJob,
    derived_key,
    open_redis,
    signed_job,
)

KEY = "a key of this installation"
OURS = Taken("job-0-" + "0" * 32, 1)
LAST = Taken("job-0-" + "f" * 32, 7)


class Runner:
    """A running RQ worker with one thread, and its deliveries."""

    def __init__(self, url: str) -> None:
        self.client = open_redis(url)
        self.client.flushall()
        self.attempts = AttemptQueue(self.client, "test", KEY)
        self.delivered: list[Taken] = []
        self.has_delivered = threading.Event()
        self._has_last = threading.Event()
        self._runner = RqRunner(
            self.attempts, self.client, self._deliver, lambda _: None, max_concurrent=1
        )
        self._runner.start()

    def _deliver(self, taken: Taken) -> None:
        self.delivered.append(taken)
        self.has_delivered.set()
        if taken == LAST:
            self._has_last.set()

    def finish(self) -> None:
        """Returns once everything queued before has been processed, and stops the worker."""
        last = signed_job(LAST, self.attempts.key, self.client, JSONSerializer)
        self.attempts.queue.enqueue_job(last)  # behind all others
        assert self._has_last.wait(20)
        self._runner.stop()
        self.client.close()


@pytest.fixture
def runner(redis_server: EmbeddedRedis) -> Runner:
    return Runner(redis_server.url)


def forge(runner: Runner, job: SignedJob) -> None:
    runner.attempts.queue.enqueue_job(job)


def plain_job(client: redis.Redis, function: str, *args: object, **options: Any) -> SignedJob:
    job = SignedJob.create(
        function, args=args, connection=client, serializer=JSONSerializer, **options
    )
    assert isinstance(job, SignedJob)
    return job


def test_a_forged_function_is_not_run(runner: Runner, tmp_path: Path) -> None:
    """`os.system` in a record of RQ, with and without a signature copied from a real job."""
    mark = tmp_path / "ran"
    forge(runner, plain_job(runner.client, "os.system", f"touch {mark}"))
    real = signed_job(OURS, derived_key(KEY, "test"), runner.client, JSONSerializer)
    forge(runner, plain_job(runner.client, "os.system", f"touch {mark}", *real.args[1:]))
    forge(runner, plain_job(runner.client, "pathlib.Path.touch", str(mark)))
    runner.finish()
    assert not mark.exists()
    assert runner.delivered == [LAST]


def test_a_tampered_payload_is_not_delivered(runner: Runner) -> None:
    """Another job id, attempt or RQ id, and the signature of another namespace."""
    real = signed_job(OURS, derived_key(KEY, "test"), runner.client, JSONSerializer)
    job_id, attempt, mac = real.args
    forge(runner, plain_job(runner.client, FUNCTION, "job-0-" + "1" * 32, attempt, mac, id=real.id))
    forge(runner, plain_job(runner.client, FUNCTION, job_id, 2, mac, id=f"cb-{job_id}-2"))
    forge(runner, plain_job(runner.client, FUNCTION, job_id, attempt, mac, id="another"))
    forge(runner, signed_job(OURS, derived_key(KEY, "other"), runner.client, JSONSerializer))
    runner.finish()
    assert runner.delivered == [LAST]


def test_rq_callbacks_of_a_genuine_payload_are_removed(runner: Runner, tmp_path: Path) -> None:
    """Callbacks and webhooks of RQ in a job whose signature is right."""
    real = signed_job(OURS, derived_key(KEY, "test"), runner.client, JSONSerializer)
    real.webhooks = [Webhook("http://127.0.0.1:9/", job_status="finished")]
    real._success_callback_name = RqCallback("os.getpid").name
    forge(runner, real)
    restored = SignedJob.fetch(real.id, connection=runner.client, serializer=JSONSerializer)
    assert isinstance(restored, SignedJob)
    assert (restored.webhooks, restored.success_callback) == ([], None)
    assert restored.failure_callback is None
    runner.finish()
    assert runner.delivered == [OURS, LAST]


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
def test_malformed_data_is_rejected(redis_server: EmbeddedRedis, data: bytes) -> None:
    """With one error, before any of it is used."""
    client = open_redis(redis_server.url)
    job = SignedJob("cb-j-1", connection=client, serializer=JSONSerializer)
    job.data = data
    with pytest.raises(ForgedJob):
        job.taken(derived_key(KEY, "test"))
    with pytest.raises(ForgedJob):
        _ = job.func
    client.close()


def test_the_job_has_a_record_id_only(redis_server: EmbeddedRedis) -> None:
    """No URL, secret or body goes through RQ."""
    client = open_redis(redis_server.url)
    job = signed_job(OURS, derived_key(KEY, "test"), client, JSONSerializer)
    function, instance, args, kwargs = json.loads(job.data)
    assert (function, instance, kwargs) == (FUNCTION, None, {})
    assert args[:2] == [OURS.job_id, OURS.attempt]
    assert len(args[2]) == 64
    client.close()


def test_commands_written_to_redis_are_ignored(runner: Runner) -> None:
    """RQ's `shutdown` would end the process."""
    runner.attempts.put([OURS])
    assert runner.has_delivered.wait(20)  # so the worker is registered
    prefix = f"{RQ_KEY_PREFIX}:worker:"
    key = min(runner.client.scan_iter(f"{prefix}*"), key=len)  # others are longer
    channel = f"{RQ_KEY_PREFIX}:pubsub:{key.decode().removeprefix(prefix)}"
    runner.client.publish(channel, json.dumps({"command": "shutdown"}))
    runner.client.set(f"{RQ_KEY_PREFIX}:suspended", 1)
    runner.finish()
    assert runner.delivered == [OURS, LAST]
