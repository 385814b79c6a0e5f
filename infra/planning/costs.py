"""How long a step takes: by a device's data sheet, or by a fit to recorded steps or jobs."""

import statistics
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
from msgspec.structs import replace

from infra.measure.workloads import BadWorkload
from infra.planning.traces import Recorded, RecordedFleet
from workers.engine.cost_model import Features, step_features
from workers.engine.interface import Chunk, Padding


class Costs(Protocol):
    """A model on a device, as a simulation needs it."""

    def step_s(self, chunks: Seq[Chunk | Padding]) -> float:
        """Seconds from a step's begin to the begin of the next one."""


class Fitted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Coefficients as of workers/engine/cost_model: seconds of a step, and of each of its tokens,
    tokens read from the KV cache, and products of a prompt's tokens and their context. Further,
    what a worker has room for, and seconds that a job takes on its way to the engine and its first
    token on its way to the log: quantiles, evenly spaced."""

    step: float
    token: float
    kv_token: float
    product: float
    overheads_s: tuple[float, ...] = (0.002,)
    wakes_s: tuple[float, ...] = (0.001,)  # from a submission to a worker's claim, likewise
    max_num_seqs: int = 64
    num_blocks: int = 4096
    block_size: int = 16
    step_tokens: int = 2048
    max_model_len: int = 32768
    errors: dict[str, float] = {}  # of figures, from calibration

    def step_s(self, chunks: Seq[Chunk | Padding]) -> float:
        return self.predict(step_features(chunks))

    def predict(self, features: Features) -> float:
        """Seconds of a step with these features."""
        tokens, kv_read, products = features
        return self.step + self.token * tokens + self.kv_token * kv_read + self.product * products

    def write(self, path: Path) -> None:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self)) + b"\n")


def read_costs(path: Path) -> Fitted:
    """Reads what `write` wrote. Raises BadWorkload."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Fitted)
    except OSError as exc:
        raise BadWorkload(f"{path} cannot be read: {exc.strerror}") from exc
    except msgspec.MsgspecError as exc:
        raise BadWorkload(f"{path} is no file of costs: {exc}") from exc


_NUM_NEEDED = 64  # jobs that have ended
_NUM_QUANTILES = 100
_ROUNDS = 8
_MS = 1e-3
_LONGEST_WAKE_S = 0.05
_USUAL_ERROR = 0.2
_MOST_OVERHEADS = 20  # times the usual one; a longer one was something else


def fit_costs(fleet: RecordedFleet, jobs: Seq[Recorded]) -> Fitted:
    """Fits step times to a recording: each job's mean time between tokens, by what ran beside it,
    and its time from claim to first token. A job whose worker is unknown is taken to share each
    worker alike. Raises BadWorkload if too few jobs have ended."""
    done = [
        job
        for job in jobs
        if job.state == "succeeded" and job.attempts == 1 and job.first_token_s is not None
        and job.claimed_s is not None and job.finished_s is not None
    ]  # fmt: skip
    if len(done) < _NUM_NEEDED:
        raise BadWorkload(f"only {len(done)} jobs have ended; {_NUM_NEEDED} are needed for a fit")
    beside = _Beside(done, max(1, fleet.workers))
    between = [found for job in done if (found := beside.between_tokens(job)) is not None]
    firsts = [beside.first_token(job) for job in _undisturbed(done)]
    rows = [(took, 1.0, features, 0.0) for took, features in between]
    rows += [(took, steps, features, 1.0) for took, steps, features in firsts]
    step, token, kv_token, product, usual_s = _solve(rows)
    model = Fitted(step, token, kv_token, product)
    rest = [
        max(0.0, took - (steps - 1) * model.step - model.predict(features))
        for took, steps, features in firsts
    ]
    rest = [min(each, _MOST_OVERHEADS * usual_s) for each in rest]
    waits = sorted(job.claimed_s - job.arrival_s for job in done if job.claimed_s is not None)
    most_s = _MS + 10 * waits[len(waits) // 4]  # who waited longer waited for a place
    return replace(
        model,
        overheads_s=_quantiles(rest),
        wakes_s=_quantiles([min(wait, _LONGEST_WAKE_S) for wait in waits if wait <= most_s]),
        max_num_seqs=fleet.max_num_seqs or model.max_num_seqs,
        num_blocks=fleet.num_blocks or model.num_blocks,
        block_size=fleet.block_size or model.block_size,
        step_tokens=fleet.step_tokens or model.step_tokens,
    )


def _undisturbed(jobs: Seq[Recorded]) -> list[Recorded]:
    """The jobs whose prompt was computed while no other one was; all, if these are few."""
    spans = sorted(
        ((job.claimed_s or 0.0, job.first_token_s or 0.0, job) for job in jobs),
        key=lambda span: span[:2],
    )
    found, latest_s = [], -1.0
    for index, (claimed_s, first_s, job) in enumerate(spans):
        next_s = spans[index + 1][0] if index + 1 < len(spans) else first_s
        if latest_s <= claimed_s and first_s <= next_s:
            found.append(job)
        latest_s = max(latest_s, first_s)
    return found if len(found) >= _NUM_NEEDED // 4 else list(jobs)


def fit_steps(steps: Seq[tuple[float, Features]], room: dict[str, int]) -> Fitted:
    """Fits step times to measured steps. `room`: the fields of a worker's room."""
    rows = [(took, 1.0, features, 0.0) for took, features in steps]
    step, token, kv_token, product, _ = _solve(rows)
    return replace(Fitted(step, token, kv_token, product), **room)


def _quantiles(values: Seq[float]) -> tuple[float, ...]:
    found = statistics.quantiles(values, n=_NUM_QUANTILES, method="inclusive")
    return tuple(round(float(value), 6) for value in found)


def _solve(rows: Seq[tuple[float, float, Features, float]]) -> list[float]:
    """Coefficients of a step, a token, a KV token, a product and the overhead; none is negative.

    Rows: seconds, steps, their features, overheads. Errors count relative to the times that are
    predicted so far, large ones less (Huber's weights): a few jobs waited for something else.
    """
    matrix = np.array([[steps, *features, one] for _, steps, features, one in rows])
    took = np.array([took for took, *_ in rows])
    scales = np.maximum(matrix.mean(axis=0), 1e-12)  # to about 1
    predicted, found = took, np.zeros(matrix.shape[1])
    for _ in range(_ROUNDS):
        error = np.abs(took - predicted) / predicted
        weights = np.sqrt(np.minimum(1.0, _USUAL_ERROR / np.maximum(error, 1e-9))) / predicted
        found = _least_squares(matrix / scales * weights[:, None], took * weights) / scales
        predicted = np.maximum(matrix @ found, 0.1 * took)
    return [float(x) for x in found]


def _least_squares(matrix: Any, targets: Any) -> Any:
    """Drops the most negative coefficient and repeats."""
    kept = list(range(matrix.shape[1]))
    while True:
        solved = np.linalg.lstsq(matrix[:, kept], targets, rcond=None)[0]
        if solved.min() >= 0:
            break
        kept.pop(int(solved.argmin()))
    found = np.zeros(matrix.shape[1])
    found[kept] = solved
    return found


class _Beside:
    """What ran beside each job of a recording, on its worker."""

    def __init__(self, jobs: Seq[Recorded], num_workers: int) -> None:
        self._num_workers = num_workers
        events: list[tuple[float, float, float, float, float]] = []
        for job in jobs:
            first_s, ended_s = _times(job)
            kv = job.prompt_tokens + job.output_tokens / 2
            prompt = float(job.prompt_tokens)
            events.append((first_s, 1.0, kv, prompt, prompt * prompt / 2))
            events.append((ended_s, -1.0, -kv, 0.0, 0.0))
        rows = np.array(sorted(events))
        self._at_s = rows[:, 0]
        num, num_kv = np.cumsum(rows[:, 1]), np.cumsum(rows[:, 2])
        gaps = np.diff(self._at_s, append=self._at_s[-1])
        # Integrals over time of the streams and of their KV tokens; sums of prompts.
        self._sums = [
            np.concatenate([[0.0], np.cumsum(num * gaps)[:-1]]),
            np.concatenate([[0.0], np.cumsum(num_kv * gaps)[:-1]]),
        ]
        self._prompts = [np.cumsum(rows[:, 3]), np.cumsum(rows[:, 4])]

    def between_tokens(self, job: Recorded) -> tuple[float, Features] | None:
        """The mean seconds of a step with the job's tokens, and the mean features of such steps."""
        first_s, ended_s = _times(job)
        num_steps, took_s = job.output_tokens - 1, ended_s - first_s
        if num_steps < 1 or took_s <= 0:
            return None
        streams, kv = (self._mean(sums, first_s, ended_s) for sums in self._sums)
        own_kv = job.prompt_tokens + job.output_tokens / 2
        prompts, products = (
            self._between(sums, first_s, ended_s) / self._num_workers / num_steps
            for sums in self._prompts
        )
        tokens = 1 + (streams - 1) / self._num_workers + prompts
        read = own_kv + (kv - own_kv) / self._num_workers + prompts
        return took_s / num_steps, (float(tokens), float(read), float(products))

    def first_token(self, job: Recorded) -> tuple[float, float, Features]:
        """Seconds from claim to first token, the steps that takes, and their features: if streams
        run, half of their step has to end first."""
        first_s, _ = _times(job)
        assert job.claimed_s is not None
        index = int(np.searchsorted(self._at_s, job.claimed_s, side="right")) - 1
        num = 0.0  # streams
        if index >= 0 and index + 1 < len(self._at_s):
            gap_s = max(1e-9, self._at_s[index + 1] - self._at_s[index])
            num = float(self._sums[0][index + 1] - self._sums[0][index])
            num /= gap_s * self._num_workers
        steps, prompt = 1.5 if num >= 0.5 else 1.0, float(job.prompt_tokens)
        features = prompt + steps * num, prompt, prompt * prompt / 2
        return first_s - job.claimed_s, steps, features

    def _mean(self, sums: Any, from_s: float, to_s: float) -> float:
        ends = np.interp([from_s, to_s], self._at_s, sums)
        return float(ends[1] - ends[0]) / (to_s - from_s)

    def _between(self, sums: Any, from_s: float, to_s: float) -> float:
        ends = np.searchsorted(self._at_s, [from_s, to_s], side="right") - 1
        return float(sums[ends[1]] - sums[ends[0]])


def _times(job: Recorded) -> tuple[float, float]:
    assert job.first_token_s is not None
    assert job.finished_s is not None
    return job.first_token_s, job.finished_s
