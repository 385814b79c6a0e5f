"""RQ still calls and sets what workers/callbacks/rq_compat.py overrides."""

import inspect

from rq.job import Job
from rq.worker import BaseWorker

from workers.callbacks.rq_compat import JobWithoutCode, WorkerInThread


def test_rq_restores_these_attributes_from_a_record() -> None:
    """Otherwise a record in Redis could name a function, an address or a job."""
    read = inspect.getsource(Job.restore)
    for name in (
        "_success_callback_name", "_failure_callback_name", "_stopped_callback_name", "webhooks",
        "_dependency_ids", "retries_left", "repeats_left", "group_id", "rate_limit_key", "meta",
    ):  # fmt: skip
        assert f"self.{name} =" in read, name
    assert "self._execute()" in inspect.getsource(Job.perform)
    assert "self.func" in inspect.getsource(Job._execute)
    assert JobWithoutCode._execute is not Job._execute


def test_rq_calls_the_methods_that_a_thread_overrides() -> None:
    """Otherwise RQ installs signal handlers, which fails in a thread, or obeys commands in
    Redis."""
    source = inspect.getsource(BaseWorker)
    for name in (
        "_install_signal_handlers", "subscribe", "check_for_suspension", "procline", "bootstrap",
        "_set_ip_address",
    ):  # fmt: skip
        assert name in vars(WorkerInThread)
        assert f"self.{name}(" in source, name
