"""Compares two batching configurations by their jobs: estimates, bootstrap intervals, a verdict.

Jobs that run at the same time share a machine's good and bad moments, so they are not independent
samples. The bootstrap therefore draws stretches of time, with the jobs of both arms that ended in
them (a block bootstrap: Künsch, "The jackknife and the bootstrap for general stationary
observations", 1989). Intervals are of the percentiles 2.5 and 97.5.
"""

import random
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

from contract.ab import ARMS, CANDIDATE, CONTROL, AbJob, AbRecord
from contract.jobs import JobStatus
from infra.tables import percentile, table

WORSE, NOT_WORSE, UNCLEAR, TOO_FEW = "worse", "not worse", "unclear", "too few jobs"
ROUNDS = 1000
_MAX_BLOCKS = 100
_BLOCK_JOBS = 10  # the fewest in a block
_TAIL_JOBS = 5  # beyond a percentile, in each arm, for it to be judged
_QUANTILES = (("p50", 0.5), ("p99", 0.99))
_LATENCIES = ("ttft_s", "itl_s", "e2e_s")  # of an AbJob
_HIGHER_IS_BETTER = ("output_tokens_per_s", "goodput")
METRICS = (
    *_HIGHER_IS_BETTER,
    *(f"{name}_{quantile}" for name in _LATENCIES for quantile, _ in _QUANTILES),
)

Interval = tuple[float, float] | None
Estimates = dict[str, float | None]


@dataclass(frozen=True)
class Terms:
    """The terms of a report. `margin`: tolerated relative change for the worse. Bounds of goodput
    in seconds; None: no bound."""

    margin: float = 0.05
    min_jobs: int = 100  # of each arm
    ttft_s: float | None = None
    itl_s: float | None = None
    seed: int = 0

    def is_good(self, job: AbJob) -> bool:
        """Whether the job succeeded within its deadline and the bounds."""
        bounds = ((job.ttft_s, self.ttft_s), (job.itl_s, self.itl_s))
        return job.status is JobStatus.SUCCEEDED and all(
            found is None or bound is None or found <= bound for found, bound in bounds
        )


class _Arm:
    """One arm's jobs as sums by block and as sorted latencies with their blocks."""

    def __init__(
        self, jobs: Sequence[AbJob], block_of: Mapping[int, int], num_blocks: int, terms: Terms
    ) -> None:
        self.tokens, self.good, self.wanted = ([0] * num_blocks for _ in range(3))
        latencies: dict[str, list[tuple[float, int]]] = {name: [] for name in _LATENCIES}
        for job in jobs:
            block = block_of[id(job)]
            self.wanted[block] += job.status is not JobStatus.CANCELLED
            self.good[block] += terms.is_good(job)
            if job.status is JobStatus.SUCCEEDED:
                self.tokens[block] += job.num_output_tokens
                for name, values in latencies.items():
                    if (value := getattr(job, name)) is not None:
                        values.append((value, block))
        self._sorted = {name: sorted(pairs) for name, pairs in latencies.items()}

    def estimate(self, times: Sequence[int], durations_s: Sequence[float]) -> Estimates:
        """The metrics where block i is counted `times[i]` times."""
        wall_s, wanted = _dot(times, durations_s), _dot(times, self.wanted)
        found: Estimates = {
            "output_tokens_per_s": _dot(times, self.tokens) / wall_s if wall_s else None,
            "goodput": _dot(times, self.good) / wanted if wanted else None,
        }
        for name, pairs in self._sorted.items():
            sums = list(accumulate(times[block] for _, block in pairs))
            for quantile, share in _QUANTILES:
                total = sums[-1] if sums else 0
                rank = -int(-share * total // 1)
                value = pairs[bisect_left(sums, rank)][0] if total else None
                found[f"{name}_{quantile}"] = value
        return found

    def num_beyond(self, metric: str) -> float:
        """The number of jobs beyond the metric's percentile; infinite for metrics that are none."""
        name, _, quantile = metric.rpartition("_")
        share = dict(_QUANTILES).get(quantile)
        return float("inf") if share is None else (1 - share) * len(self._sorted[name])


def _dot(times: Sequence[int], values: Sequence[float]) -> float:
    return sum(n * value for n, value in zip(times, values, strict=True))


def compare_arms(record: AbRecord, jobs: Sequence[AbJob], terms: Terms) -> dict[str, Any]:
    """The report as plain data. `jobs`: of the record's versions, in the order of their ends."""
    arms = {arm: [job for job in jobs if job.arm == arm] for arm in ARMS}
    found: dict[str, Any] = {
        "versions": dict(record.versions),
        "candidate_share": record.share,
        "terms": asdict(terms),
        "arms": {arm: _counts(record, arm, arms[arm]) for arm in ARMS},
        "metrics": {},
        "verdict": TOO_FEW,
    }
    if min(map(len, arms.values())) < terms.min_jobs:
        return found
    num_blocks = max(1, min(_MAX_BLOCKS, len(jobs) // _BLOCK_JOBS))
    block_of = {id(job): i * num_blocks // len(jobs) for i, job in enumerate(jobs)}
    sides = {arm: _Arm(arms[arm], block_of, num_blocks, terms) for arm in ARMS}
    durations_s = _durations(jobs, num_blocks)
    rng = random.Random(terms.seed)
    rounds = [_measure(sides, [1] * num_blocks, durations_s, record.share)]
    for _ in range(ROUNDS):
        drawn = Counter(rng.choices(range(num_blocks), k=num_blocks))
        times = [drawn[block] for block in range(num_blocks)]
        rounds.append(_measure(sides, times, durations_s, record.share))
    for metric in METRICS:
        has_tail = all(side.num_beyond(metric) >= _TAIL_JOBS for side in sides.values())
        found["metrics"][metric] = _summary(metric, rounds, terms.margin, has_tail)
    verdicts = {summary["verdict"] for summary in found["metrics"].values()}
    found["verdict"] = next(v for v in (WORSE, UNCLEAR, NOT_WORSE) if v in verdicts)
    return found


def _counts(record: AbRecord, arm: str, jobs: Sequence[AbJob]) -> dict[str, Any]:
    statuses = Counter(job.status for job in jobs)
    num = max(1, len(jobs))
    return {
        "version": record.versions[arm],
        "workers": record.num_workers[arm],
        "ended": len(jobs),
        **{str(status): statuses[status] for status in _ENDS},
        "open": record.num_open[arm],
        "served_by_other": sum(job.served_by not in ("", job.version) for job in jobs),
        "mean_prompt_tokens": sum(job.num_prompt_tokens for job in jobs) / num,
        "mean_output_tokens": sum(job.num_output_tokens for job in jobs) / num,
    }


_ENDS = (JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.EXPIRED, JobStatus.CANCELLED)


def _durations(jobs: Sequence[AbJob], num_blocks: int) -> list[float]:
    """The seconds from the last end of one block to that of the next."""
    ends_ms = [0] * num_blocks
    for i, job in enumerate(jobs):
        block = i * num_blocks // len(jobs)
        ends_ms[block] = max(ends_ms[block], job.finished_ms)
    starts_ms = [min(job.created_ms for job in jobs), *ends_ms]
    return [max(0, end - start) / 1000 for start, end in zip(starts_ms[:-1], ends_ms, strict=True)]


def _measure(
    sides: Mapping[str, _Arm], times: Sequence[int], durations_s: Sequence[float], share: float
) -> dict[str, Estimates]:
    """Both arms' estimates and their ratios. The ratio of throughputs is for equal shares."""
    found = {arm: side.estimate(times, durations_s) for arm, side in sides.items()}
    ratios: Estimates = {}
    for metric in METRICS:
        control, candidate = found[CONTROL][metric], found[CANDIDATE][metric]
        if control and candidate is not None:
            is_rate = metric == "output_tokens_per_s"
            ratios[metric] = candidate / control * ((1 - share) / share if is_rate else 1)
    return found | {"ratio": ratios}


def _summary(
    metric: str, rounds: Sequence[Mapping[str, Estimates]], margin: float, has_tail: bool
) -> dict[str, Any]:
    """Summarises a metric. `rounds`: the estimate from all jobs, then those of the bootstrap."""
    found: dict[str, Any] = {}
    for side in (*ARMS, "ratio"):
        drawn = [v for r in rounds[1:] if (v := r[side].get(metric)) is not None]
        low, high = percentile(drawn, 0.025), percentile(drawn, 0.975)
        interval = None if low is None or high is None else (low, high)
        found[side] = {"estimate": rounds[0][side].get(metric), "interval": interval}
    interval = found["ratio"]["interval"] if has_tail else None
    return found | {"verdict": judge(interval, margin, metric in _HIGHER_IS_BETTER)}


def judge(ratio: Interval, margin: float, is_higher_better: bool) -> str:
    """Returns "worse" if the whole interval of candidate ÷ control is beyond the margin, "not
    worse" if all of it is within, else "unclear"."""
    if ratio is None:
        return UNCLEAR
    low, high = ratio
    if is_higher_better:  # the loss counts
        low, high = 2 - high, 2 - low
    if low > 1 + margin:
        return WORSE
    return NOT_WORSE if high <= 1 + margin else UNCLEAR


_TITLES = {
    "output_tokens_per_s": "output tokens/s",
    "goodput": "goodput, % of jobs",
    **{
        f"{name}_{quantile}": f"{title} {quantile}, ms"
        for name, title in (("ttft_s", "TTFT"), ("itl_s", "ITL"), ("e2e_s", "E2E"))
        for quantile, _ in _QUANTILES
    },
}


def report_text(found: Mapping[str, Any]) -> str:
    parts = [_count_table(found["arms"])]
    if found["metrics"]:
        rows: list[Sequence[str]] = [("95 % intervals", *ARMS, "candidate ÷ control", "")]
        rows += [_row(metric, summary) for metric, summary in found["metrics"].items()]
        parts.append(table(rows))
    parts += [f"note: {note}" for note in notes(found)]
    return "\n\n".join([*parts, _verdict(found)])


def _count_table(arms: Mapping[str, Mapping[str, Any]]) -> str:
    rows: list[Sequence[str]] = [("", *arms)]
    for name in arms[CONTROL]:
        values = [arms[arm][name] for arm in arms]
        cells = [f"{v:.1f}" if isinstance(v, float) else str(v) for v in values]
        rows.append((name.replace("_", " "), *cells))
    return table(rows)


def _row(metric: str, summary: Mapping[str, Any]) -> tuple[str, ...]:
    scale = 1000 if metric.rpartition("_")[0] in _LATENCIES else 100 if metric == "goodput" else 1
    return (
        _TITLES[metric],
        *(_cell(summary[arm], scale, 1) for arm in ARMS),
        _cell(summary["ratio"], 1, 3),
        summary["verdict"],
    )


def _cell(value: Mapping[str, Any], scale: float, digits: int) -> str:
    if value["estimate"] is None:
        return "-"
    text = f"{scale * value['estimate']:.{digits}f}"
    if value["interval"] is None:
        return text
    low, high = (scale * end for end in value["interval"])
    return f"{text} ({low:.{digits}f} to {high:.{digits}f})"


def notes(found: Mapping[str, Any]) -> list[str]:
    """Returns what makes the comparison unfair, in sentences."""
    control, candidate, share = *(found["arms"][arm] for arm in ARMS), found["candidate_share"]
    texts = []
    num_workers = control["workers"] + candidate["workers"]
    if num_workers and abs(candidate["workers"] / num_workers - share) > 0.01:
        texts.append(
            f"{candidate['workers']} of {num_workers} live workers run the candidate, with "
            f"{share:.0%} of the jobs: the load of a worker differs between the arms"
        )
    num, expected = control["ended"] + candidate["ended"], share
    if num and abs(candidate["ended"] - num * expected) > 4 * (num * share * (1 - share)) ** 0.5:
        texts.append(
            f"{candidate['ended'] / num:.1%} of the ended jobs are the candidate's, {share:.1%} "
            "were assigned to it: an arm is behind, and its slowest jobs are missing here"
        )
    if others := control["served_by_other"] + candidate["served_by_other"]:
        texts.append(
            f"{others} jobs were served by another version than the one they count for: they were "
            "given back, their arm had no worker, or a file was changed"
        )
    return texts


def _verdict(found: Mapping[str, Any]) -> str:
    margin = f"{found['terms']['margin']:.0%}"
    if found["verdict"] == TOO_FEW:
        fewest = min(arm["ended"] for arm in found["arms"].values())
        return (
            f"no verdict: {fewest} jobs ended in one arm, fewer than {found['terms']['min_jobs']}"
        )
    if found["verdict"] == WORSE:
        names = [_TITLES[m] for m, s in found["metrics"].items() if s["verdict"] == WORSE]
        return f"the candidate is worse by more than {margin}: {'; '.join(names)}"
    if found["verdict"] == UNCLEAR:
        names = [_TITLES[m] for m, s in found["metrics"].items() if s["verdict"] == UNCLEAR]
        return (
            f"the candidate is not shown to be worse by more than {margin}; unclear, for more jobs "
            f"to tell: {'; '.join(names)}"
        )
    return f"the candidate is not worse by more than {margin}"
