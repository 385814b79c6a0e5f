"""Runs delivery attempts as RQ jobs, several at a time in one worker.

The outbox is authoritative: if RQ loses an attempt, its lease expires and the attempt is repeated.
Therefore RQ neither retries nor schedules.

RQ imports and calls the function named in a job's record, so whoever can write to Redis could run
code, even with the JSON serializer. These jobs import nothing: their function name is compared with
the only allowed one, their arguments carry an HMAC under a key that is not in Redis, and RQ's other
ways to run code or send requests are disabled."""

import hashlib
import hmac
import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import redis
from redis.exceptions import NoPermissionError, WatchError
from rq import Queue
from rq.exceptions import StopRequested
from rq.job import Job
from rq.serializers import JSONSerializer

from contract.cluster import pool_from_url
from contract.connection import denied
from contract.outbox import Taken
from workers.callbacks.rq_compat import FAILURE_TTL_S, JobWithoutCode, WorkerInThread

FUNCTION = "workers.callbacks.deliver"  # a name to compare with; the function does not exist
_TTL_S = 60  # of an RQ job; after that the outbox has made another attempt


class ForgedJob(Exception):
    """An RQ job that no relay of this namespace created. The message quotes no part of the job."""


class SignedJob(JobWithoutCode):
    """An RQ job that requests one delivery attempt."""

    @property
    def func(self) -> None:
        """RQ would import it by name."""
        raise ForgedJob("functions of RQ jobs are not imported")

    def taken(self, key: bytes) -> Taken:
        """The attempt that the job requests. Raises ForgedJob."""
        try:
            function, instance, args, kwargs = self.serializer.loads(self.data)
            job_id, attempt, mac = args
        except (ValueError, TypeError, AttributeError) as exc:
            raise ForgedJob("its data does not have the expected form") from exc
        if function != FUNCTION or instance is not None or kwargs != {}:
            raise ForgedJob("it names another function")
        if not (isinstance(job_id, str) and type(attempt) is int and isinstance(mac, str)):
            raise ForgedJob("its arguments do not have the expected types")
        taken = Taken(job_id, attempt)
        is_authentic = hmac.compare_digest(mac.encode(), _mac(key, taken).encode())
        if not is_authentic or self.id != rq_job_id(taken):
            raise ForgedJob("its signature is wrong")
        return taken


def rq_job_id(taken: Taken) -> str:
    """One id per attempt: RQ accepts an id once while its record exists."""
    return f"cb-{taken.job_id}-{taken.attempt}"


def signed_job(taken: Taken, key: bytes, connection: Any, serializer: Any) -> SignedJob:
    """Creates the RQ job of an attempt. It contains the job's id and the attempt's number only."""
    job = SignedJob.create(
        FUNCTION,
        args=(taken.job_id, taken.attempt, _mac(key, taken)),
        id=rq_job_id(taken),
        connection=connection,
        serializer=serializer,
        ttl=_TTL_S,
        result_ttl=0,
        failure_ttl=FAILURE_TTL_S,
        description=rq_job_id(taken),
    )
    assert isinstance(job, SignedJob)
    return job


def derived_key(key: str, namespace: str) -> bytes:
    """Derives the signing key of a namespace, so that its signatures are valid nowhere else."""
    return hmac.digest(key.encode(), f"batchway callbacks {namespace}".encode(), hashlib.sha256)


def _mac(key: bytes, taken: Taken) -> str:
    text = f"{FUNCTION}\n{taken.job_id}\n{taken.attempt}".encode()
    return hmac.digest(key, text, hashlib.sha256).hex()


log = logging.getLogger("batchway.callbacks")

MAINTENANCE_S = 60
_DEQUEUE_S = 1  # how long a poll blocks, and so a stop may take
_PAUSE_S = 1.0  # before restarting a worker that lost Redis
_SOCKET_S = 10.0
_CONNECT_S = 1.0


def open_redis(url: str) -> redis.Redis:
    """A blocking client for RQ, which decodes replies itself."""
    pool = pool_from_url(
        redis.ConnectionPool,
        url,
        os.environ["RQ_KEY_PREFIX"],  # its tag: workers/callbacks/__init__.py
        protocol=2,
        decode_responses=False,
        driver_info=None,  # as in contract/connection.py
        # The pool takes the session tickets of TLS 1.3 for unread data unless a reply was read
        # since, and without a password this is the first command.
        client_name="batchway-callbacks",
        socket_timeout=_SOCKET_S,
        socket_connect_timeout=_CONNECT_S,
    )
    return redis.Redis.from_pool(pool)


class AttemptQueue:
    """The RQ queue of a namespace."""

    def __init__(self, client: redis.Redis, namespace: str, key: str) -> None:
        self._client = client
        self.key = derived_key(key, namespace)
        self.queue: Any = Queue(
            f"batchway-{namespace}-callbacks",
            connection=client,
            serializer=JSONSerializer,
            job_class=SignedJob,
        )

    def put(self, attempts: Sequence[Taken]) -> None:
        """Enqueues attempts, except those already queued. RQ's option `unique` runs a script, which
        the Redis users of `batchway redis-roles` may not. A WatchError means that another process
        has enqueued the attempt, or that the connection was lost: then it is repeated.

        New attempts come first, in their order: if RQ is so slow that leases lapse in its queue,
        those at its end are over, and attempts behind them would be, too."""
        for taken in reversed(attempts):
            job = signed_job(taken, self.key, self._client, JSONSerializer)
            with suppress(WatchError), self._client.pipeline() as transaction:
                transaction.watch(job.key)  # type: ignore[no-untyped-call]
                if transaction.exists(job.key):
                    continue
                transaction.multi()
                self.queue.enqueue_job(job, pipeline=transaction)
                # `at_front` would need LPUSH, a right that users of earlier versions lack.
                transaction.lmove(self.queue.key, self.queue.key, "RIGHT", "LEFT")
                transaction.execute()

    def num_waiting(self) -> int:
        """Attempts that wait, and those that a worker has taken off the queue and not begun."""
        num_queued = int(self.queue.count)
        return num_queued + int(self._client.llen(self.queue.intermediate_queue_key))


class Places:
    """The places of a process's attempts. `tell` gets 1 when one is taken, -1 when it is free."""

    def __init__(self, number: int, tell: Callable[[int], None]) -> None:
        self._free = threading.Semaphore(number)
        self._tell = tell

    def take(self) -> None:
        self._free.acquire()
        self._tell(1)

    def give_back(self) -> None:
        self._free.release()
        self._tell(-1)


class ThreadedWorker(WorkerInThread):
    """Performs RQ jobs in a pool of threads; takes a job only when a thread is free."""

    job_class = SignedJob
    log_result_lifespan = False
    max_connection_wait_time = _PAUSE_S

    def __init__(
        self,
        attempts: AttemptQueue,
        client: redis.Redis,
        deliver: Callable[[Taken], None],
        pool: ThreadPoolExecutor,
        places: Places,
    ) -> None:
        super().__init__(
            [attempts.queue],
            connection=client,
            serializer=JSONSerializer,
            job_class=SignedJob,
            maintenance_interval=MAINTENANCE_S,
            log_job_description=False,
        )
        self._attempts = attempts
        self._deliver = deliver
        self._pool = pool
        self._places = places
        self._is_ending = False

    @property
    def dequeue_timeout(self) -> int:
        return _DEQUEUE_S

    def ask_to_stop(self) -> None:
        self._is_ending = True

    def heartbeat(self, timeout: int | None = None, pipeline: Any = None) -> None:
        """RQ calls this before each poll of the queue. Raises StopRequested after ask_to_stop."""
        if self._is_ending:
            raise StopRequested
        super().heartbeat(timeout, pipeline)

    def execute_job(self, job: Job, queue: Any) -> None:
        """Waits for a free thread and performs the job there."""
        self._places.take()
        try:
            execution = self.prepare_execution(job)
            self._pool.submit(self._perform, job, queue, execution)
        except BaseException:
            self._places.give_back()
            raise

    def perform_job(self, job: Job, queue: Any, execution: Any) -> bool:
        """As in RQ, but calls `deliver` instead of a function that the job names."""
        assert isinstance(job, SignedJob)
        try:
            taken = job.taken(self._attempts.key)
        except ForgedJob as exc:
            log.warning("refused an RQ job that batchway did not create: %s", exc)
        else:
            job.run = lambda: self._deliver(taken)
        return bool(super().perform_job(job, queue, execution))

    def _perform(self, job: Job, queue: Any, execution: Any) -> None:
        try:
            self.perform_job(job, queue, execution)
        except NoPermissionError as exc:
            log.error("%s", denied(self.connection, "a command of RQ's worker", exc))
        except Exception as exc:  # from RQ's bookkeeping, if Redis is unreachable
            log.warning("RQ could not record an attempt (%s)", type(exc).__name__)
        finally:
            self._places.give_back()


class RqRunner:
    """Keeps an RQ worker and its threads running until `stop`."""

    def __init__(
        self,
        attempts: AttemptQueue,
        client: redis.Redis,
        deliver: Callable[[Taken], None],
        tell: Callable[[int], None],
        *,
        max_concurrent: int,
    ) -> None:
        self._attempts = attempts
        self._client = client
        self._deliver = deliver
        self._pool = ThreadPoolExecutor(max_concurrent, thread_name_prefix="attempt")
        self._places = Places(max_concurrent, tell)
        self._stop = threading.Event()
        self._worker: ThreadedWorker | None = None
        self._thread = threading.Thread(target=self._work, name="rq", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Takes no more jobs; returns when the running jobs have ended."""
        self._stop.set()
        if self._worker is not None:
            self._worker.ask_to_stop()
        self._thread.join()
        self._pool.shutdown(wait=True)

    def _work(self) -> None:
        while not self._stop.is_set():
            try:
                self._worker = ThreadedWorker(
                    self._attempts, self._client, self._deliver, self._pool, self._places
                )
                if not self._stop.is_set():  # `stop` has seen this worker, or sees it from now on
                    self._worker.work(logging_level=None)
            except NoPermissionError as exc:
                log.error("%s", denied(self._client, "a command of RQ's worker", exc))
            except Exception as exc:
                log.warning("RQ's worker ended (%s)", type(exc).__name__)
            self._stop.wait(_PAUSE_S)
