"""What callers and the fleet saw of a simulation or of a recording, as figures."""

from array import array
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from infra.tables import percentile

_SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


@dataclass(slots=True)
class LaneCalls:
    """The answered calls of a lane and tenant, by AIPerf's definitions: seconds to the first
    token, mean seconds between the others (of answers with more than one), seconds to the last."""

    ttft_s: "array[float]" = field(default_factory=lambda: array("f"))
    itl_s: "array[float]" = field(default_factory=lambda: array("f"))
    e2e_s: "array[float]" = field(default_factory=lambda: array("f"))
    num_tokens: int = 0

    def note(self, arrival_s: float, first_s: float, ended_s: float, num_tokens: int) -> None:
        self.ttft_s.append(first_s - arrival_s)
        self.e2e_s.append(ended_s - arrival_s)
        if num_tokens > 1:
            self.itl_s.append((ended_s - first_s) / (num_tokens - 1))
        self.num_tokens += num_tokens

    def extend(self, other: "LaneCalls") -> None:
        self.ttft_s.extend(other.ttft_s)
        self.itl_s.extend(other.itl_s)
        self.e2e_s.extend(other.e2e_s)
        self.num_tokens += other.num_tokens

    def spread(self) -> dict[str, dict[str, float | None]]:
        """Percentiles in seconds, and their mean, by name of the time."""
        return {name: _spread(getattr(self, name)) for name in ("ttft_s", "itl_s", "e2e_s")}


def _spread(values: "array[float]") -> dict[str, float | None]:
    ordered = sorted(values)
    found = {name: percentile(ordered, share) for name, share in _SHARES.items()}
    return {"mean": sum(ordered) / len(ordered) if ordered else None, **found}


@dataclass(frozen=True, slots=True)
class Goal:
    """What callers need; None: not stated. Times in seconds."""

    ttft_s: float | None = None
    itl_s: float | None = None
    rate_per_s: float | None = None

    def missed(self, ttft_s: float, itl_s: float) -> str | None:
        """Which goal these times miss; None: none."""
        if self.ttft_s is not None and ttft_s > self.ttft_s:
            return "ttft"
        if self.itl_s is not None and itl_s > self.itl_s:
            return "itl"
        return None


class AnsweredCall(NamedTuple):
    """An answered call. Seconds from the first arrival."""

    arrival_s: float
    first_s: float
    ended_s: float
    num_tokens: int


@dataclass(slots=True)
class Second:
    """One second of the fleet: work of its steps, and what waits and runs at its end."""

    busy_s: float = 0.0  # of all workers
    sequence_s: float = 0.0  # of all sequences in steps
    num_tokens: int = 0
    num_waiting: int = 0
    num_workers: int = 0


@dataclass(slots=True)
class SimulationOutcome:
    """All that was seen. Keys of `calls` are lane and tenant."""

    goal: Goal = Goal()
    answers: "list[AnsweredCall] | None" = None  # each of them, if wanted
    calls: dict[tuple[str, str], LaneCalls] = field(default_factory=dict)
    num_good: Counter[tuple[str, str]] = field(default_factory=Counter)
    states: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)  # by reason
    retry_after_s: "array[float]" = field(default_factory=lambda: array("f"))
    seconds: defaultdict[int, Second] = field(default_factory=lambda: defaultdict(Second))
    num_arrivals: int = 0
    num_resumes: int = 0
    num_recomputed_tokens: int = 0  # of prompts and outputs, for jobs that had output before
    num_looked_up: int = 0  # tokens of prompts, and of what was computed again
    num_found: int = 0  # of these, in a prefix cache
    turns_ttft_s: dict[bool, "array[float]"] = field(  # of a session's first, and of later ones
        default_factory=lambda: {False: array("f"), True: array("f")}
    )
    gpu_s: float = 0.0
    ended_s: float = 0.0

    def answered(
        self,
        lane: str,
        tenant: str,
        arrival_s: float,
        first_s: float,
        ended_s: float,
        num: int,
        *,
        is_later: bool = False,
    ) -> None:
        key = lane, tenant
        if self.answers is not None:
            self.answers.append(AnsweredCall(arrival_s, first_s, ended_s, num))
        self.calls.setdefault(key, LaneCalls()).note(arrival_s, first_s, ended_s, num)
        itl_s = (ended_s - first_s) / max(1, num - 1)
        is_good = self.goal.missed(first_s - arrival_s, itl_s) is None
        self.num_good[key] += is_good
        self.turns_ttft_s[is_later].append(first_s - arrival_s)

    def ended(self, state: str) -> None:
        self.states[str(state)] += 1

    def refused(self, reason: str, retry_after_s: float | None) -> None:
        self.refusals[reason] += 1
        if retry_after_s is not None:
            self.retry_after_s.append(retry_after_s)

    def second(self, at_s: float) -> Second:
        return self.seconds[int(at_s)]

    def all_calls(self) -> LaneCalls:
        whole = LaneCalls()
        for calls in self.calls.values():
            whole.extend(calls)
        return whole

    def as_dict(self, price: float | None = None) -> dict[str, Any]:
        """The figures; times in seconds. `price`: of a GPU for an hour."""
        whole, wall_s = self.all_calls(), max(self.ended_s, 1e-9)
        num_refused = sum(self.refusals.values())
        parts = {
            f"{lane} {tenant}": self._part(lane, tenant) for lane, tenant in sorted(self.calls)
        }
        busy_s = sum(second.busy_s for second in self.seconds.values())
        sequence_s = sum(second.sequence_s for second in self.seconds.values())
        cost = None if price is None else price * self.gpu_s / 3600
        per_million = cost and 1e6 * cost / max(1, whole.num_tokens)
        return {
            "requests": self.num_arrivals,
            "states": dict(sorted(self.states.items())),
            "refusals": dict(sorted(self.refusals.items())),
            "refused_share": num_refused / max(1, self.num_arrivals),
            "retry_after_s": _spread(self.retry_after_s),
            "duration_s": self.ended_s,
            "requests_per_s": len(whole.e2e_s) / wall_s,
            "output_tokens_per_s": whole.num_tokens / wall_s,
            **whole.spread(),
            "first_turns_ttft_s": _spread(self.turns_ttft_s[False]),
            "later_turns_ttft_s": _spread(self.turns_ttft_s[True]),
            "prompt_tokens_found": self.num_found,
            "prompt_tokens_computed": self.num_looked_up - self.num_found,
            "found_share": self.num_found / max(1, self.num_looked_up),
            "lanes": parts,
            "resumes": self.num_resumes,
            "recomputed_tokens": self.num_recomputed_tokens,
            "gpu_hours": self.gpu_s / 3600,
            "gpu_used": busy_s / max(self.gpu_s, 1e-9),
            "batch_size": sequence_s / max(busy_s, 1e-9),
            "cost": cost,
            "cost_per_million_tokens": per_million,
        }

    def _part(self, lane: str, tenant: str) -> Mapping[str, Any]:
        calls = self.calls[lane, tenant]
        num, wall_s = len(calls.e2e_s), max(self.ended_s, 1e-9)
        return {
            "requests": num,
            "output_tokens_per_s": calls.num_tokens / wall_s,
            "goodput_per_s": self.num_good[lane, tenant] / wall_s,
            "good_share": self.num_good[lane, tenant] / max(1, num),
            **calls.spread(),
        }
