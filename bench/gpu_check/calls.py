"""The same requests to any server over HTTP: loads, and a worker that dies in mid-stream."""

import asyncio
import contextlib
import json
import multiprocessing
import random
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
from tokenizers import Tokenizer

from bench.gpu_check.record import Finding, NotAvailable
from bench.processes import Server, below, end_with_parent, kill_all, part_of, started
from infra.measure.load import Load, LoadClient, LoadRun, Outcome, run_load
from infra.measure.workloads import Workload, WorkloadRequest
from infra.tables import percentile

MODEL = "m"
_SAMPLE_MS = 200
_STREAMS_EACH, _SPAWN_S = 64, 60.0  # of each process that calls
_NUM_JUDGED, _JUDGE_S = 4, 60.0  # streams, seconds of each
_REASON_CHARS = 300
# A token that the model did not choose is behind by some deviations, each 1 in a model of ours.
# In bfloat16 a chosen one is behind by a tenth at most: another batch adds in another order.
MOST_BEHIND = 0.5


def measure(
    server: Server, workload: Workload, limit_s: float, schema: dict[str, Any] | None = None
) -> tuple[LoadRun, dict[str, Any]]:
    """Sends all requests at once; with a schema, their outputs follow it. `utilisation`: the GPU's
    in percent while all streams decode. Raises RuntimeError if a call fails, TimeoutError."""
    with utilisation() as samples:
        run, began_s = _send(server, workload, limit_s, schema)
    run.raise_failures()
    first_s = began_s + max(call.chunk_times_s[0] for call in run.calls)
    last_s = began_s + min(call.chunk_times_s[-1] for call in run.calls)
    found = {
        "tokens_per_s": sum(call.num_output_tokens for call in run.calls) / run.wall_s,
        "wall_s": run.wall_s,
        "first_token_s": percentile([call.ttft_from_sending_s or 0.0 for call in run.calls], 0.5),
        "per_token_s": percentile([call.mean_itl_s or 0.0 for call in run.calls], 0.5),
        "utilisation": [used for at_s, used in samples if first_s <= at_s <= last_s],
    }
    return run, found


@dataclass(frozen=True, slots=True)
class _Caller(LoadClient):
    """Sends fields beside those of a LoadClient."""

    fields: Mapping[str, Any] = field(default_factory=dict)

    def request_of(self, request: WorkloadRequest) -> tuple[str, dict[str, Any]]:
        path, body = LoadClient.request_of(self, request)
        return path, {**body, **self.fields}


def structured(schema: dict[str, Any] | None) -> dict[str, Any]:
    """The fields of a call whose output follows a schema; none without one."""
    if schema is None:
        return {}
    format_ = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return {"response_format": format_, "ignore_eos": False}


def check_available(server: Server, path: str, body: dict[str, Any]) -> None:
    """Sends one call. Raises NotAvailable with the server's words if it refuses it."""
    url = f"{server.url}/v1/{path}"
    found = httpx.post(url, json={"model": MODEL, **body}, timeout=_JUDGE_S, trust_env=False)
    if found.status_code != 200:
        raise NotAvailable(f"{found.status_code}: {found.text[:_REASON_CHARS]}")


def is_list_of_booleans(folder: Path, token_ids: Sequence[int]) -> bool:
    """Whether the text of these tokens is JSON's, of a list of booleans. `folder`: the model's."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    try:
        found = json.loads(tokenizer.decode(list(token_ids), skip_special_tokens=True))
    except ValueError:
        return False
    return isinstance(found, list) and all(isinstance(each, bool) for each in found)


def embed(server: Server, inputs: Sequence[Sequence[int]], each: int) -> dict[str, Any]:
    """Asks for vectors of all inputs, `each` in a call, all calls at once. Raises httpx.HTTPError,
    RuntimeError."""
    parts = [inputs[i : i + each] for i in range(0, len(inputs), each)]

    async def send() -> list[httpx.Response]:
        async with server.client(_JUDGE_S) as client:
            bodies = [{"model": MODEL, "input": [*map(list, part)]} for part in parts]
            return await asyncio.gather(*(client.post("embeddings", json=b) for b in bodies))

    begun_s = time.monotonic()
    answers = asyncio.run(send())
    took_s = time.monotonic() - begun_s
    counts = [len(answer.raise_for_status().json()["data"]) for answer in answers]
    if counts != [len(part) for part in parts]:
        raise RuntimeError("an input has no vector")
    num_tokens = sum(map(len, inputs))
    return {"inputs_per_s": len(inputs) / took_s, "tokens_per_s": num_tokens / took_s}


def _send(
    server: Server, workload: Workload, limit_s: float, schema: dict[str, Any] | None = None
) -> tuple[LoadRun, float]:
    """Sends all requests at once; returns also when, as Unix time. Many streams go by several
    processes: one does not read tokens as fast as a GPU makes them. Raises TimeoutError,
    RuntimeError."""
    requests, context = workload.requests, multiprocessing.get_context("spawn")
    parts = [requests[i : i + _STREAMS_EACH] for i in range(0, len(requests), _STREAMS_EACH)]
    together = context.Barrier(len(parts), timeout=_SPAWN_S)
    with ProcessPoolExecutor(len(parts), context, _meet, (together,)) as pool:
        sent = [pool.submit(_send_part, server, Workload(part), limit_s, schema) for part in parts]
        try:
            runs, began_s = zip(*(each.result() for each in sent), strict=True)
        except BaseException:  # also SystemExit: nobody waits for the other calls
            for process in multiprocessing.active_children():
                process.kill()
            raise
    load = Load(workload, False, max_concurrency=len(requests))
    calls = tuple(call for run in runs for call in run.calls)
    return LoadRun(load, calls, max(run.wall_s for run in runs)), min(began_s)


def _meet(together: threading.Barrier) -> None:
    """Starts a process that calls: waits until all of them have started."""
    end_with_parent()
    together.wait()


def _send_part(
    server: Server, workload: Workload, limit_s: float, schema: dict[str, Any] | None
) -> tuple[LoadRun, float]:
    async def send() -> LoadRun:
        load = Load(workload, False, max_concurrency=len(workload.requests))
        async with asyncio.timeout(limit_s), server.client(limit_s + 60.0) as client:
            return await run_load(_Caller(client, MODEL, fields=structured(schema)), load)

    began_s = time.time()
    return asyncio.run(send()), began_s


def kill_worker(server: Server, calm: LoadRun, limit_s: float) -> tuple[Finding, dict[str, Any]]:
    """Sends the requests of `calm` again, and kills the worker with its engine while they stream;
    another worker goes on with them. Raises TimeoutError."""
    after_s = random.Random(7).uniform(0.1, 0.4) * calm.wall_s
    run, killed_s = asyncio.run(_send_and_kill(server, calm.load, after_s, limit_s))
    answers = [call.token_ids for call in run.calls]
    asked = list(zip(calm.load.workload.requests, answers, strict=True))
    most, judged = 0.0, "not compared with the model's own choices: "
    try:
        most = max(behind(server, *pair) for pair in asked[:_NUM_JUDGED])
        judged = f"no token is behind the model's own choice by more than {most:.3f}"
    except httpx.HTTPError as exc:
        judged += repr(exc)
    found: dict[str, Any] = {
        "streams": len(answers),
        "killed_s": killed_s,
        "running": sum(call.end_s > killed_s for call in run.calls),
        "ended": sum(call.outcome is Outcome.SUCCEEDED for call in run.calls),
        "whole": sum(len(answer) == request.max_tokens for request, answer in asked),
        "same": sum(a.token_ids == b for a, b in zip(calm.calls, answers, strict=True)),
        "longest_gap_s": max((max(call.itls_s) for call in run.calls if call.itls_s), default=0.0),
    }
    is_whole = found["ended"] == found["whole"] == found["streams"] and found["running"] > 0
    detail = (
        "{ended} of {streams} streams ended, {whole} with as many tokens as asked for, {same} with "
        "those of an undisturbed run; {running} were running at the kill after {killed_s:.1f} s; "
        "longest gap {longest_gap_s:.1f} s"
    ).format(**found)
    reasons = ", ".join(sorted({call.reason for call in run.calls if call.reason}))
    detail = "; ".join(filter(None, [detail, judged, reasons]))
    return Finding(is_whole and most <= MOST_BEHIND, detail), found


async def _send_and_kill(
    server: Server, load: Load, after_s: float, limit_s: float
) -> tuple[LoadRun, float]:
    """Returns also when the worker was dead, in seconds from the start. Raises RuntimeError."""
    pids = _worker_pids(server.pid)  # before, as that takes a while on a busy machine

    async def kill() -> float:
        begun_s = time.monotonic()
        await asyncio.sleep(after_s)
        await asyncio.to_thread(kill_all, pids)
        return time.monotonic() - begun_s

    async with asyncio.timeout(limit_s), server.client(limit_s + 60.0) as client:
        return await asyncio.gather(run_load(LoadClient(client, MODEL), load), kill())


def _worker_pids(pid: int) -> list[int]:
    """The worker below this process, and all that is below it. Raises RuntimeError."""
    found: list[int] = []
    for child in below(pid):
        with contextlib.suppress(OSError):  # it has ended
            if part_of(child) == "worker's supervisor":
                found += below(child)
    if not found:
        raise RuntimeError("there is no worker to kill")
    return found


def behind(server: Server, request: WorkloadRequest, answer: list[int]) -> float:
    """Returns how far the log probability of a token of the answer is behind the best one's at
    most, where the server computes the whole text at once. A lost or repeated token is far
    behind. Raises httpx.HTTPError."""
    prompt = request.prompt_token_ids
    body = {"model": MODEL, "prompt": [*prompt, *answer], "max_tokens": 1, "prompt_logprobs": 1}
    url = f"{server.url}/v1/completions"
    answered = httpx.post(url, json=body, timeout=_JUDGE_S, trust_env=False).raise_for_status()
    most, entries = 0.0, answered.json()["choices"][0]["prompt_logprobs"]
    for token_id, found in zip(answer, entries[len(prompt) :], strict=True):
        best = max(entry["logprob"] for entry in found.values())
        most = max(most, best - found[str(token_id)]["logprob"])
    return most


@contextlib.contextmanager
def utilisation() -> Iterator[list[tuple[float, float]]]:
    """Samples Unix time and percent by nvidia-smi; empty without it. Complete at exit."""
    samples: list[tuple[float, float]] = []
    if (program := shutil.which("nvidia-smi")) is None:
        yield samples
        return
    query = ["--query-gpu=timestamp,utilization.gpu", "--format=csv,noheader,nounits", "--id=0"]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "samples"
        with started([program, *query, f"--loop-ms={_SAMPLE_MS}"], log):
            yield samples
        for line in log.read_text().splitlines():
            with contextlib.suppress(ValueError):  # half a line, or [N/A]
                at, _, used = line.partition(",")
                when = datetime.strptime(at.strip(), "%Y/%m/%d %H:%M:%S.%f")
                samples.append((when.timestamp(), float(used)))
