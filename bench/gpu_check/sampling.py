"""Times steps by how their tokens are sampled."""

from typing import Any

from bench.gpu_check.decoding import steady
from bench.gpu_check.served import Served
from bench.gpu_check.sizes import Sizes

# Parameters of every stream.
_ALL: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature 1": {"temperature": 1.0},
    "top-p 0.9": {"temperature": 1.0, "top_p": 0.9},
    "top-k 50 and top-p 0.9": {"temperature": 1.0, "top_k": 50, "top_p": 0.9},
}
# Parameters of one stream beside greedy ones.
_ONE: dict[str, dict[str, Any]] = {
    "one with log probabilities": {"logprobs": 5},
    "one with a repetition penalty": {"repetition_penalty": 1.1},
}
KINDS = (*_ALL, *_ONE)


def time_sampling(served: Served, sizes: Sizes, kind: str) -> dict[str, Any]:
    """Returns seconds per step of the most streams, each the mean of several steps."""
    num_streams, is_one = max(sizes.streams), kind in _ONE
    sampling = _ONE[kind] if is_one else _ALL[kind]
    with steady(served, sizes, num_streams, one=is_one, **sampling) as streams:
        steps_s = [streams.step_s(sizes.steady_steps) for _ in range(sizes.num_repeats)]
    return {"num_streams": num_streams, "steps_s": steps_s}
