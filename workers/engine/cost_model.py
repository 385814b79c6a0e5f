"""What a step takes, learnt from the steps that were: seconds from tokens.

step time = a + b * tokens + c * KV tokens read + d * (prefill tokens * context)

Leaves to the scheduler what is done with the time.
"""

import math
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from workers.engine.model import Chunk, Padding

_FORGETTING = 0.998  # half of what is known is of the last 350 steps
_NUM_NEEDED = 16
# Steps, once there were many: solving takes as long as some steps of a small model.
_SOLVE_EVERY = 8
_MAX_SURPRISE = 4.0  # a step of more than this many times its prediction counts as that
# Brings the features to about one, so that the equations are well conditioned.
_SCALES = np.array([1.0, 1e3, 1e5, 1e7])
_RIDGE = 1e-9

# Tokens, KV tokens read, prefill tokens times context.
Features = tuple[float, float, float]


class CostModel:
    """Least squares over all steps, older ones forgotten exponentially; no coefficient below 0.

    Kept as sums, from which the coefficients are solved when asked: unlike the covariance form
    of recursive least squares, this cannot wind up while all steps look alike. Errors count
    relative to the step's time, so that short steps are met as well as long ones.
    """

    def __init__(self) -> None:
        self._products = np.zeros((4, 4))
        self._targets = np.zeros(4)
        self._num_seen = 0
        self._coefficients = (0.0, 0.0, 0.0, 0.0)
        self._num_solved = 0  # steps seen when the coefficients were solved

    @property
    def is_ready(self) -> bool:
        """Whether there were steps enough to predict from."""
        return self._num_seen >= _NUM_NEEDED

    @property
    def coefficients(self) -> tuple[float, float, float, float]:
        """(a, b, c, d) in seconds."""
        if self._num_seen >= self._num_solved + min(_SOLVE_EVERY, 1 + self._num_solved // 16):
            a, b, c, d = _solve_positive(self._products, self._targets) / _SCALES
            self._coefficients = (float(a), float(b), float(c), float(d))
            self._num_solved = self._num_seen
        return self._coefficients

    def observe(
        self,
        chunks: Iterable[Chunk | Padding],
        step_s: float,
        others: Features = (0.0, 0.0, 0.0),
    ) -> None:
        """Learns from a step that took `step_s`; what a clock cannot resolve teaches nothing.

        `others`: sums of `chunk_features` of what it computed beside the chunks.
        """
        if step_s <= 0.0:
            return
        tokens, kv_read, products = step_features(chunks)
        sums = tokens + others[0], kv_read + others[1], products + others[2]
        if self.is_ready:
            step_s = min(step_s, _MAX_SURPRISE * self.predict(sums))
        features = np.array([1.0, *sums]) / (_SCALES * step_s)
        self._products = _FORGETTING * self._products + np.outer(features, features)
        self._targets = _FORGETTING * self._targets + features
        self._num_seen += 1

    def predict(self, sums: Features) -> float:
        """Seconds of a step with these sums of `chunk_features`."""
        return self.coefficients[0] + self.predict_added(sums)

    def predict_added(self, features: Features) -> float:
        """Seconds that these features add to a step that takes place anyway."""
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
        # Who asks with just the seconds that n tokens take is to get n.
        return max(0, min(2**31, int(num + 1e-6)))


def chunk_features(start: int, num_tokens: int) -> Features:
    """Tokens, KV tokens read, and prefill tokens times context: (n - 1), so that 0 for a stream."""
    context = start + num_tokens / 2
    return float(num_tokens), float(start + num_tokens), (num_tokens - 1) * context


def step_features(chunks: Iterable[Chunk | Padding]) -> Features:
    """The sums of `chunk_features` over the chunks of a step."""
    sizes = [(chunk.start, chunk.num_tokens) for chunk in chunks]
    tokens = float(sum([num for _, num in sizes]))
    kv_read = tokens + sum([start for start, _ in sizes])
    products = sum([(num - 1) * (start + num / 2) for start, num in sizes if num > 1])
    return tokens, kv_read, float(products)


def _solve_positive(
    products: npt.NDArray[np.float64], targets: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Least squares without negative coefficients: the most negative is left out, and again."""
    solution = np.zeros(4)
    kept = [0, 1, 2, 3]
    ridge = _RIDGE * np.trace(products)
    while kept:
        part = products[np.ix_(kept, kept)] + ridge * np.eye(len(kept))
        found = np.linalg.solve(part, targets[kept])
        if found.min() >= 0.0:
            solution[kept] = found
            break
        kept.pop(int(found.argmin()))
    return solution
