"""Runs the calls of tenants in turn. Knows nothing about the calls."""

from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from threading import Lock
from typing import Any, TypeVar

T = TypeVar("T")


class Turns:
    """At most one call of a tenant runs at a time, so that a tenant with many waits for itself.

    A call that was cancelled before it began is dropped, and costs its tenant no turn.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._lock = Lock()
        # The tenant that has waited longest for its turn is first.
        self._waiting: OrderedDict[str, deque[tuple[Future[Any], Callable[[], Any]]]] = (
            OrderedDict()
        )
        self._served: set[str] = set()  # tenants whose calls run now

    def submit(self, tenant: str, call: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        with self._lock:
            self._waiting.setdefault(tenant, deque()).append((future, call))
        self._executor.submit(self._run)
        return future

    def _run(self) -> None:
        """Runs calls until none may begin."""
        while (begun := self._begin()) is not None:
            tenant, future, call = begun
            try:
                result = call()
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(result)
            with self._lock:
                self._served.discard(tenant)

    def _begin(self) -> tuple[str, Future[Any], Callable[[], Any]] | None:
        with self._lock:
            for tenant in [tenant for tenant in self._waiting if tenant not in self._served]:
                calls = self._waiting[tenant]
                while calls:
                    future, call = calls.popleft()
                    if future.set_running_or_notify_cancel():
                        self._served.add(tenant)
                        self._waiting.move_to_end(tenant)
                        if not calls:
                            del self._waiting[tenant]
                        return tenant, future, call
                del self._waiting[tenant]
        return None
