"""Calls of tenants in turn."""

from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from threading import Event
from typing import Any

import pytest

from workers.engine.grammar import Turns

WAIT_S = 20.0


class OnDemand(Executor):
    """Runs what it was given when the test says so."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], Any]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.calls.append(lambda: fn(*args, **kwargs))
        return Future()

    def run(self) -> None:
        while self.calls:
            self.calls.pop(0)()


def test_tenants_take_turns() -> None:
    """The third call of one comes after the first calls of the others."""
    executor, order = OnDemand(), list[str]()
    turns = Turns(executor)
    for name in ("a1", "a2", "a3", "b1", "c1", "b2"):
        turns.submit(name[0], lambda name=name: order.append(name))  # type: ignore[misc]

    executor.run()

    assert order == ["a1", "b1", "c1", "a2", "b2", "a3"]


def test_a_cancelled_call_never_begins_and_costs_no_turn() -> None:
    """Of the last tenant nothing is left."""
    executor, order = OnDemand(), list[str]()
    turns = Turns(executor)
    for name in ("a1", "a2", "b1", "b2", "c1"):
        future = turns.submit(name[0], lambda name=name: order.append(name))  # type: ignore[misc]
        if name in ("a1", "c1"):
            assert future.cancel()

    executor.run()

    assert order == ["a2", "b1", "b2"]


def test_a_tenant_occupies_one_thread() -> None:
    """Its second call waits for its first, while another tenant's goes on."""
    turns, blocked, second = Turns(ThreadPoolExecutor(2)), Event(), Event()
    first = turns.submit("a", lambda: blocked.wait(WAIT_S))
    after = turns.submit("a", second.set)

    assert turns.submit("b", lambda: "done").result(WAIT_S) == "done"
    assert turns.submit("b", lambda: "again").result(WAIT_S) == "again"
    assert not second.is_set()
    blocked.set()

    assert first.result(WAIT_S)
    after.result(WAIT_S)
    assert second.is_set()


def test_an_error_is_its_callers() -> None:
    """The next call runs."""
    turns = Turns(ThreadPoolExecutor(1))

    failed = turns.submit("a", lambda: 1 // 0)
    other = turns.submit("a", lambda: 1)

    with pytest.raises(ZeroDivisionError):
        failed.result(WAIT_S)
    assert other.result(WAIT_S) == 1
