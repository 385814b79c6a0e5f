"""What a route adds to a call: the same calls to a model and to a route that chooses it, in turns.

python -m bench.route_cost --url http://127.0.0.1:8000 --model demo --route router
"""

import argparse
import statistics
import time

import httpx


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--route", required=True)
    parser.add_argument("--calls", type=int, default=500, help="of each")
    options = parser.parse_args()
    took_ms: dict[str, list[float]] = {options.model: [], options.route: []}
    with httpx.Client(base_url=options.url, timeout=60) as http:
        for _ in range(options.calls + 20):  # the first are not counted
            for name, times in took_ms.items():
                times.append(_timed_ms(http, name))
    found = {name: _quantiles(times[20:]) for name, times in took_ms.items()}
    for name, (p50, p99) in found.items():
        print(f"{name:<24} p50 {p50:6.2f} ms   p99 {p99:6.2f} ms")
    added = found[options.route][0] - found[options.model][0]
    print(f"{'added at p50':<24}     {added:6.2f} ms")


def _timed_ms(http: httpx.Client, model: str) -> float:
    body = {"model": model, "messages": [{"role": "user", "content": "2 + 2?"}], "max_tokens": 1}
    started_s = time.perf_counter()
    http.post("/v1/chat/completions", json=body).raise_for_status()
    return 1000 * (time.perf_counter() - started_s)


def _quantiles(times: list[float]) -> tuple[float, float]:
    """p50 and p99."""
    cuts = statistics.quantiles(times, n=100)
    return cuts[49], cuts[98]


if __name__ == "__main__":
    main()
