"""The same requests to any server over HTTP: loads, and a worker that dies in mid-stream."""

import asyncio
import contextlib
import multiprocessing
import random
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from multiprocessing.connection import Connection
from typing import Any

import httpx

from bench.gpu_check.record import Finding
from bench.processes import Server, below, end_with_parent, kill_all, part_of
from infra.measure.http_calls import Call, Caller, Outcome
from infra.measure.load import Load, LoadRun, run_load
from infra.measure.workloads import Workload, WorkloadRequest, log_uniform_workload
from infra.tables import percentile

MODEL = "m"
_SAMPLE_MS, _LOOK_S = 200, 0.005
_STREAMS_EACH, _SPAWN_S = 64, 60.0  # of each process that calls
_NUM_JUDGED, _JUDGE_S = 4, 60.0  # streams, seconds of each
# A token that the model did not choose is behind by some deviations, each 1 in a model of ours.
# In bfloat16 a chosen one is behind by a tenth at most: another batch adds in another order.
MOST_BEHIND = 0.5


@dataclass(frozen=True, slots=True)
class Requests:
    """Greedy requests of one length, drawn by a seed: every server gets the same."""

    vocab_size: int
    num_in: int
    num_out: int

    def drawn(self, num_streams: int, seed: object) -> Workload:
        lengths = {"prompt_tokens": (self.num_in,) * 2, "output_tokens": (self.num_out,) * 2}
        seed = f"{seed} {num_streams}"
        return log_uniform_workload(num_streams, self.vocab_size, seed=seed, **lengths)


def measure(server: Server, workload: Workload, limit_s: float) -> tuple[LoadRun, dict[str, Any]]:
    """Sends all requests at once. `utilisation`: the GPU's in percent while all streams decode.
    Raises RuntimeError if a call fails, TimeoutError."""
    began_s: list[float] = []
    with utilisation() as samples:
        run = _send(server, workload, limit_s, lambda: began_s.append(time.time()))
    if any(call.outcome is not Outcome.SUCCEEDED for call in run.calls):
        raise RuntimeError(f"a call failed{_reasons(run)}")
    first_s = began_s[0] + max(call.chunk_times_s[0] for call in run.calls)
    last_s = began_s[0] + min(call.chunk_times_s[-1] for call in run.calls)
    found = {
        "tokens_per_s": sum(call.num_output_tokens for call in run.calls) / run.wall_s,
        "wall_s": run.wall_s,
        "first_token_s": percentile([call.ttft_from_sending_s or 0.0 for call in run.calls], 0.5),
        "per_token_s": percentile([call.mean_itl_s or 0.0 for call in run.calls], 0.5),
        "utilisation": [used for at_s, used in samples if first_s <= at_s <= last_s],
    }
    return run, found


def kill_worker(server: Server, calm: LoadRun, limit_s: float) -> tuple[Finding, dict[str, Any]]:
    """Sends the requests of `calm` again, and kills the worker with its engine while they stream;
    another worker goes on with them. `at`: the tokens that each caller had then. Raises
    TimeoutError."""
    workload, share = calm.load.workload, random.Random(7).uniform(0.1, 0.4)
    at, run = asyncio.run(_send_and_kill(server, calm, share, limit_s))
    answers = [call.token_ids for call in run.calls]
    asked = list(zip(workload.requests, answers, strict=True))
    most, judged = 0.0, "not compared with the model's own choices: "
    try:
        most = max(behind(server, *pair) for pair in asked[:_NUM_JUDGED])
        judged = f"no token is behind the model's own choice by more than {most:.3f}"
    except httpx.HTTPError as exc:
        judged += repr(exc)
    found: dict[str, Any] = {
        "streams": len(answers),
        "at": at,
        "running": sum(n < request.max_tokens for n, (request, _) in zip(at, asked, strict=False)),
        "ended": sum(call.outcome is Outcome.SUCCEEDED for call in run.calls),
        "whole": sum(len(answer) == request.max_tokens for request, answer in asked),
        "same": sum(a.token_ids == b for a, b in zip(calm.calls, answers, strict=True)),
        "longest_gap_s": max((max(call.itls_s) for call in run.calls if call.itls_s), default=0.0),
    }
    is_whole = found["ended"] == found["whole"] == found["streams"] and found["running"] > 0
    detail = (
        "{ended} of {streams} streams ended, {whole} with as many tokens as asked for, {same} with "
        "those of an undisturbed run; {running} were running; longest gap {longest_gap_s:.1f} s"
    ).format(**found)
    judged = f"killed after {sum(at)} tokens; {judged}{_reasons(run)}"
    return Finding(is_whole and most <= MOST_BEHIND, f"{detail}; {judged}"), found


@dataclass(frozen=True, slots=True)
class _Watched(Caller):
    """A caller whose calls can be seen while they run."""

    calls: list[Call] = field(default_factory=list)

    async def call(
        self,
        call: Call,
        request: WorkloadRequest,
        now_s: Callable[[], float],
        hang_up_after: int | None = None,
    ) -> None:
        self.calls.append(call)
        await Caller.call(self, call, request, now_s, hang_up_after)


async def _send_and_kill(
    server: Server, calm: LoadRun, share: float, limit_s: float
) -> tuple[list[int], LoadRun]:
    """Kills the worker after this share of the tokens, or of the time of `calm` where tokens come
    late. Returns how many tokens each caller had then."""
    num_wanted = share * calm.load.workload.num_output_tokens
    end_s = time.monotonic() + share * calm.wall_s
    async with asyncio.timeout(limit_s), _client(server, limit_s) as client:
        caller = _Watched(client, MODEL)

        async def kill() -> list[int]:
            at = [0]
            while sum(at) < num_wanted and time.monotonic() < end_s:
                await asyncio.sleep(_LOOK_S)
                at = [call.num_output_tokens for call in caller.calls]
            await asyncio.to_thread(_kill, server.pid)
            return at

        killing = asyncio.create_task(kill())
        run = await run_load(caller, calm.load)
        return await killing, run


def _send(
    server: Server, workload: Workload, limit_s: float, begin: Callable[[], object]
) -> LoadRun:
    """Sends all requests at once, and calls `begin` then. Many streams go by several processes: one
    does not read tokens as fast as a GPU makes them. Raises TimeoutError, RuntimeError."""
    requests, context = workload.requests, multiprocessing.get_context("spawn")
    parts = [requests[i : i + _STREAMS_EACH] for i in range(0, len(requests), _STREAMS_EACH)]
    together = context.Barrier(len(parts) + 1, timeout=_SPAWN_S)
    with contextlib.ExitStack() as stack:
        receivers = []
        for part in parts:
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_send_part, args=(server, part, limit_s, together, sender), daemon=True
            )
            process.start()
            stack.callback(process.join)
            stack.callback(process.kill)
            sender.close()
            receivers.append(stack.enter_context(receiver))
        try:
            together.wait()
            begin()
            runs = [receiver.recv() for receiver in receivers]
        except (EOFError, threading.BrokenBarrierError) as exc:
            raise RuntimeError("a process that calls has ended") from exc
    for run in runs:
        if isinstance(run, BaseException):
            raise run
    calls = tuple(call for run in runs for call in run.calls)
    load = Load(workload, False, max_concurrency=len(requests))
    return LoadRun(load, calls, max(run.wall_s for run in runs))


def _send_part(
    server: Server,
    requests: tuple[WorkloadRequest, ...],
    limit_s: float,
    together: threading.Barrier,
    sender: Connection,
) -> None:
    """In a process of its own: sends back a LoadRun, or what was raised."""
    end_with_parent()

    async def send() -> LoadRun:
        load = Load(Workload(requests), False, max_concurrency=len(requests))
        async with asyncio.timeout(limit_s), _client(server, limit_s) as client:
            return await run_load(Caller(client, MODEL), load)

    try:
        together.wait()
        sender.send(asyncio.run(send()))
    except Exception as exc:
        sender.send(exc)


def _client(server: Server, limit_s: float) -> httpx.AsyncClient:
    """With as many connections as calls; the limit of all calls comes before its own."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    wait_s = limit_s + 60.0
    return httpx.AsyncClient(base_url=server.url, timeout=wait_s, limits=limits, trust_env=False)


def behind(server: Server, request: WorkloadRequest, answer: list[int]) -> float:
    """Returns how far the log probability of a token of the answer is behind the best one's at
    most, where the server computes the whole text at once. A lost or repeated token is far
    behind. Raises httpx.HTTPError."""
    prompt = request.prompt_token_ids
    body = {"model": MODEL, "prompt": [*prompt, *answer], "max_tokens": 1, "prompt_logprobs": 1}
    url = f"{server.url}/completions"
    answered = httpx.post(url, json=body, timeout=_JUDGE_S, trust_env=False).raise_for_status()
    most, entries = 0.0, answered.json()["choices"][0]["prompt_logprobs"]
    for token_id, found in zip(answer, entries[len(prompt) :], strict=True):
        best = max(entry["logprob"] for entry in found.values())
        most = max(most, best - found[str(token_id)]["logprob"])
    return most


def _kill(pid: int) -> None:
    """Kills the worker below this process, and all that is below it. Raises RuntimeError."""
    found: list[int] = []
    for child in below(pid):
        with contextlib.suppress(OSError):  # it has ended
            if part_of(child) == "worker's supervisor":
                found += below(child)
    if not found:
        raise RuntimeError("there is no worker to kill")
    kill_all(found)


def _reasons(run: LoadRun) -> str:
    found = sorted({call.reason for call in run.calls if call.reason})
    return f" ({', '.join(found)})" if found else ""


@contextlib.contextmanager
def utilisation() -> Iterator[list[tuple[float, float]]]:
    """Samples Unix time and percent by nvidia-smi; empty without it. Complete at exit."""
    samples: list[tuple[float, float]] = []
    query = [
        "nvidia-smi",
        "--query-gpu=timestamp,utilization.gpu",
        "--format=csv,noheader,nounits",
        "--id=0",
    ]
    try:
        process = subprocess.Popen(  # noqa: S603  # our own arguments
            [*query, f"--loop-ms={_SAMPLE_MS}"], stdout=subprocess.PIPE, text=True
        )
    except OSError:
        yield samples
        return
    try:
        yield samples
    finally:
        process.terminate()
        try:
            output, _ = process.communicate(timeout=_SPAWN_S)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
        for line in output.splitlines():
            with contextlib.suppress(ValueError):  # half a line, or [N/A]
                at, _, used = line.partition(",")
                when = datetime.strptime(at.strip(), "%Y/%m/%d %H:%M:%S.%f")
                samples.append((when.timestamp(), float(used)))
