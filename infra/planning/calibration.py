"""Compares a simulation with a recording, and says where it is wrong.

Step times are fitted to the first half of the recording; the second half is simulated, by the same
arrivals, and compared with what was recorded. Then step times are fitted to all of it.
"""

import statistics
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import msgspec

from infra.embedded_redis import EmbeddedRedis
from infra.measure.workloads import BadWorkload
from infra.planning.costs import Fitted, fit_costs
from infra.planning.outcome import AnsweredCall, SimulationOutcome
from infra.planning.simulation import Fault, Simulation
from infra.planning.traces import Arrival, Recorded, RecordedFleet
from infra.planning.worker import Fleet
from workers.ipc.messages import EngineOptions

_WEAK = 0.15  # a group with a larger error is named
_FEW = 16  # a smaller group tells nothing

# The figures that are compared, and the tail that their errors are stated for.
FIGURES = ("output_tokens_per_s", "ttft_s p50", "ttft_s p99", "itl_s p50", "e2e_s p50", "e2e_s p99")


@dataclass(frozen=True, slots=True)
class Group:
    """Some of the requests: the medians of their times, recorded and simulated, in seconds."""

    name: str
    num: int
    ttft_s: tuple[float, float]
    e2e_s: tuple[float, float]

    @property
    def worst_error(self) -> float:
        return max(abs(simulated / real - 1) for real, simulated in (self.ttft_s, self.e2e_s))


@dataclass(frozen=True, slots=True)
class Calibration:
    """Figures of the second half, recorded and simulated, and step times with their errors."""

    costs: Fitted
    figures: dict[str, tuple[float, float]]
    groups: tuple[Group, ...]

    @property
    def weak(self) -> list[Group]:
        """Where the simulation is off the most."""
        found = [group for group in self.groups if group.worst_error > _WEAK]
        return sorted(found, key=lambda group: -group.worst_error)


def fleet_with(costs: Fitted, options: EngineOptions, num_workers: int) -> Fleet:
    """Workers with these step times."""
    return Fleet(
        costs=costs,
        num_blocks=costs.num_blocks,
        block_size=costs.block_size,
        step_tokens=costs.step_tokens,
        max_model_len=costs.max_model_len,
        overheads_s=costs.overheads_s,
        wakes_s=costs.wakes_s,
        options=options,
        num_workers=num_workers,
    )


def calibrate(
    recorded: RecordedFleet,
    jobs: Seq[Recorded],
    options: EngineOptions,
    say: Callable[[str], None] = lambda text: None,
) -> Calibration:
    """Raises BadWorkload if the recording is too short."""
    if len(recorded.models) > 1:
        raise BadWorkload(
            f"the recording has jobs of several models, {', '.join(recorded.models)}: record one, "
            "with `batchway record --model-name`"
        )
    half = len(jobs) // 2
    say(f"fitting step times to {half} jobs")
    costs = fit_costs(recorded, jobs[:half])
    rest = [job for job in jobs[half:] if job.state == "succeeded"]
    if not rest:
        raise BadWorkload("no job of the recording's second half has ended")
    say(f"simulating {len(rest)} jobs")
    options = msgspec.structs.replace(options, max_num_seqs=costs.max_num_seqs)
    fleet = fleet_with(costs, options, max(1, recorded.workers))
    simulated = simulate(fleet, as_arrivals(rest))
    real = outcome_of(rest)
    figures = compared(real, simulated)
    errors = {name: found / seen - 1 for name, (seen, found) in figures.items() if seen}
    assert real.answers is not None
    assert simulated.answers is not None
    groups = groups_of(rest, real.answers, simulated.answers)
    fitted = fit_costs(recorded, jobs)
    return Calibration(msgspec.structs.replace(fitted, errors=errors), figures, groups)


def simulate(
    fleet: Fleet, arrivals: Iterable[Arrival], faults: Iterable[Fault] = ()
) -> SimulationOutcome:
    with EmbeddedRedis() as server:
        return Simulation(fleet, server.url, SimulationOutcome(answers=[])).run(arrivals, faults)


def as_arrivals(jobs: Seq[Recorded]) -> list[Arrival]:
    """The same requests, from the first on."""
    first_s = jobs[0].arrival_s
    return [
        Arrival(
            job.arrival_s - first_s, job.prompt_tokens, max(1, job.output_tokens), job.max_tokens,
            job.lane, job.tenant,
        )
        for job in jobs
    ]  # fmt: skip


def outcome_of(jobs: Seq[Recorded]) -> SimulationOutcome:
    found, from_s = SimulationOutcome(answers=[], num_arrivals=len(jobs)), jobs[0].arrival_s
    for job in jobs:
        if job.state == "succeeded" and job.finished_s is not None:
            first_s = job.finished_s if job.first_token_s is None else job.first_token_s
            arrival_s, first_s, ended_s = (
                at_s - from_s for at_s in (job.arrival_s, first_s, job.finished_s)
            )
            found.answered(job.lane, job.tenant, arrival_s, first_s, ended_s, job.output_tokens)
            found.ended_s = max(found.ended_s, ended_s)
    return found


def compared(
    real: SimulationOutcome, simulated: SimulationOutcome
) -> dict[str, tuple[float, float]]:
    """Pairs of figures by name: recorded, simulated. Times in seconds."""
    pair, found = (real.as_dict(), simulated.as_dict()), {}
    for name in FIGURES:
        kind, _, share = name.partition(" ")
        values = [each[kind][share] if share else each[kind] for each in pair]
        if None not in values:
            found[name] = values[0], values[1]
    return found


def groups_of(
    jobs: Seq[Recorded], real: Seq[AnsweredCall], simulated: Seq[AnsweredCall]
) -> tuple[Group, ...]:
    """Compares the jobs that were answered in the simulation too."""
    answers: dict[tuple[float, int], list[AnsweredCall]] = {}
    for answer in simulated:
        answers.setdefault((answer.arrival_s, answer.num_tokens), []).append(answer)
    rows = [
        (job, seen, found.pop())
        for job, seen in zip(jobs, real, strict=True)
        if (found := answers.get((seen.arrival_s, seen.num_tokens)))
    ]
    prompts = statistics.median(job.prompt_tokens for job in jobs)
    outputs = statistics.median(job.output_tokens for job in jobs)
    beside = [sum(o.arrival_s < r.ended_s and o.ended_s > r.arrival_s for o in real) for r in real]
    busy = statistics.median(beside)
    crowd = dict(zip(real, beside, strict=True))
    tests: dict[str, Callable[[Recorded, AnsweredCall], bool]] = {
        f"prompts up to {prompts:.0f} tokens": lambda job, _: job.prompt_tokens <= prompts,
        f"prompts over {prompts:.0f} tokens": lambda job, _: job.prompt_tokens > prompts,
        f"outputs up to {outputs:.0f} tokens": lambda job, _: job.output_tokens <= outputs,
        f"outputs over {outputs:.0f} tokens": lambda job, _: job.output_tokens > outputs,
        f"up to {busy:.0f} jobs beside it": lambda _, seen: crowd[seen] <= busy,
        f"over {busy:.0f} jobs beside it": lambda _, seen: crowd[seen] > busy,
    }
    for lane in sorted({job.lane for job in jobs}):
        tests[f"lane {lane}"] = lambda job, _, lane=lane: job.lane == lane  # type: ignore[misc]
    groups = []
    for name, test in tests.items():
        part = [(seen, other) for job, seen, other in rows if test(job, seen)]
        if len(part) >= _FEW:
            ttft_s = _pair(part, lambda answer: answer.first_s - answer.arrival_s)
            e2e_s = _pair(part, lambda answer: answer.ended_s - answer.arrival_s)
            groups.append(Group(name, len(part), ttft_s, e2e_s))
    return tuple(groups)


def _pair(
    part: Seq[tuple[AnsweredCall, AnsweredCall]], time: Callable[[AnsweredCall], float]
) -> tuple[float, float]:
    seen, simulated = (statistics.median(map(time, column)) for column in zip(*part, strict=True))
    return max(seen, 1e-6), simulated
