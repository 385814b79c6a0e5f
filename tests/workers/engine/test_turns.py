"""Calls of tenants in turn."""

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

from workers.engine.grammar import TenantTurns

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
    turns = TenantTurns(executor)
    for name in ("a1", "a2", "a3", "b1", "c1", "b2"):
        turns.submit(name[0], lambda name=name: order.append(name))  # type: ignore[misc]

    executor.run()

    assert order == ["a1", "b1", "c1", "a2", "b2", "a3"]


def test_a_cancelled_call_never_begins_and_costs_no_turn() -> None:
    """Of the last tenant nothing is left."""
    executor, order = OnDemand(), list[str]()
    turns = TenantTurns(executor)
    for name in ("a1", "a2", "b1", "b2", "c1"):
        future = turns.submit(name[0], lambda name=name: order.append(name))  # type: ignore[misc]
        if name in ("a1", "c1"):
            assert future.cancel()

    executor.run()

    assert order == ["a2", "b1", "b2"]
