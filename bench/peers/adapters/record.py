"""Input and output of every adapter. Uses only the standard library, because it runs in the
environments of other engines."""

import argparse
import json
import resource
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from infra.tables import spread


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True, help="folder of the checkpoint")
    parser.add_argument("--workload", type=Path, required=True)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "int8"), required=True)
    parser.add_argument("--max-running", type=int, required=True)
    parser.add_argument("--json", type=Path, required=True)
    return parser.parse_args()


Request = dict[str, Any]  # prompt_token_ids, max_tokens


def read_requests(path: Path) -> list[Request]:
    """Requests of a workload file (infra.measure.workloads), all at once."""
    requests: list[Request] = json.loads(path.read_text(encoding="utf-8"))["requests"]
    assert not any(request.get("arrival_s") for request in requests), (
        "adapters take no arrival times"
    )
    return requests


class Record:
    """The tokens of each request, with their times."""

    def __init__(self, num_requests: int) -> None:
        self._outputs: list[list[int]] = [[] for _ in range(num_requests)]
        self._times_s: list[list[float]] = [[] for _ in range(num_requests)]
        self._start_s = time.monotonic()
        self._end_s = self._start_s

    def add(self, number: int, token_ids: list[int]) -> None:
        """Records new tokens of a request."""
        self._end_s = time.monotonic()
        self._outputs[number] += token_ids
        self._times_s[number] += [self._end_s - self._start_s] * len(token_ids)

    def num_tokens(self, number: int) -> int:
        return len(self._outputs[number])

    def write(self, path: Path) -> None:
        """Writes throughput, latencies, memory and tokens."""
        wall_s = self._end_s - self._start_s
        itls = [b - a for times in self._times_s for a, b in pairwise(times)]
        summary = {
            "output_tokens_per_s": sum(map(len, self._outputs)) / wall_s,
            "wall_s": wall_s,
            "ttft_s": spread([times[0] for times in self._times_s]),
            "itl_s": spread(itls),
            "e2e_s": spread([times[-1] for times in self._times_s]),
            "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "outputs": self._outputs,
        }
        path.write_text(json.dumps(summary) + "\n", encoding="utf-8")
