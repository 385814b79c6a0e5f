"""The results of an overload, compared with the guarantees: faults, and missed goals."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.http.errors import STATUS_BY_CODE
from infra.tables import percentile
from tests.campaigns.load import Ask, Attempt
from tests.overload.arrivals import FLOOD, MAX_JOB_TOKENS

TTFT_TARGET_S = 1.0  # of the interactive lane
BATCH_SHARE = 0.1  # of all tokens, guaranteed
# The status of each reason to reject load, by docs/api.md.
REASONS: Mapping[str, int] = {
    "lane_full": 429,
    "tenant_quota": 429,
    "deadline_infeasible": 429,
    "no_workers": 503,
    "broker_unavailable": 503,
    "draining": 503,
}
assert all(REASONS.get(code, status) == status for code, status in STATUS_BY_CODE.items())

GOODPUT_GOAL = 0.95
LIGHT_TTFT_GOAL = 2.0
ADMISSION_GOAL_S = 0.05  # p99, unloaded
RETURN_GOAL = 0.9
_BYTES_PER_JOB = 8192  # of a stored job with its log
_BYTES_BEYOND = 8 * 2**20  # two gateways with up to 128 connections each, and the library


@dataclass(slots=True)
class Phase:
    """Begin and end in Unix seconds."""

    name: str
    begin_s: float
    end_s: float = 0.0

    def has(self, at_s: float) -> bool:
        return self.begin_s <= at_s < self.end_s

    def goodput(self, ended: "Sequence[Ended]") -> float:
        """Output tokens per second, of jobs that succeeded."""
        done = [one for one in ended if one.is_good and self.has(one.finished_s)]
        return sum(one.num_output for one in done) / (self.end_s - self.begin_s)


@dataclass(frozen=True, slots=True)
class Ended:
    """An accepted job as stored in Redis; times by its clock."""

    ask: Ask
    is_good: bool
    status: str
    created_s: float
    first_token_s: float
    finished_s: float
    num_prompt: int
    num_output: int

    def num_tokens_in(self, phase: Phase) -> int:
        """Tokens computed in a phase: the prompt's with the first token, the others evenly
        distributed from there to the end."""
        num_gaps = max(1, self.num_output - 1)
        gap_s = (self.finished_s - self.first_token_s) / num_gaps
        times_s = [self.first_token_s + gap_s * number for number in range(self.num_output)]
        num_output = sum(phase.has(at_s) for at_s in times_s)
        return num_output + self.num_prompt * phase.has(self.first_token_s)


@dataclass
class OverloadReport:
    """`memory_bytes` is what Redis used at the start, and its maximum."""

    factor: float
    seconds: float
    seed: int
    peak_tokens_per_s: float
    phases: Mapping[str, Phase]
    calls: Sequence[Attempt]
    num_told_later: int
    ended: Sequence[Ended]
    memory_bytes: tuple[int, int]
    audit: Sequence[str] = field(default_factory=list)

    @property
    def violations(self) -> list[str]:
        return [*self.faults(), *self.misses()]

    # --- measures -----------------------------------------------------------------------------

    def of(self, phase: str, choose: Callable[[Attempt], bool] = lambda _: True) -> list[Attempt]:
        """The calls sent in a phase."""
        return [c for c in self.calls if self.phases[phase].has(c.sent_s) and choose(c)]

    @property
    def goodput_ratio(self) -> float:
        return self.phases["overload"].goodput(self.ended) / self.peak_tokens_per_s

    def light_ttfts(self, phase: str, lane: str = "") -> list[float]:
        calls = self.of(phase, lambda c: c.ask.tenant != FLOOD and c.ask.lane.startswith(lane))
        return _known(call.ttft_from_sending_s for call in calls)

    def light_waits(self, phase: str) -> list[float]:
        """Times from submission to first token, of light tenants' calls. Gateways and callers
        are left out, so a busy machine has less effect."""
        return [
            one.first_token_s - one.created_s
            for one in self.ended
            if one.ask.tenant != FLOOD
            and one.ask.lane != "batch"
            and self.phases[phase].has(one.created_s)
        ]

    @property
    def light_ttft_ratios(self) -> dict[str, float]:
        """By lane; '' means all lanes with waiting callers together."""
        return {lane: self._light_ttft_ratio(lane) for lane in ("", "interactive", "standard")}

    def _light_ttft_ratio(self, lane: str) -> float:
        """p99 under overload divided by p99 alone; 0 if nothing was measured."""
        alone = percentile(self.light_ttfts("light tenants alone", lane), 0.99)
        loaded = percentile(self.light_ttfts("overload", lane), 0.99)
        return loaded / alone if alone and loaded else 0.0

    @property
    def interactive_ttfts(self) -> list[float]:
        calls = self.of("overload", lambda c: c.ask.lane == "interactive")
        return _known(call.ttft_from_sending_s for call in calls)

    @property
    def tokens(self) -> Counter[str]:
        """Tokens computed under overload, by lane. Jobs that began before or ended later count
        in part."""
        by_lane: Counter[str] = Counter()
        for one in self.ended:
            by_lane[one.ask.lane] += one.num_tokens_in(self.phases["overload"])
        return by_lane

    @property
    def shares(self) -> dict[str, float]:
        """Shares of these tokens, by lane."""
        total = self.tokens.total()
        return {lane: num / total for lane, num in sorted(self.tokens.items())}

    @property
    def is_share_kept(self) -> bool:
        """Whether batch had its guaranteed share, except for one job."""
        tokens = self.tokens
        return tokens["batch"] + MAX_JOB_TOKENS >= BATCH_SHARE * tokens.total()

    def second_tries(self, phase: str) -> list[Attempt]:
        return self.of(phase, lambda c: c.is_second)

    @property
    def return_share(self) -> float:
        """The share of admitted calls among those that came back when told, after the overload."""
        tries = self.second_tries("afterwards")
        return sum(call.is_admitted for call in tries) / max(1, len(tries))

    @property
    def admitted_share_of_lights(self) -> float:
        calls = self._lights()
        return sum(call.is_admitted for call in calls) / max(1, len(calls))

    @property
    def memory_bound_bytes(self) -> int:
        """The limit of memory with all these jobs stored. Rejected jobs use none."""
        return self.memory_bytes[0] + _BYTES_BEYOND + _BYTES_PER_JOB * len(self.ended)

    # --- judgement ----------------------------------------------------------------------------

    def faults(self) -> list[str]:
        """Violations on any machine."""
        found = list(self.audit)
        found += undocumented("calls", self.calls)
        for call in self.calls:
            if call.is_admitted and not call.is_whole:
                found.append(f"{call.job_id}: its stream broke off ({call.reason or 'no end'})")
            elif call.status == 200 and call.num_output_tokens != call.ask.num_output:
                found.append(
                    f"{call.job_id}: {call.num_output_tokens} of {call.ask.num_output} tokens"
                )
        failed = Counter(one.status for one in self.ended if not one.is_good)
        found += [f"{num} accepted jobs are {name}" for name, num in failed.items()]
        if self.memory_bytes[1] > self.memory_bound_bytes:
            found.append(f"Redis used {self.memory_bytes[1]} bytes")
        return found

    def misses(self) -> list[str]:
        """Goals that this run missed."""
        admission = percentile(self._admissions("unloaded"), 0.99)
        interactive = percentile(self.interactive_ttfts, 0.99)
        goals = (
            ("goodput", self.goodput_ratio >= GOODPUT_GOAL),
            *(
                (f"p99 of light tenants' TTFT, {lane or 'all'}", 0 < ratio <= LIGHT_TTFT_GOAL)
                for lane, ratio in self.light_ttft_ratios.items()
            ),
            ("p99 of interactive TTFT", interactive is not None and interactive <= TTFT_TARGET_S),
            ("p99 of admission, unloaded", admission is not None and admission <= ADMISSION_GOAL_S),
            ("share of the batch lane", self.is_share_kept),
            ("admitted when told", self.return_share >= RETURN_GOAL),
        )
        return [f"missed: {name}" for name, is_met in goals if not is_met]

    def figures(self) -> dict[str, Any]:
        overload, after = self.phases["overload"], self.of("afterwards")
        sent = self.of("overload")
        return {
            "factor": self.factor,
            "seconds": self.seconds,
            "seed": self.seed,
            "goodput (output tokens/s)": {
                "calibrated peak": round(self.peak_tokens_per_s, 1),
                "under overload": round(overload.goodput(self.ended), 1),
                "ratio": round(self.goodput_ratio, 3),
            },
            "calls under overload": {
                "a second": round(len(sent) / (overload.end_s - overload.begin_s), 1),
                "lag of the callers (ms)": _ms([call.sent_s - call.arrival_s for call in sent]),
                **answers(sent),
            },
            "calls afterwards": answers(after),
            "admission (ms)": {
                "at the gateway, unloaded": _ms(self._admissions("unloaded")),
                "whole call, unloaded": _ms([c.head_s for c in self.of("unloaded")]),
                "at the gateway, overload": _ms(self._admissions("overload")),
                "whole refusal, overload": _ms([c.head_s for c in sent if not c.is_admitted]),
            },
            "TTFT of light tenants (ms)": {
                f"{lane or 'all'}, {name}": _ms(self.light_ttfts(phase, lane))
                for lane in ("", "interactive", "standard")
                for name, phase in (("alone", "light tenants alone"), ("overload", "overload"))
            }
            | {
                f"ratio of p99, {lane or 'all'}": round(ratio, 2)
                for lane, ratio in self.light_ttft_ratios.items()
            }
            | {
                f"from the queue on, {name}": _ms(self.light_waits(phase))
                for name, phase in (("alone", "light tenants alone"), ("overload", "overload"))
            },
            "TTFT of the interactive lane (ms)": {"overload": _ms(self.interactive_ttfts)},
            "shares of tokens": {lane: round(share, 3) for lane, share in self.shares.items()},
            "light tenants' calls admitted": _admitted(self._lights()),
            "Retry-After (s)": {"overload": seconds(_known(c.retry_after_s for c in sent))},
            "came when told": {
                "under overload": _admitted(self.second_tries("overload")),
                "afterwards": _admitted(self.second_tries("afterwards")),
                "were told to come later": self.num_told_later,
            },
            "Redis (MiB)": {
                "at the start": round(self.memory_bytes[0] / 2**20, 2),
                "at most": round(self.memory_bytes[1] / 2**20, 2),
                "bound": round(self.memory_bound_bytes / 2**20, 2),
                "jobs kept": len(self.ended),
            },
        }

    def _admissions(self, phase: str) -> list[float]:
        return _known(call.admission_s for call in self.of(phase))

    def _lights(self) -> list[Attempt]:
        return self.of("overload", lambda c: c.ask.tenant != FLOOD and not c.is_second)


def _known(values: Any) -> list[float]:
    return [value for value in values if value is not None]


def _admitted(calls: Sequence[Attempt]) -> str:
    return f"{sum(call.is_admitted for call in calls)} of {len(calls)}"


def answers(calls: Sequence[Attempt]) -> dict[str, int]:
    """How many calls were answered so: the status, and the reason of a refusal."""
    return Counter(f"{c.status} {'' if c.is_admitted else c.reason}".strip() for c in calls)


def undocumented(kind: str, calls: Sequence[Attempt]) -> list[str]:
    """A sentence for each answer that docs/api.md does not give to load."""
    refused = [c for c in calls if not c.is_admitted and REASONS.get(c.reason) != c.status]
    return [f"{num} {kind} were answered {said}" for said, num in sorted(answers(refused).items())]


def seconds(values: Sequence[float], scale: float = 1.0) -> str:
    """p50, p99, the largest and the number of values. `scale`: 1000 for milliseconds."""
    p50, p99 = (percentile(values, share) for share in (0.5, 0.99))
    if p50 is None or p99 is None:
        return "-"
    p50, p99, longest = (scale * value for value in (p50, p99, max(values)))
    return f"{p50:.2f}, p99 {p99:.2f}, longest {longest:.2f} of {len(values)}"


def _ms(values: Sequence[float]) -> str:
    return seconds(values, 1000.0)
