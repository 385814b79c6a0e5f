"""The names of RQ 3.0 that callbacks use although its documentation does not describe them.

- `JobWithoutCode`: RQ would call functions that a record in Redis names, send requests to its URLs
  and run jobs that depend on it. RQ has no option to disable this.
- `WorkerInThread`: RQ's workers install signal handlers, which only a main thread may do, and
  listen for commands in Redis. RQ has no option against either.

tests/callbacks/test_rq_compat.py fails if RQ no longer calls or sets these names.
"""

from collections.abc import Callable
from typing import Any

from rq.job import Job
from rq.timeouts import BaseDeathPenalty
from rq.worker import BaseWorker, WorkerStatus

FAILURE_TTL_S = 60


class JobWithoutCode(Job):
    """An RQ job that keeps only its arguments when it is read from Redis.

    `run` is called when the job is performed. The worker sets it after checking the arguments.
    """

    run: Callable[[], None] | None = None

    def restore(self, raw_data: Any) -> Any:
        super().restore(raw_data)
        self._success_callback_name = None
        self._failure_callback_name = None
        self._stopped_callback_name = None
        self.webhooks = []  # RQ would post to them
        self._dependency_ids = []
        self.retries_left = self.repeats_left = None
        self.group_id = self.rate_limit_key = None
        self.result_ttl, self.failure_ttl = 0, FAILURE_TTL_S
        self.meta = {}

    def _execute(self) -> None:
        if self.run is not None:
            self.run()


class _NoPenalty(BaseDeathPenalty):
    """Replaces RQ's time limit, which uses signals; an attempt has its own time limit."""

    def setup_death_penalty(self) -> None: ...

    def cancel_death_penalty(self) -> None: ...


class WorkerInThread(BaseWorker):
    """An RQ worker that installs no signal handlers, takes no commands and adds no log handlers."""

    death_penalty_class = _NoPenalty

    def bootstrap(self, *_: Any) -> None:
        """Registers the worker without RQ's log handlers."""
        self.register_birth()  # type: ignore[no-untyped-call]
        self.set_state(WorkerStatus.STARTED)

    def check_for_suspension(self, burst: bool) -> None:
        """Ignores `rq suspend`, which is a command."""

    def subscribe(self) -> None:
        """Takes no commands: anyone who can write to Redis could end this process."""

    def _set_ip_address(self, connection: Any) -> None:
        """Does not ask Redis: redis-py cannot read the answer where a socket's path has a space."""
        self.ip_address = "unknown"

    def procline(self, message: str) -> None:
        """Does nothing: RQ would set the title of the process."""

    def _install_signal_handlers(self) -> None:
        """Does nothing: the process has its own signal handlers."""
