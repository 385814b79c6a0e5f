"""Chooses the threshold of a cascade of two models from measured answers. Calls no model."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt

MIN_QUESTIONS = 50  # with fewer, an interval says nothing
NUM_RESAMPLES = 1_000
_INTERVAL = (2.5, 97.5)  # percent

_Share = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
_Cost = Annotated[float, msgspec.Meta(ge=0.0)]
_Array = npt.NDArray[np.float64]


class FirstAnswer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The first member's answer. Costs of both members are in one unit."""

    confidence: _Share
    quality: _Share
    cost: _Cost


class LastAnswer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The last member's answer."""

    quality: _Share
    cost: _Cost


class Measured(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Both members' answers to one question."""

    first: FirstAnswer
    last: LastAnswer


class CannotFit(ValueError):
    """No threshold can be determined: by the data, the cascade, or an answer. The message is one
    sentence, without a prompt."""


@dataclass(frozen=True, slots=True)
class ThresholdEffect:
    """The effect of a threshold. `first_share`: of questions that the first member answers; quality
    and cost relative to the last member alone."""

    threshold: float
    first_share: float
    quality: float
    cost: float


@dataclass(frozen=True, slots=True)
class Interval:
    """The middle 95 % of resamples."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Fit:
    """A chosen threshold. `curve`: from the highest threshold to 0, where the first member answers
    alone. `chosen`: the cheapest point that keeps the target; None if there is none.
    `unseen_quality`: of questions that a choice did not see."""

    num_questions: int
    last_quality: float  # absolute
    last_cost: float  # mean of a question
    curve: tuple[ThresholdEffect, ...]
    chosen: ThresholdEffect | None
    quality_interval: Interval | None
    cost_interval: Interval | None
    unseen_quality: Interval


def fit_threshold(rows: Sequence[Measured], target: float, seed: int) -> Fit:
    """`target`: the least quality, relative to the last member's. Raises CannotFit."""
    if len(rows) < MIN_QUESTIONS:
        raise CannotFit(f"{len(rows)} questions are too few: give at least {MIN_QUESTIONS}")
    data = _Data.of(rows)
    if not data.last_quality.any():
        raise CannotFit("the last member answers no question right: nothing can be relative to it")
    if len(data.thresholds) == 1:
        raise CannotFit(
            "the first member is equally sure of all its answers: no threshold parts them"
        )
    weights = np.ones(len(rows))
    quality, cost = data.curve(weights)
    curve = tuple(
        ThresholdEffect(float(threshold), float(share), float(q), float(c))
        for threshold, share, q, c in zip(
            data.thresholds, data.ends / len(rows), quality, cost, strict=True
        )
    )
    index = _cheapest(quality, cost, target)
    resampled = [data.curve(drawn) for drawn in _resamples(len(rows), seed)]
    return Fit(
        num_questions=len(rows),
        last_quality=float(data.last_quality.mean()),
        last_cost=float(data.last_cost.mean()),
        curve=curve,
        chosen=None if index is None else curve[index],
        quality_interval=None if index is None else _interval([q[index] for q, _ in resampled]),
        cost_interval=None if index is None else _interval([c[index] for _, c in resampled]),
        unseen_quality=_unseen(data, target, seed),
    )


@dataclass(frozen=True, slots=True)
class _Data:
    """Questions, the first member's surest answers first. `ends[k]`: the number of its answers that
    `thresholds[k]` accepts; all answers of one confidence are accepted together."""

    first_quality: _Array
    first_cost: _Array
    last_quality: _Array
    last_cost: _Array
    ends: npt.NDArray[np.int64]
    thresholds: _Array

    @classmethod
    def of(cls, rows: Sequence[Measured]) -> "_Data":
        rows = sorted(rows, key=lambda row: -row.first.confidence)
        confidence = np.array([row.first.confidence for row in rows])
        ends = np.append(np.flatnonzero(np.diff(confidence)) + 1, len(rows))
        # Between the least sure answer that stands and the next, so that little moves neither.
        below = np.append(confidence, 0.0)[ends]
        thresholds = (confidence[ends - 1] + below) / 2
        thresholds[-1] = 0.0
        return cls(
            np.array([row.first.quality for row in rows]),
            np.array([row.first.cost for row in rows]),
            np.array([row.last.quality for row in rows]),
            np.array([row.last.cost for row in rows]),
            ends,
            thresholds,
        )

    def curve(self, weights: _Array) -> tuple[_Array, _Array]:
        """Quality and cost at each threshold, relative to the last member alone, where question i
        counts `weights[i]` times."""
        last_quality, last_cost = weights * self.last_quality, weights * self.last_cost
        gained = np.cumsum(weights * self.first_quality - last_quality)[self.ends - 1]
        saved = np.cumsum(last_cost)[self.ends - 1]
        quality = last_quality.sum() + gained
        cost = (weights * self.first_cost).sum() + last_cost.sum() - saved
        return _over(quality, last_quality.sum()), _over(cost, last_cost.sum())


def _over(values: _Array, whole: float) -> _Array:
    """Divides; 0 over 0 is 1, because nothing is lost where there is nothing."""
    return values / whole if whole else np.where(values == 0, 1.0, np.inf)


def _cheapest(quality: _Array, cost: _Array, target: float) -> int | None:
    keeps = np.flatnonzero(quality >= target - 1e-12)
    return int(keeps[np.argmin(cost[keeps])]) if len(keeps) else None


def _unseen(data: _Data, target: float, seed: int) -> Interval:
    """Chooses on each resample, and measures quality on the questions that are not in it. If no
    threshold keeps the target, the last member answers alone."""
    found = []
    for drawn in _resamples(len(data.first_cost), seed):
        index = _cheapest(*data.curve(drawn), target)
        others = (drawn == 0).astype(float)
        if others.any():
            found.append(1.0 if index is None else data.curve(others)[0][index])
    return _interval(found)


def _resamples(size: int, seed: int) -> Iterator[_Array]:
    """How often each question is in a resample of the same size: the bootstrap (Efron 1979)."""
    rng = np.random.default_rng(seed)
    for _ in range(NUM_RESAMPLES):
        yield np.bincount(rng.integers(0, size, size), minlength=size).astype(float)


def _interval(values: Sequence[float]) -> Interval:
    low, high = np.percentile(values, _INTERVAL)
    return Interval(float(low), float(high))
