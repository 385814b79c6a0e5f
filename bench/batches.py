"""Measures batches: python -m bench.batches memory|beside (Linux)

`memory` runs batches of several sizes, each on a `batchway up` of its own, and reports lines and
tokens per second and each process's peak memory. `beside` puts an open loop of interactive calls
on one server, alone and beside a running batch, in turns, and compares their first tokens. Other
options are those of `batchway up`; without `--model` it serves the demo model.
"""

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from bench.processes import Server, below, part_of, processor_s, running_batchway
from bench.tables import markdown_table
from contract.telemetry.metrics_reader import MetricsSamples
from infra.measure.load import Load, LoadClient, run_load
from infra.measure.workloads import WorkloadRequest, arriving, draw_arrivals, log_uniform_workload
from infra.tables import percentile, write

_MODEL = "m"
_ENDPOINT = "/v1/completions"
_ENDED = ("completed", "failed", "expired", "cancelled")
_POLL_S = 0.2
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Whole:
    """One batch from its creation to its end. `peak_mib` is each process's peak of resident
    memory, by part."""

    num_lines: int
    num_bytes: int
    wall_s: float
    num_tokens: int
    peak_mib: dict[str, float]
    processor_s: dict[str, float]


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of interactive calls. Seconds; the batch's figures are 0 without one."""

    is_beside: bool
    ttft_p50_s: float
    ttft_p99_s: float
    batch_tokens_per_s: float
    processor_s: dict[str, float]


@dataclass(frozen=True, slots=True)
class Shape:
    """The tokens of each line and each interactive call, and the calls of a turn."""

    num_prompt: int
    num_output: int
    num_line_output: int
    rate_per_s: float
    turn_s: float


class InteractiveCaller(LoadClient):
    """Calls in the lane `interactive`."""

    def request_of(self, request: WorkloadRequest) -> tuple[str, dict[str, Any]]:
        path, body = super().request_of(request)
        return path, body | {"service_tier": "priority"}


class BatchClient:
    """The files and batches of one server."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http

    async def upload(self, content: bytes) -> str:
        """Uploads a file. Returns its id."""
        form = {"file": ("in.jsonl", content), "purpose": (None, "batch")}
        return str((await self._ask("POST", "files", files=form))["id"])

    async def start(self, file_id: str) -> str:
        body = {"input_file_id": file_id, "endpoint": _ENDPOINT, "completion_window": "24h"}
        return str((await self._ask("POST", "batches", json=body))["id"])

    async def num_done(self, batch_id: str) -> int:
        return int((await self._ask("GET", f"batches/{batch_id}"))["request_counts"]["completed"])

    async def num_tokens(self) -> float:
        """The output tokens of all lines so far: lines are counted by parts of a batch."""
        url = self._http.base_url.copy_with(path="/metrics")
        page = MetricsSamples.parse((await self._http.get(url)).text)
        return page.value("generation_tokens_total", lane="batch")

    async def cancel(self, batch_id: str) -> None:
        """Cancels a batch. Returns once it has ended."""
        await self._ask("POST", f"batches/{batch_id}/cancel")
        await self.ended(batch_id)

    async def ended(self, batch_id: str) -> None:
        while (await self._ask("GET", f"batches/{batch_id}"))["status"] not in _ENDED:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)

    async def _ask(self, method: str, path: str, **options: Any) -> Any:
        answer = await self._http.request(method, path, **options)
        return answer.raise_for_status().json()


def lines_of(shape: Shape, num_lines: int, seed: str) -> bytes:
    """Returns greedy lines whose prompts no prefix cache knows."""
    rng = random.Random(seed)
    lines = []
    for number in range(num_lines):
        prompt = [rng.randrange(4, 256) for _ in range(shape.num_prompt)]
        body = {"model": _MODEL, "prompt": prompt, "max_tokens": shape.num_line_output}
        body |= {"temperature": 0, "ignore_eos": True}
        line = {"custom_id": f"{number}", "method": "POST", "url": _ENDPOINT, "body": body}
        lines.append(json.dumps(line))
    return "\n".join(lines).encode()


def _used_s(before: Mapping[str, float], pid: int) -> dict[str, float]:
    """Returns each part's processor time since `before`."""
    return {part: used - before.get(part, 0.0) for part, used in processor_s(pid).items()}


# --- memory -----------------------------------------------------------------------------------


async def run_whole(server: Server, shape: Shape, num_lines: int) -> Whole:
    """Runs a batch. Raises RuntimeError if a line was not answered."""
    async with server.client() as http:
        batches = BatchClient(http)
        content = lines_of(shape, num_lines, f"{num_lines}")
        file_id = await batches.upload(content)
        before, started_s = processor_s(server.pid), time.monotonic()
        batch_id = await batches.start(file_id)
        await batches.ended(batch_id)
        wall_s, used_s = time.monotonic() - started_s, _used_s(before, server.pid)
        if (num_done := await batches.num_done(batch_id)) != num_lines:
            raise RuntimeError(f"{num_done} of {num_lines} lines were answered")
    num_tokens = num_lines * shape.num_line_output
    return Whole(num_lines, len(content), wall_s, num_tokens, _peaks(server.pid), used_s)


def _peaks(pid: int) -> dict[str, float]:
    """The largest peak of each part's processes so far, in MiB."""
    peaks: dict[str, float] = {}
    for each in below(pid):
        with contextlib.suppress(OSError):  # it has ended
            status = Path(f"/proc/{each}/status").read_text(encoding="utf-8")
            [kib] = [int(x.split()[1]) for x in status.splitlines() if x.startswith("VmHWM")]
            part = part_of(each)
            peaks[part] = max(peaks.get(part, 0.0), kib * 1024 / _MIB)
    return peaks


def memory_tables(runs: Sequence[Whole]) -> str:
    rows = [["lines", "MB of file", "lines/s", "tokens/s"]]
    for run in runs:
        row = [f"{run.num_lines}", f"{run.num_bytes / 1e6:.1f}"]
        rows.append(
            [*row, f"{run.num_lines / run.wall_s:.1f}", f"{run.num_tokens / run.wall_s:.0f}"]
        )
    peaks = [["peak MiB", *(f"{run.num_lines} lines" for run in runs)]]
    used = [["processor ms a line", *(f"{run.num_lines} lines" for run in runs)]]
    for part in runs[0].peak_mib:
        peaks.append([part, *(f"{run.peak_mib[part]:.1f}" for run in runs)])
        shares = (run.processor_s.get(part, 0.0) / run.num_lines for run in runs)
        used.append([part, *(f"{1000 * share:.2f}" for share in shares)])
    return "\n\n".join(map(markdown_table, (rows, peaks, used)))


# --- interactive calls beside a batch ---------------------------------------------------------


async def run_turns(server: Server, shape: Shape, num_lines: int, rounds: int) -> list[Turn]:
    """Runs turns alone and beside the batch, alternately; the first of each is not counted. Raises
    RuntimeError if a call failed or the batch ended early."""
    turns = []
    async with server.client() as http:
        batches = BatchClient(http)
        for number in range(2 * (rounds + 1)):
            content = lines_of(shape, num_lines, f"{number}") if number % 2 else b""
            async with _batch(batches, content) as batch_id:
                num_before, before = await batches.num_tokens(), processor_s(server.pid)
                ttfts_s, wall_s = await _call(http, shape, number)
                used_s = _used_s(before, server.pid)
                num_tokens = await batches.num_tokens() - num_before
                if batch_id and await batches.num_done(batch_id) == num_lines:
                    raise RuntimeError("the batch ended before the calls: give it more lines")
            p50_s, p99_s = (percentile(ttfts_s, share) or 0.0 for share in (0.5, 0.99))
            turns.append(Turn(bool(batch_id), p50_s, p99_s, num_tokens / wall_s, used_s))
            print(turns[-1], file=sys.stderr, flush=True)
    return turns[2:]


@contextlib.asynccontextmanager
async def _batch(batches: BatchClient, content: bytes) -> AsyncIterator[str]:
    """A batch whose first lines are answered, and which is cancelled at exit; "" without lines."""
    if not content:
        yield ""
        return
    batch_id = await batches.start(await batches.upload(content))
    while not await batches.num_done(batch_id):  # noqa: ASYNC110
        await asyncio.sleep(_POLL_S)
    yield batch_id
    await batches.cancel(batch_id)


async def _call(http: httpx.AsyncClient, shape: Shape, number: int) -> tuple[list[float], float]:
    """Returns the times to the first token from arrival, and the duration."""
    lengths = {
        "prompt_tokens": (shape.num_prompt,) * 2,
        "output_tokens": (shape.num_output,) * 2,
    }
    num_calls = round(shape.rate_per_s * shape.turn_s)
    seed = f"calls {number}"
    workload = log_uniform_workload(num_calls, 256, seed=seed, **lengths)
    arrivals = draw_arrivals(num_calls, shape.rate_per_s, "poisson", 1.0, seed)
    load = Load(arriving(workload, arrivals), True, None, shape.rate_per_s)
    run = await run_load(InteractiveCaller(http, _MODEL), load)
    run.raise_failures()
    return [call.ttft_s for call in run.calls if call.ttft_s is not None], run.wall_s


def beside_tables(turns: Sequence[Turn], shape: Shape) -> str:
    rows = [["first token", "alone", "beside the batch", "ratio"]]
    for name in ("ttft_p50_s", "ttft_p99_s"):
        alone, beside = (
            statistics.median(getattr(turn, name) for turn in turns if turn.is_beside is which)
            for which in (False, True)
        )
        label = f"{name[5:8]}, median of {len(turns) // 2} turns"
        ratio = f"{beside / alone:.2f}"
        rows.append([label, f"{1000 * alone:.1f} ms", f"{1000 * beside:.1f} ms", ratio])
    besides = [turn for turn in turns if turn.is_beside]
    tokens_per_s = statistics.median(turn.batch_tokens_per_s for turn in besides)
    used = [["processor time beside the batch", "cores"]]
    for part in besides[0].processor_s:
        seconds = statistics.median(turn.processor_s.get(part, 0.0) for turn in besides)
        used.append([part, f"{seconds / shape.turn_s:.2f}"])
    batch = f"the batch: {tokens_per_s:.0f} tokens/s"
    return "\n\n".join([markdown_table(rows), batch, markdown_table(used)])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.batches", description=__doc__)
    parser.add_argument("measurement", choices=("memory", "beside"))
    parser.add_argument("--lines", type=int, nargs="+", help="of the batches")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--line-tokens", type=int, help="output of a line (default: as of a call)")
    parser.add_argument("--rate", type=float, default=5.0, help="interactive calls a second")
    parser.add_argument("--turn-s", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", metavar="OUT")
    given, others = parser.parse_known_args(argv)
    line_tokens = given.line_tokens or given.output_tokens
    shape = Shape(given.prompt_tokens, given.output_tokens, line_tokens, given.rate, given.turn_s)
    arguments = [f"--served-model-name={_MODEL}", "--threads=1", *others]
    if given.measurement == "memory":
        wholes = []
        for num_lines in given.lines or (500, 50_000):
            with running_batchway(arguments) as server:
                wholes.append(asyncio.run(run_whole(server, shape, num_lines)))
        write([asdict(whole) for whole in wholes], memory_tables(wholes), given.json)
        return 0
    [num_lines] = given.lines or (5_000,)
    with running_batchway(arguments) as server:
        turns = asyncio.run(run_turns(server, shape, num_lines, given.rounds))
    write([asdict(turn) for turn in turns], beside_tables(turns, shape), given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
