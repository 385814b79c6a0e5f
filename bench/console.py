"""Measures the console: python -m bench.console [--minutes N] [--json OUT]

50 simulated workers run 200 streams on a private Redis, a gateway serves the page, and Debian's
Chromium shows it: first paint, delay of an update, growth of the heap, processor time of the
gateway with and without the page."""

import argparse
import asyncio
import contextlib
import itertools
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from playwright.async_api import Page, async_playwright

from bench.processes import running_server
from contract.catalogue import Catalogue
from contract.codec import encode_tokenizer
from contract.connection import connect
from contract.events import ChoiceDelta, Tokens
from contract.function_types import Append, Claimed, Submission, WorkerCapacity
from contract.functions import Functions
from contract.jobs import Endpoint, FinishReason, Job, JobStatus, SamplingParams
from contract.keys import Keys, new_job_id
from contract.library import ensure_library
from contract.model_cards import ModelCard, TokenizerFiles
from infra.embedded_redis import EmbeddedRedis
from infra.tables import write

MODEL = "simulated"
_NUM_WORKERS, _PLACES = 50, 4
_STEP_S, _BEAT_S = 0.2, 2.0
_NUM_TOKENS = 150
_LANES = ("interactive", "standard", "batch")
_INFO = '{"jobs_held": 4, "num_running": 4, "num_waiting": 0, "num_blocks": 4096, "places": 4}'
_NUM_UPDATES = 20
_ALONE_S = 20.0  # the gateway without a page


class Fleet:
    """Simulated workers: each claims what it has places for, and writes a token for each job at
    each step."""

    def __init__(self, functions: Functions) -> None:
        self.functions = functions
        self._numbers = itertools.count()

    async def submit(self, tenant: str, max_tokens: int = _NUM_TOKENS) -> None:
        number = next(self._numbers)
        job = Job(
            id=new_job_id(),
            tenant=tenant,
            model=MODEL,
            lane=_LANES[number % 2 + 1],
            endpoint=Endpoint.COMPLETIONS,
            prompt_ids=(1,) * 32,
            params=SamplingParams(max_tokens=max_tokens, seed=1),
            created_s=int(time.time()),
        )
        terms = Submission(max_output_tokens=max_tokens, deadline_s=3600.0, retention_s=60.0)
        await self.functions.submit(job, terms)

    async def work(self, number: int) -> None:
        name, held = f"worker-{number}", dict[str, tuple[Claimed, int]]()
        beaten_s = -_BEAT_S
        while True:
            began_s = time.monotonic()
            if began_s - beaten_s >= _BEAT_S:
                beaten_s = began_s
                pairs = [(claimed.job.id, claimed.epoch) for claimed, _ in held.values()]
                capacity = WorkerCapacity(1000.0, 20.0, 10**6, _PLACES, _LANES, {})
                await self.functions.heartbeat(
                    name, MODEL, pairs, lease_s=10.0, info=_INFO, capacity=capacity
                )
            if len(held) < _PLACES:
                num = _PLACES - len(held)
                claimed = await self.functions.claim(
                    name, MODEL, _LANES, lease_s=10.0, max_jobs=num, max_tokens=10**6
                )
                held |= {each.job.id: (each, 0) for each in claimed}
            await self._step(name, held)
            await asyncio.sleep(max(0.0, _STEP_S - (time.monotonic() - began_s)))

    async def _step(self, name: str, held: dict[str, tuple[Claimed, int]]) -> None:
        items = []
        for job_id, (claimed, num) in list(held.items()):
            is_last = num + 1 == _NUM_TOKENS
            reason = FinishReason.LENGTH if is_last else None
            event = Tokens((ChoiceDelta(0, num, (97,), "a", reason),))
            item = Append(job_id, claimed.epoch, num + 1, event, 1)
            items.append(replace(item, fin=JobStatus.SUCCEEDED) if is_last else item)
            held[job_id] = claimed, num + 1
            if is_last:
                del held[job_id]
                await self.submit(claimed.job.tenant)
        if items:
            await self.functions.append(name, items, lease_s=10.0)


@contextlib.asynccontextmanager
async def running_fleet(redis_url: str) -> AsyncIterator[Fleet]:
    keys = Keys("default")
    async with connect(redis_url, keys) as client:
        await ensure_library(client)
        files = TokenizerFiles(tokenizer_json="{}", chat_template=None)
        card = ModelCard(
            name=MODEL,
            context_length=4096,
            vocab_size=256,
            eos_token_ids=(0,),
            tokenizer_sha256=encode_tokenizer(files)[0],
            created_s=int(time.time()),
            lanes=_LANES,
        )
        await Catalogue(client, keys).publish(card, files)
        fleet = Fleet(Functions(client, keys))
        for number in range(_NUM_WORKERS * _PLACES):
            await fleet.submit(f"tenant-{number % 8}")
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(fleet.work(number)) for number in range(_NUM_WORKERS)]
            yield fleet
            for task in tasks:
                task.cancel()


def _cpu_s(pid: int) -> float:
    words = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


async def _share(pid: int, seconds: float) -> float:
    """Of one core that the process takes."""
    before, began_s = _cpu_s(pid), time.monotonic()
    await asyncio.sleep(seconds)
    return (_cpu_s(pid) - before) / (time.monotonic() - began_s)


async def _heap_bytes(page: Page) -> float:
    session = await page.context.new_cdp_session(page)
    await session.send("HeapProfiler.collectGarbage")
    found = await session.send("Runtime.getHeapUsage")
    await session.detach()
    return float(found["usedSize"])


async def _first_paint_s(page: Page, url: str) -> float:
    await page.goto(f"{url}/console")
    await page.locator("#lanes tr").first.wait_for()
    paint = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
    return float(await page.evaluate(paint)) / 1000


async def _update_s(page: Page, fleet: Fleet, number: int) -> float:
    """From a submission by a new tenant to its row on the page."""
    began_s = time.monotonic()
    await fleet.submit(f"new-{number}")
    await page.locator("#tenants tr", has_text=f"new-{number}").first.wait_for()
    return time.monotonic() - began_s


def measure(minutes: float) -> dict[str, Any]:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    with EmbeddedRedis() as server, tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "infra", "gateway"]
        command += [f"--port={port}", f"--redis-url={server.url}"]
        with running_server(command, Path(folder) / "log", "(listening on)", 60.0) as gateway:
            url = f"http://127.0.0.1:{port}"
            return asyncio.run(_measured(url, gateway.pid, server.url, minutes))


async def _measured(url: str, pid: int, redis_url: str, minutes: float) -> dict[str, Any]:
    async with running_fleet(redis_url) as fleet, async_playwright() as playwright:
        alone = await _share(pid, _ALONE_S)
        browser = await playwright.chromium.launch(
            executable_path="/usr/bin/chromium", args=["--no-sandbox"]
        )
        page = await browser.new_page()
        paint_s = await _first_paint_s(page, url)
        updates_s = [await _update_s(page, fleet, number) for number in range(_NUM_UPDATES)]
        await page.locator("#tab-batch").click()
        heap_bytes = await _heap_bytes(page)
        watched = await _share(pid, 60 * minutes)
        grown_bytes = await _heap_bytes(page) - heap_bytes
        await browser.close()
    return {
        "first_paint_s": paint_s,
        "update_p50_s": statistics.median(updates_s),
        "update_max_s": max(updates_s),
        "minutes": minutes,
        "heap_growth_mb": grown_bytes / 1e6,
        "gateway_core_share": watched,
        "gateway_core_share_without_page": alone,
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.console", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="on the screen")
    parser.add_argument("--json", help="write the figures there")
    options = parser.parse_args()
    found = measure(options.minutes)
    text = "\n".join(f"{name}: {value:.3f}" for name, value in found.items())
    write(found, text, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
