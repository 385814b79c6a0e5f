"""Tables of decisions: scripts of calls, each with the reply that it must get.

A script is a line with its title, then calls, in that line or indented below it:
`call; call -> reply`, with the reply to the last call. A call is a method of `Calls` or of World,
with words as a shell has them, and `name=value` for options. At last the records are audited.
"""

import shlex
from collections.abc import Callable
from typing import Any

import pytest

from contract.events import End
from contract.function_types import FairRoom, LaneRoom, TenantLimits
from tests.oracle.world import NOW_MS, World, contents, job_id


def scripts(text: str) -> pytest.MarkDecorator:
    """Runs a test for each script of the text, as its argument `script`."""
    found: dict[str, list[str]] = {}
    title = ""
    for line in text.strip().splitlines():
        if line.startswith(" "):
            found[title].append(line.strip())
        elif line and not line.startswith("#"):
            title, _, rest = line.partition(": ")
            assert title not in found, title
            found[title] = [rest] if rest else []
    return pytest.mark.parametrize("script", found.values(), ids=found.keys())


class Calls:
    """The calls of scripts on a world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._is_sound = True

    def run(self, script: list[str]) -> None:
        for line in script:
            calls, arrow, expected = line.partition(" -> ")
            for call in calls.split("; "):
                said = self.do(call)
            assert not arrow or said == expected, f"{line}\n  {said}"
        if self._is_sound:
            self._world.audit.check()

    def do(self, call: str) -> str:
        """The reply to one call, as text."""
        verb, *words = shlex.split(call)
        options = dict(word.split("=", 1) for word in words if "=" in word)
        values = [_value(word) for word in words if "=" not in word]
        method: Callable[..., Any] = getattr(self, verb, None) or getattr(self._world, verb)
        terms = {_NAMES.get(name, name): _option(name, each) for name, each in options.items()}
        return _told(method(*values, **terms))

    # --- what World has not, or says at more length

    def unsound(self) -> None:
        """What follows leaves the records unsound."""
        self._is_sound = False

    def ask(self, name: str, **terms: Any) -> str:
        """A quote and a submission: they say the same, and a refusal writes nothing."""
        before = contents(self._world)
        quoted = self._world.quote(name, **terms)
        assert contents(self._world) == before
        said = self._world.submit(name, **terms)
        if said == "new":
            return quoted
        assert contents(self._world) == before
        assert said == quoted
        return said

    def run_job(self, name: str, num: int = 1, fin: str = "succeeded", **terms: Any) -> str:
        """Submits, claims and ends a job that nothing precedes."""
        lane = terms.get("lane", "interactive")
        assert self._world.submit(name, **terms) == "new"
        assert name in self._world.claim(lanes=[lane], jobs=1)
        return self._world.append(name, num, fin)

    def start(self, *names: str, events: int = 0, **terms: Any) -> None:
        """Jobs at the worker `w`, with so many events of a token."""
        for name in names:
            assert self._world.submit(name, **terms) == "new"
            assert name in self._world.claim(jobs=1)
            for _ in range(events):
                self._world.append(name)

    def turns(self, num: int, **terms: Any) -> list[str]:
        """What a worker gets that has a place for one job at a time."""
        return [" ".join(self._world.claim(jobs=1, **terms)) or "-" for _ in range(num)]

    def outputs(self, *nums: int, **terms: Any) -> None:
        """Jobs of `t` that ended with so many tokens; of a negative number, that failed."""
        for i, num in enumerate(nums):
            self.run_job(f"t{i}", abs(num), "succeeded" if num > 0 else "failed", cost=13, **terms)

    def costs(self, name: str, **terms: Any) -> int:
        """What a quote says of a job with a cap of 10 tokens."""
        assert self._world.quote(name, **{"cap": 10, **terms}) == "OK"
        return int(self._world.reply.cost_tokens)

    def place(self, name: str, **terms: Any) -> tuple[int, int, float | None]:
        """Where a new job is, as it is told then and while it waits."""
        assert self._world.submit(name, **terms) == "new"
        found = self._world.ahead()
        assert self._world.waits(name) == found
        return found

    def enter(self, tenant: str, requests_per_min: int) -> Any:
        limits = TenantLimits(requests_per_min=requests_per_min)
        return self._world.told(self._world.functions.enter(tenant, limits))

    def two(self, *names: str, **terms: Any) -> list[str]:
        """One append of a token each to several jobs of `w`; `+` behind a name leaves a gap, `.`
        ends the job."""
        ends: dict[str, Any] = {"fin": "succeeded"}
        said = [
            self._world.says(
                name[:2], shift=name.endswith("+"), **(ends if name[2:] == "." else {})
            )
            for name in names
        ]
        return self._world.append_all(said, **terms)

    def log(self, name: str) -> list[str]:
        """The numbers of a job's events, and the status that ends it."""
        found = self._world.run(self._world.functions.read(job_id(name), name[0], max_events=99))
        events = [] if found is None else found[1]
        return [str(e.event.status if isinstance(e.event, End) else e.number) for e in events]

    def since(self, name: str, field: str) -> float:
        """s from a job's time to now; of a deadline negative."""
        return (self._world.now_ms - int(self._world.field(name, field)[0])) / 1000

    def number(self, *command: str) -> float:
        return float(self._world.redis(*command) or 0)


_NAMES = {"shares": "min_shares", "fair": "rooms"}


def _value(word: str) -> Any:
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            pass
    return {"True": True, "False": False, "None": None, "NOW": NOW_MS}.get(word, word)


def _option(name: str, text: str) -> Any:
    """Lanes `a,b`; shares `lane:share,…`; rooms `lane:slots:tokens[:slots for a deficit],…`."""
    parts = [part.split(":") for part in text.split(",")]
    if name == "lanes":
        return tuple(text.split(","))
    if name in ("shares", "metadata"):
        return {key: _value(value) for key, value in (part for part in parts if part != [""])}
    if name == "rooms":
        return {lane: LaneRoom(*(int(n) for n in room)) for lane, *room in parts}  # type: ignore[arg-type]
    if name == "fair":  # lane:slots:tokens,tenant:slots:tokens,…
        (lane, slots, tokens), *held = parts
        of_tenants = {tenant: (int(a), int(b)) for tenant, a, b in held}
        return {lane: LaneRoom(0, 0, fair=FairRoom(int(slots), int(tokens), of_tenants))}
    return _value(text)


def _told(reply: Any) -> str:
    if isinstance(reply, list | tuple):
        return " ".join(map(_told, reply)) or "-"
    return str(round(reply, 3)) if isinstance(reply, float) else str(reply)
