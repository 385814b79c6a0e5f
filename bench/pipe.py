"""Measures what HTTP, Redis and the supervisor add: python -m bench.pipe --model DIR

Runs the same requests, alternately, through an engine in this process and through `batchway up`
with the same options: tokens per second with many streams, then time to first token of single
requests, on a bare socket and through httpx. Every prompt is different, so no prefix is cached.
"""

import argparse
import asyncio
import contextlib
import itertools
import os
import statistics
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import httpx

from bench.bare_caller import BareCaller
from bench.processor_time import ProcessorTime
from infra.measure.engine import run_workload, warm_up
from infra.measure.http_calls import Caller, Outcome
from infra.measure.load import Load, LoadRun, run_load
from infra.measure.workloads import Workload, log_uniform_workload
from infra.tables import markdown_table, write
from workers.engine.engine import Engine
from workers.engine_process.engine_setup import build_engine
from workers.ipc.messages import EngineOptions

_READY = "batchway is ready: "
_END_S = 30.0
_NOT_INHERITED = ("REDIS_URL", "BATCHWAY_API_KEY")  # a private Redis, open to this process
_TIMEOUT_S = 600.0
_MODEL = "m"


@dataclass(frozen=True, slots=True)
class Size:
    """The workloads of both."""

    num_streams: int
    num_prompt: int  # tokens
    num_output: int
    num_rounds: int
    num_alone: int  # single requests, for the time to first token


@dataclass(frozen=True, slots=True)
class Comparison:
    """One entry per round or request; processor time in seconds, of the server's rounds."""

    size: Size
    engine_tokens_per_s: list[float]
    server_tokens_per_s: list[float]
    engine_ttft_s: list[float]
    server_ttft_s: list[float]  # on a bare socket
    httpx_ttft_s: list[float]  # includes a common client's share
    processor_s: dict[str, float]
    num_tokens: int  # of the server's rounds

    @property
    def share(self) -> float:
        """The server's throughput relative to the engine's, by medians."""
        medians = map(statistics.median, (self.server_tokens_per_s, self.engine_tokens_per_s))
        return next(medians) / next(medians)

    @property
    def added_ttft_s(self) -> float:
        """The difference of the medians."""
        return statistics.median(self.server_ttft_s) - statistics.median(self.engine_ttft_s)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"share": self.share, "added_ttft_s": self.added_ttft_s}

    def tables(self) -> str:
        """Returns separate tables of throughput, latency and processor time."""
        rounds = zip(self.engine_tokens_per_s, self.server_tokens_per_s, strict=True)
        rows = [["round", "engine (tokens/s)", "server (tokens/s)", "share"]]
        for number, (engine, server) in enumerate(rounds, start=1):
            rows.append([f"{number}", f"{engine:.1f}", f"{server:.1f}", f"{server / engine:.1%}"])
        ttfts_s = self.engine_ttft_s, self.server_ttft_s, self.httpx_ttft_s
        engine_ms, server_ms, httpx_ms = (1000 * statistics.median(ttft_s) for ttft_s in ttfts_s)
        summary = (
            f"server of engine, medians: {self.share:.1%}\n"
            f"first token of one request alone, p50: engine {engine_ms:.1f} ms, server "
            f"{server_ms:.1f} ms, added {1000 * self.added_ttft_s:.1f} ms; through httpx "
            f"{httpx_ms:.1f} ms"
        )
        parts = [["processor time of the server's rounds", "ms per 1,000 tokens"]]
        for part, seconds in self.processor_s.items():
            parts.append([part, f"{1e6 * seconds / self.num_tokens:.0f}"])
        return "\n\n".join([markdown_table(rows), summary, markdown_table(parts)])


@dataclass(frozen=True, slots=True)
class Server:
    """A running `batchway up`."""

    url: str
    pid: int

    def client(self, timeout_s: float = _TIMEOUT_S) -> httpx.AsyncClient:
        """Returns a client of its API, with as many connections as calls."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        return httpx.AsyncClient(base_url=f"{self.url}/v1", timeout=timeout_s, limits=limits)


@contextlib.contextmanager
def running_server(arguments: Sequence[str]) -> Iterator[Server]:
    """Starts a server, and stops it at exit. Raises RuntimeError if it does not start."""
    process = subprocess.Popen(  # noqa: S603 - our own command
        [sys.executable, "-m", "infra", "up", "--port=0", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={name: value for name, value in os.environ.items() if name not in _NOT_INHERITED},
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    # Its logs are read to their end: a full pipe would stop it.
    reader = threading.Thread(target=deque, args=(process.stdout, 0), daemon=True)
    ready = ""
    try:
        for ready in process.stdout:
            if _READY in ready:
                break
        else:
            raise RuntimeError(f"`batchway up` ended before it was ready: {ready.strip()}")
        reader.start()
        yield Server(ready.split(_READY)[1].split()[0], process.pid)
    finally:
        process.terminate()
        try:
            process.wait(timeout=_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if reader.ident is not None:
            reader.join()
        process.stdout.close()


async def compare(engine: Engine, vocab_size: int, server: Server, size: Size) -> Comparison:
    """Alternates both, each round with new prompts; the first round is not counted."""
    client = server.client()
    seeds = itertools.count(1)

    def draw(num_requests: int, num_prompt: int, num_output: int) -> Workload:
        """Draws different requests of one shape at each call."""
        lengths = {"prompt_tokens": (num_prompt,) * 2, "output_tokens": (num_output,) * 2}
        return log_uniform_workload(num_requests, vocab_size, seed=f"pipe {next(seeds)}", **lengths)

    async with client:
        caller = Caller(client, _MODEL)
        warm_up(engine, draw(4, size.num_prompt, 4), vocab_size)
        await _serve(caller, draw(size.num_streams, size.num_prompt, 4), size.num_streams)
        processor = ProcessorTime(server.pid)
        rates: tuple[list[float], list[float]] = ([], [])
        num_tokens = 0
        for _ in range(size.num_rounds):
            shape = size.num_streams, size.num_prompt, size.num_output
            rates[0].append(run_workload(engine, draw(*shape)).output_tokens_per_s)
            with processor.counted():
                run = await _serve(caller, draw(*shape), size.num_streams)
            num_run = sum(call.num_output_tokens for call in run.calls)
            num_tokens += num_run
            rates[1].append(num_run / run.wall_s)
        ttfts_s: tuple[list[float], list[float], list[float]] = ([], [], [])
        with BareCaller(server.url, _TIMEOUT_S) as bare:
            for _ in range(size.num_alone):
                [timeline] = run_workload(engine, draw(1, size.num_prompt, 2)).timelines
                ttfts_s[0].append(timeline.ttft_s)
                [request] = draw(1, size.num_prompt, 2).requests
                ttfts_s[1].append(bare.ttft_s(*caller.request_of(request)))
                [call] = (await _serve(caller, draw(1, size.num_prompt, 2), 1)).calls
                assert call.ttft_from_sending_s is not None
                ttfts_s[2].append(call.ttft_from_sending_s)
    return Comparison(size, *rates, *ttfts_s, processor.by_part_s, num_tokens)


async def _serve(caller: Caller, workload: Workload, num_streams: int) -> LoadRun:
    """Sends all streams at once."""
    run = await run_load(caller, Load(workload, is_open=False, max_concurrency=num_streams))
    failed = [call.reason for call in run.calls if call.outcome is not Outcome.SUCCEEDED]
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(run.calls)} calls failed: {failed[0]}")
    return run


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.pipe", description=__doc__)
    parser.add_argument("--model", required=True, metavar="DIR")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    parser.add_argument("--threads", type=int, default=1, help="of each engine (default: 1)")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--alone", type=int, default=30, help="single requests, one after another")
    parser.add_argument("--json", metavar="OUT")
    given = parser.parse_args(argv)
    size = Size(given.streams, given.prompt_tokens, given.output_tokens, given.rounds, given.alone)
    options = EngineOptions(
        model_path=given.model,
        dtype=given.dtype,
        num_threads=given.threads,
        max_num_seqs=given.streams,
    )
    arguments = [
        f"--model={given.model}",
        f"--served-model-name={_MODEL}",
        f"--dtype={given.dtype}",
        f"--threads={given.threads}",
        f"--max-num-seqs={given.streams}",
    ]
    from workers.model.loader import load_model

    loaded = load_model(options, lambda text: print(text, file=sys.stderr))
    engine = build_engine(loaded.model, loaded.vocab_size, options)
    with running_server(arguments) as server:
        comparison = asyncio.run(compare(engine, loaded.vocab_size, server, size))
    write(comparison.as_dict(), comparison.tables(), given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
