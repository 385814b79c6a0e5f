"""What callbacks use of RQ beyond its documentation (RQ 3.0).

- `JobWithoutCode`: a record in Redis names functions that RQ would import and call, addresses that
  it would send to, and other jobs. RQ has no option that leaves them out.
- `WorkerInThread`: RQ's workers install signal handlers, which only a main thread may do, and
  listen for commands in Redis. RQ has no option against either.

tests/callbacks/test_rq_compat.py fails where RQ does not call or set these names any more.
"""

from collections.abc import Callable
from typing import Any

from rq.job import Job
from rq.timeouts import BaseDeathPenalty
from rq.worker import BaseWorker, WorkerStatus

FAILURE_TTL_S = 60


class JobWithoutCode(Job):
    """An RQ job as it is read back: everything but its arguments is dropped.

    `hands` is what it does; whoever has checked its arguments sets that.
    """

    hands: Callable[[], None] | None = None

    def restore(self, raw_data: Any) -> Any:
        super().restore(raw_data)
        self._success_callback_name = None
        self._failure_callback_name = None
        self._stopped_callback_name = None
        self.webhooks = []  # of RQ's own, which go wherever the record says
        self._dependency_ids = []
        self.retries_left = self.repeats_left = None
        self.group_id = self.rate_limit_key = None
        self.result_ttl, self.failure_ttl = 0, FAILURE_TTL_S
        self.meta = {}

    def _execute(self) -> None:
        if self.hands is not None:
            self.hands()


class _NoPenalty(BaseDeathPenalty):
    """RQ would interrupt a thread with a signal; an attempt has a time limit of its own."""

    def setup_death_penalty(self) -> None: ...

    def cancel_death_penalty(self) -> None: ...


class WorkerInThread(BaseWorker):
    """An RQ worker that leaves the process alone: no signals, no commands, no log of its own."""

    death_penalty_class = _NoPenalty

    def bootstrap(self, *_: Any) -> None:
        """Without RQ's log handlers, which tell of every step."""
        self.register_birth()  # type: ignore[no-untyped-call]
        self.set_state(WorkerStatus.STARTED)

    def check_for_suspension(self, burst: bool) -> None:
        """`rq suspend` is a command, too."""

    def subscribe(self) -> None:
        """Commands would let whoever writes to Redis end this process."""

    def procline(self, message: str) -> None:
        """Would set the title of the process."""

    def _install_signal_handlers(self) -> None:
        """Signals are the process's."""
