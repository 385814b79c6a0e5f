"""Predicts step times from earlier steps:

step time = a + b * tokens + c * KV tokens read + d * (prefill tokens * context)
"""

import math
from collections.abc import Iterable
from collections.abc import Sequence as Seq

from workers.engine.interface import Chunk, Padding

_FORGETTING = 0.998  # half of the weight is on the last 350 steps
_NUM_NEEDED = 16
_SOLVE_EVERY = 8  # steps, once there were enough
_MAX_SURPRISE = 4.0  # longer steps count as this many times their prediction
# Scale the features to about 1, so that the equations are well conditioned.
_SCALES = (1.0, 1e3, 1e5, 1e7)
_RIDGE = 1e-9
# The lower triangle of the symmetric products. For so few numbers plain Python takes a third of
# numpy's time.
_PAIRS = [(i, j) for i in range(4) for j in range(i + 1)]

# Tokens, KV tokens read, prefill tokens times context.
Features = tuple[float, float, float]
_NOTHING: Features = (0.0, 0.0, 0.0)


class CostModel:
    """Weighted least squares with exponential forgetting and non-negative coefficients.

    Stored as sums and solved on demand: unlike recursive least squares in covariance form, this
    does not wind up while all steps look alike. Errors are relative to the step's time, so that
    short steps fit as well as long ones.
    """

    def __init__(self) -> None:
        self._products = [0.0] * len(_PAIRS)
        self._targets = [0.0] * 4
        self._num_seen = 0
        self._coefficients = (0.0, 0.0, 0.0, 0.0)
        self._num_solved = 0  # number of steps at the last solution

    @property
    def is_ready(self) -> bool:
        """Whether there were enough steps to predict."""
        return self._num_seen >= _NUM_NEEDED

    @property
    def coefficients(self) -> tuple[float, float, float, float]:
        """(a, b, c, d) in seconds."""
        if self._num_seen >= self._num_solved + min(_SOLVE_EVERY, 1 + self._num_solved // 16):
            found = _solve_positive(self._products, self._targets)
            a, b, c, d = (x / scale for x, scale in zip(found, _SCALES, strict=True))
            self._coefficients = (a, b, c, d)
            self._num_solved = self._num_seen
        return self._coefficients

    def observe(
        self,
        chunks: Iterable[Chunk | Padding],
        step_s: float,
        others: Features = _NOTHING,
    ) -> float:
        """Learns from a step of `step_s` seconds; ignores steps shorter than the clock's
        resolution. `others`: sums of `chunk_features` of the step's other work. Returns the seconds
        that were predicted for the step before; 0 without a prediction."""
        if step_s <= 0.0:
            return 0.0
        tokens, kv_read, products = step_features(chunks)
        sums = tokens + others[0], kv_read + others[1], products + others[2]
        predicted_s = self.predict(sums) if self.is_ready else 0.0
        # Prompts alone may explain all steps so far, and predict nothing for streams.
        if predicted_s > 0.0:
            step_s = min(step_s, _MAX_SURPRISE * predicted_s)
        scales = [scale * step_s for scale in _SCALES]
        features = [x / scale for x, scale in zip((1.0, *sums), scales, strict=True)]
        self._products = [
            _FORGETTING * before + features[i] * features[j]
            for before, (i, j) in zip(self._products, _PAIRS, strict=True)
        ]
        self._targets = [
            _FORGETTING * before + x for before, x in zip(self._targets, features, strict=True)
        ]
        self._num_seen += 1
        return predicted_s

    def predict(self, sums: Features) -> float:
        """Seconds of a step with these sums of `chunk_features`."""
        return self.coefficients[0] + self.predict_added(sums)

    def predict_added(self, features: Features) -> float:
        """Seconds that these features add to a step."""
        _, b, c, d = self.coefficients
        return b * features[0] + c * features[1] + d * features[2]

    def max_tokens(self, seconds: float, start: int) -> int:
        """The largest chunk from position `start` that adds at most `seconds` to a step."""
        if seconds <= 0.0:
            return 0
        _, b, c, d = self.coefficients
        # b n + c (start + n) + d (n - 1)(start + n / 2) = seconds, solved for n
        square, linear = d / 2, b + c + d * (start - 0.5)
        constant = (c - d) * start - seconds
        if square > 1e-18:
            root = linear * linear - 4 * square * constant
            num = (math.sqrt(max(0.0, root)) - linear) / (2 * square)
        elif linear > 0.0:
            num = -constant / linear
        else:
            return 2**31
        # Rounding must not lose a token: n tokens' own time must allow n.
        return max(0, min(2**31, int(num + 1e-6)))


def chunk_features(start: int, num_tokens: int) -> Features:
    """Tokens, KV tokens read, and prefill tokens times context; with n - 1, so streams count 0."""
    context = start + num_tokens / 2
    return float(num_tokens), float(start + num_tokens), (num_tokens - 1) * context


def step_features(chunks: Iterable[Chunk | Padding]) -> Features:
    """The sums of `chunk_features` over the chunks of a step."""
    sizes = [(chunk.start, chunk.num_tokens) for chunk in chunks]
    tokens = float(sum([num for _, num in sizes]))
    kv_read = tokens + sum([start for start, _ in sizes])
    products = sum([(num - 1) * (start + num / 2) for start, num in sizes if num > 1])
    return tokens, kv_read, float(products)


def _solve_positive(products: Seq[float], targets: Seq[float]) -> list[float]:
    """Non-negative least squares: drops the most negative coefficient and repeats."""
    solution = [0.0] * len(targets)
    kept = list(range(len(targets)))
    matrix = dict(zip(_PAIRS, products, strict=True))
    ridge = _RIDGE * sum(matrix[i, i] for i in kept)
    while kept:
        rows = [
            [*(matrix[max(i, j), min(i, j)] + ridge * (i == j) for j in kept), targets[i]]
            for i in kept
        ]
        found = _solve(rows)
        if min(found) >= 0.0:
            for i, value in zip(kept, found, strict=True):
                solution[i] = value
            break
        kept.pop(found.index(min(found)))
    return solution


def _solve(rows: list[list[float]]) -> list[float]:
    """Gaussian elimination in place; each row ends with its target. The matrix is positive definite
    and needs no pivots."""
    for i, row in enumerate(rows):
        for below in rows[i + 1 :]:
            factor = below[i] / row[i]
            below[i:] = [x - factor * y for x, y in zip(below[i:], row[i:], strict=True)]
    solution: list[float] = []
    for i, row in reversed(list(enumerate(rows))):
        known = sum(x * y for x, y in zip(row[i + 1 : -1], solution, strict=True))
        solution.insert(0, (row[-1] - known) / row[i])
    return solution
