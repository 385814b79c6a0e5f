"""What nine hostile inputs cost a gateway and its other callers: python -m bench.closed_doors

Each is sent once, or as often as its line says, to `batchway up` on the demo model (Linux). Prints
processor time and peak memory of the gateway, how long /livez was silent, and the answers. Takes a
few minutes; --only 1 3 chooses.
"""

import argparse
import asyncio
import base64
import contextlib
import dataclasses
import os
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import redis

from bench.hostile_calls import (
    ATTACKS,
    CHAT,
    JOBS,
    Call,
    ask,
    chat,
    json_call,
    references,
    small_objects,
    stored_item,
    with_large_schema,
)
from bench.neighbours import Client
from bench.processes import (
    forget_peak,
    memory_bytes,
    own_processor_s,
    pid_of,
    running_batchway,
    running_server,
)
from bench.tables import markdown_table
from contract.api_keys import ApiKeys, KeyTerms
from contract.keys import Keys
from infra.embedded_redis import EmbeddedRedis
from infra.tables import write

SIGNER = f"whsec_{base64.b64encode(bytes(range(24))).decode()}"
_MB = 10**6
_LOOK_S = 0.02
_PATIENCE_S = 90.0
_HALF_HEADS_S = 12.0
_NUM_SILENT, _NUM_VICTIMS = 96, 5


@dataclass(frozen=True)
class Row:
    """One input, and what it did."""

    number: int
    what: str
    sent: str
    found: str


@dataclass
class Cost:
    """What the gateway spent on something."""

    processor_s: float = 0.0
    more_bytes: int = 0  # of its memory, at the peak
    silent_s: float = 0.0  # the longest time without an answer of /livez

    def __str__(self) -> str:
        return (
            f"{self.processor_s:.2f} s of processor time, +{self.more_bytes // _MB} MB at the "
            f"peak, /livez silent for {self.silent_s:.2f} s"
        )


@dataclass(frozen=True)
class Site:
    """A running `batchway up` and its Redis."""

    url: str
    up_pid: int
    redis_url: str
    folder: Path

    @property
    def pid(self) -> int:
        """Of the gateway."""
        return pid_of("gateway", self.up_pid)

    async def key(self, tenant: str, **limits: Any) -> str:
        client = redis.asyncio.Redis.from_url(self.redis_url)
        async with contextlib.aclosing(client):
            keys = ApiKeys(client, Keys("default"))
            return (await keys.create(KeyTerms(tenant=tenant, **limits)))[0]

    async def ask(self, key: str, call: Call) -> tuple[int, dict[str, Any]]:
        return await asyncio.to_thread(ask, self.url, key, call, _PATIENCE_S)

    async def cost(self, work: Awaitable[object]) -> Cost:
        """What the gateway spends until the work has ended."""
        pid, cost, ended = self.pid, Cost(), threading.Event()
        forget_peak(pid)
        before, begun_s = memory_bytes(pid), own_processor_s(pid)
        listener = asyncio.create_task(asyncio.to_thread(self._listen, cost, ended))
        try:
            await work
        finally:
            ended.set()
            await listener
        cost.processor_s = own_processor_s(pid) - begun_s
        cost.more_bytes = memory_bytes(pid, "VmHWM") - before
        return cost

    def _listen(self, cost: Cost, ended: threading.Event) -> None:
        while not ended.wait(_LOOK_S):
            begun_s = time.monotonic()
            ask(self.url, "", Call("/livez", method="GET", headers={}), _PATIENCE_S)
            cost.silent_s = max(cost.silent_s, time.monotonic() - begun_s)

    async def costs(self, number: int, what: str, key: str, call: Call) -> Row:
        """The row of one call."""
        answers: list[tuple[int, dict[str, Any]]] = []

        async def send() -> None:
            answers.append(await self.ask(key, call))

        cost = await self.cost(send())
        return Row(number, what, f"{len(call.body):,} bytes", f"{answers[0][0]}; {cost}")


async def bodies_without_a_key(site: Site) -> list[Row]:
    call = small_objects("/console/session")
    return [await site.costs(1, "4 MiB of empty objects to the login, without a key", "", call)]


async def wrong_values(site: Site) -> list[Row]:
    key = await site.key("wrong")
    names = ("include", "metadata", "logit_bias", "a name of 4 MB", "many names")
    return [await site.costs(2, name, key, ATTACKS[name].calls(0)[0]) for name in names]


async def multiplied_references(site: Site) -> list[Row]:
    key, rows = await site.key("references"), []
    item = await asyncio.to_thread(stored_item, site.url, key)
    if not item:
        return [Row(3, "an item of 1 MB", "1 MB", "cannot be stored")]
    for num in (100, 800):
        call = references(num).about(item)
        rows.append(await site.costs(3, f"{num} references to an item of 1 MB", key, call))
    return rows


async def caches_of_grammars(site: Site, num_schemas: int) -> list[Row]:
    """Memory that stays after distinct schemas, each as large as a body allows."""
    rows = []
    for is_accepted in (True, False):
        statuses: Counter[int] = Counter()
        key, before = await site.key("schemas"), memory_bytes(site.pid)
        engine_pid = pid_of("engine", site.up_pid)
        engine = memory_bytes(engine_pid)
        for number in range(num_schemas):
            call = with_large_schema(number, is_accepted=is_accepted)
            statuses[(await site.ask(key, call))[0]] += 1
        await asyncio.sleep(11.0)  # free memory goes back to the system every 10 s
        more = memory_bytes(site.pid) - before
        kind = "accepted" if is_accepted else "refused"
        found = (
            f"{_counted(statuses)}; +{more // _MB} MB stay, {more / num_schemas / _MB:.1f} each; "
            f"engine +{(memory_bytes(engine_pid) - engine) // _MB} MB"
        )
        rows.append(Row(4, f"distinct schemas, {kind}", f"{num_schemas} × 4 MB", found))
    return rows


async def silent_receivers(site: Site) -> list[Row]:
    """A tenant's callbacks go to servers that do not answer; another tenant's should not wait."""
    slow, quick = await site.key("slow"), await site.key("quick")
    with _receiver() as alone:
        before_s = [await _callback_s(site, quick, *alone) for _ in range(_NUM_VICTIMS)]
        listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(_NUM_SILENT)]
        try:
            for listener in listeners:
                job = _job_with_callback(f"http://127.0.0.1:{listener.getsockname()[1]}/")
                await site.ask(slow, json_call(JOBS, job))
            beside_s = [await _callback_s(site, quick, *alone) for _ in range(_NUM_VICTIMS)]
        finally:
            for listener in listeners:
                listener.close()
    found = f"another tenant's callback: {max(before_s):.1f} s before, {max(beside_s):.1f} s beside"
    return [Row(5, "silent servers of one tenant", f"{_NUM_SILENT} callbacks", found)]


async def own_estimates(site: Site) -> list[Row]:
    rows = []
    for limit, most in (("concurrent_tokens", 2000), ("tokens_per_minute", 2000)):
        key = await site.key(f"estimates-{limit}", **{limit: most})
        body = chat("Hi", max_tokens=1500, ignore_eos=True, expected_output_tokens=1, stop=["\0"])
        statuses: Counter[int] = Counter()
        for _ in range(12):
            status, _ = await site.ask(key, json_call(JOBS, {"endpoint": CHAT, "body": body}))
            statuses[status] += 1
        what = f"jobs of 1,500 tokens that expect 1, with {limit.replace('_', ' ')} of {most}"
        rows.append(Row(6, what, "12 jobs", _counted(statuses)))
    return rows


async def foreign_origins(site: Site) -> list[Row]:
    """Before there is a key: what a page of another site may do to a gateway on loopback."""
    rows = []
    form = '--x\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--x\r\n'
    form += 'content-disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n{}\r\n--x--\r\n'
    kinds = {"/v1/files": {"content-type": "multipart/form-data; boundary=x"}}
    kinds |= {"/v1/batches/batch_0/cancel": {}, "/v1/uploads/upload_0/cancel": {}}
    for path, headers in kinds.items():
        foreign = {"origin": "https://evil.example", "sec-fetch-site": "cross-site"}
        call = Call(path, form.encode() if headers else b"", headers={**headers, **foreign})
        status, answer = await site.ask("", call)
        code = answer.get("error", {}).get("code", "stored")
        rows.append(Row(7, f"{path} from https://evil.example", "a form", f"{status} {code}"))
    return rows


async def unsigned_callbacks(site: Site) -> list[Row]:
    """A second gateway has the installation's secret, the process that delivers has none."""
    command = [sys.executable, "-m", "infra", "gateway", f"--port={(port := _free_port())}"]
    command += [f"--redis-url={site.redis_url}", f"--object-store={site.folder}/objects"]
    environment = {"BATCHWAY_CALLBACK_SECRETS": f"default={SIGNER}"}
    log = site.folder / "second-gateway"
    key = await site.key("default")
    gateway = running_server(command, log, "(listening on)", 60.0, environment)
    with _receiver() as (url, arrivals), gateway:
        body = {"endpoint": CHAT, "body": chat("Hi"), "callback": {"url": url}}
        status, answer = await asyncio.to_thread(
            ask, f"http://127.0.0.1:{port}", key, json_call(JOBS, body), _PATIENCE_S
        )
        arrived = await asyncio.to_thread(_until, lambda: arrivals.get(""), 10.0)
    if status != 202:
        found = f"{status} {answer.get('error', {}).get('code')}"
    elif arrived is None:
        found = "202; nothing was delivered within 10 s"
    else:
        has = "signed" if "webhook-signature" in arrived[1] else "NOT SIGNED"
        found = f"202; delivered, {has}: {', '.join(sorted(arrived[1]))}"
    return [Row(8, "a callback whose deliverer lacks the secret", "a job", found)]


async def half_heads(site: Site) -> list[Row]:
    victim = Client(site.url, await site.key("victim"))
    alone_s = [await _first_token_s(victim) for _ in range(20)]
    command = (sys.executable, "-m", "bench.hostile_calls", "half heads", "16", "1", site.url, "-")
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    await process.stdout.readline()
    end_s, beside_s = time.monotonic() + _HALF_HEADS_S, list[float]()
    while time.monotonic() < end_s:
        beside_s.append(await _first_token_s(victim))
    process.terminate()
    sent = (await process.stdout.read()).decode().strip()
    await process.wait()
    await victim.http.aclose()
    found = f"first token: at most {max(alone_s):.2f} s alone, {max(beside_s):.2f} s beside"
    found += f" ({len(beside_s)} calls)"
    return [Row(9, f"half heads for {_HALF_HEADS_S:.0f} s", sent, found)]


async def _first_token_s(victim: Client) -> float:
    """Counts a call that fails as 30 s, its time limit."""
    return await victim.ttft_s(chat("Hi")) or 30.0


def _counted(statuses: Counter[int]) -> str:
    return ", ".join(f"{number} × {status}" for status, number in sorted(statuses.items()))


def _job_with_callback(url: str) -> dict[str, Any]:
    body = chat("Hi", max_tokens=1)
    return {"endpoint": CHAT, "body": body, "callback": {"url": url, "secret": SIGNER}}


Arrivals = dict[str, tuple[float, dict[str, str]]]  # path's end -> when, and the headers


async def _callback_s(site: Site, key: str, url: str, arrivals: Arrivals) -> float:
    """From the submission of a short job to the arrival of its callback."""
    name, begun_s = f"{time.monotonic_ns()}", time.monotonic()
    await site.ask(key, json_call(JOBS, _job_with_callback(url + name)))
    arrived = await asyncio.to_thread(_until, lambda: arrivals.get(name), _PATIENCE_S)
    return (arrived[0] if arrived else time.monotonic()) - begun_s


def _until(look: Callable[[], Any], limit_s: float) -> Any:
    """What is seen, or None after the time limit."""
    end_s = time.monotonic() + limit_s
    while (found := look()) is None and time.monotonic() < end_s:
        time.sleep(_LOOK_S)
    return found


@contextlib.contextmanager
def _receiver() -> Iterator[tuple[str, Arrivals]]:
    """A server that accepts callbacks: its URL, and what arrived."""
    arrivals: Arrivals = {}

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            arrivals[self.path[1:]] = time.monotonic(), dict(self.headers)
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/", arrivals
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


async def _run(site: Site, options: argparse.Namespace) -> list[Row]:
    """First what needs a gateway without keys: the others make some."""
    measures: dict[int, Callable[[Site], Awaitable[list[Row]]]] = {
        7: foreign_origins,
        1: bodies_without_a_key,
        2: wrong_values,
        3: multiplied_references,
        4: lambda site: caches_of_grammars(site, options.schemas),
        5: silent_receivers,
        6: own_estimates,
        8: unsigned_callbacks,
        9: half_heads,
    }
    rows = []
    for number, measure in measures.items():
        if number in options.only:
            if number != 7:
                await site.key("first")  # from now on a gateway asks for keys
            for row in await measure(site):
                rows.append(row)
                print(*dataclasses.astuple(row), sep=" | ", file=sys.stderr, flush=True)
    return sorted(rows, key=lambda row: row.number)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.closed_doors", description=__doc__)
    parser.add_argument("--only", nargs="+", type=int, default=list(range(1, 10)), metavar="N")
    parser.add_argument("--schemas", type=int, default=256, help="distinct ones, of each kind")
    parser.add_argument("--json", metavar="FILE", help="also write the figures; -: print them")
    options = parser.parse_args(argv)
    os.environ["BATCHWAY_CALLBACK_ALLOW"] = "127.0.0.1"
    with tempfile.TemporaryDirectory() as temp, EmbeddedRedis() as server:
        arguments = [f"--redis-url={server.url}", f"--object-store={temp}/objects", "--threads=1"]
        with running_batchway(arguments) as running:
            site = Site(running.url, running.pid, server.url, Path(temp))
            rows = asyncio.run(_run(site, options))
    head = ("fault", "input", "sent", "found")
    shown = [(f"{row.number}", row.what, row.sent, row.found) for row in rows]
    write([dataclasses.asdict(row) for row in rows], markdown_table([head, *shown]), options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
