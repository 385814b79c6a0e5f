"""What a tenant's first tokens take beside another tenant's attack: python -m bench.neighbours

Serves the demo model and a reranker (Linux). Each attack is sent over some connections by a process
of the lowest priority, as a new tenant; most have 20 requests a minute. A victim makes plain and
structured calls one after another, and a third tenant reads a stream whose gaps are measured.
Before each attack a turn alone is measured. All attacks take 20 to 25 minutes; a few minutes:
--seconds 2 --connections 16.

What must hold in each turn: the victim's medians are at most twice those alone; its p99 at most
three times, and 50 ms; none of its calls fails; the gateway's own memory stays below 350 MB and is
back within 30 s, at most 50 MB over that of the start; a child's stays below 256 MiB. A number that
breaks one of these is named in the last column.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import redis.asyncio

from bench.hostile_calls import ATTACKS, CHAT, RERANKER, chat, slow_schema, structured
from bench.processes import child_peaks, forget_peak, memory_bytes, pid_of, running_batchway
from bench.tables import markdown_table
from contract.api_keys import ApiKeys, KeyTerms
from contract.keys import Keys
from infra.embedded_redis import EmbeddedRedis
from infra.measure.load import Call as ServedCall
from infra.measure.load import Outcome, exchange
from infra.tables import percentile, write

BATCHES = "three batches of slow schemas"
_BATCH_LINES = 300
_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
_MIN_CALLS = 100  # of each kind, so that there is a p99
_LONGEST = 3.0  # times --seconds, in which they are made
_CALL_S = 30.0  # after which a call of the victim has failed
_FAST_S, _MIN_FAST = 0.1, 10
_LOOK_S = 0.2
_MB = 10**6
_MOST_BYTES, _MOST_CHILD_BYTES = 350 * _MB, 256 * 2**20
_BACK_BYTES, _BACK_S = 50 * _MB, 30.0
_HEAD = (
    *("attack", "connections", "calls", "plain p50 (alone), ms", "p99 (alone)"),
    *("structured p50 (alone)", "p99 (alone)", "gaps p99 (alone)", "victim's failures"),
    *("gateway MB: before, peak, after", "a child's peak", "attacker's answers", "exceeded"),
)


@dataclass
class Memory:
    """The gateway's, in bytes: before a turn, at most, and after it, when it is back or has not
    come back in time; and the largest of its children's."""

    before: int = 0
    peak: int = 0
    after: int = 0
    back_s: float = 0.0
    child: int = 0


@dataclass
class Turn:
    """The figures of one turn, in seconds."""

    attack: str  # "": alone
    num_connections: int = 0
    rate_per_s: int = 0
    plain_s: list[float] = field(default_factory=list)
    structured_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    num_failed: int = 0  # of the victim
    attacks: dict[str, int] = field(default_factory=dict)  # by status
    memory: Memory = field(default_factory=Memory)

    def row(self, alone: "Turn", first_bytes: int) -> list[str]:
        pairs = (
            *((self.plain_s, alone.plain_s, share) for share in (0.5, 0.99)),
            *((self.structured_s, alone.structured_s, share) for share in (0.5, 0.99)),
            (self.gaps_s, alone.gaps_s, 0.99),
        )
        memory = self.memory
        after = f"{memory.after // _MB} ({memory.back_s:.0f} s)"
        return [
            self.attack,
            f"{self.num_connections or ''}",
            f"{len(self.plain_s)}",
            *(f"{_ms(own, share)} ({_ms(other, share)})" for own, other, share in pairs),
            f"{self.num_failed}",
            f"{memory.before // _MB}, {memory.peak // _MB}, {after}",
            f"{memory.child // _MB}",
            ", ".join(f"{n} × {status}" for status, n in sorted(self.attacks.items())),
            "; ".join(self.exceeded(alone, first_bytes)) or "ok",
        ]

    def exceeded(self, alone: "Turn", first_bytes: int) -> list[str]:
        """What does not hold, with its number. `first_bytes`: the gateway's memory at the start."""
        found = []
        kinds = {"plain": (self.plain_s, alone.plain_s)}
        kinds["structured"] = (self.structured_s, alone.structured_s)
        for kind, (own, other) in kinds.items():
            for share, most in ((0.5, 2.0), (0.99, 3.0)):
                own_s, alone_s = percentile(own, share), percentile(other, share)
                if own_s is None or alone_s is None:
                    found.append(f"{kind}: no call")
                elif own_s > most * alone_s:
                    found.append(f"{kind} p{100 * share:.0f} {own_s / alone_s:.1f} times")
                if share == 0.99 and own_s is not None and own_s > 0.05:
                    found.append(f"{kind} p99 over 50 ms")
        if self.num_failed:
            found.append(f"{self.num_failed} failures")
        if self.memory.peak > _MOST_BYTES:
            found.append(f"gateway {self.memory.peak // _MB} MB")
        if self.memory.after > first_bytes + _BACK_BYTES:
            found.append(f"still {self.memory.after // _MB} MB")
        if self.memory.child > _MOST_CHILD_BYTES:
            found.append(f"child {self.memory.child // _MB} MB")
        return found


def _ms(values: list[float], share: float) -> str:
    found = percentile(values, share)
    return "-" if found is None else f"{1000 * found:.1f}"


class Client:
    """One tenant's calls."""

    def __init__(self, url: str, key: str, num_connections: int = 4) -> None:
        limits = httpx.Limits(max_connections=num_connections)
        headers = {"authorization": f"Bearer {key}"}
        self.url, self.key = url, key
        self.http = httpx.AsyncClient(
            base_url=url, headers=headers, limits=limits, timeout=_CALL_S, trust_env=False
        )

    async def ttft_s(self, body: dict[str, Any]) -> float | None:
        """Returns the seconds until the first event of a stream with output; None if refused, or
        without an answer in time."""
        call = ServedCall(0, 0, 0.0)
        await exchange(self.http, call, CHAT, {**body, "stream": True})
        return call.ttft_from_sending_s if call.outcome is Outcome.SUCCEEDED else None

    async def gaps(self, found: list[float]) -> None:
        """Records the gaps of streams, one after another, until cancelled."""
        while True:
            call = ServedCall(0, 0, 0.0)
            body = chat("Count to 200.", max_tokens=400, ignore_eos=True, stream=True)
            try:
                await exchange(self.http, call, CHAT, body)
            finally:
                found += call.itls_s
                if call.chunk_times_s:  # the gap that is still open
                    found.append(time.monotonic() - call.chunk_times_s[-1])
            if call.outcome is not Outcome.SUCCEEDED:
                await asyncio.sleep(_LOOK_S)


async def measure(turn: Turn, clients: dict[str, Client], seconds: float, pid: int) -> Turn:
    """`pid`: of the gateway."""
    forget_peak(pid)
    turn.memory.before = memory_bytes(pid)
    started = asyncio.Event()
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(_background(_watch_children(turn.memory, pid)))
        await stack.enter_async_context(_background(clients["reader"].gaps(turn.gaps_s)))
        if turn.attack:
            await stack.enter_async_context(
                _background(_attack(turn, clients["attacker"], started))
            )
            await started.wait()
        await _call(turn, clients["victim"], seconds)
    turn.memory.peak = memory_bytes(pid, "VmHWM")
    turn.memory.after = memory_bytes(pid)
    return turn


async def _call(turn: Turn, victim: Client, seconds: float) -> None:
    """The victim's calls, one after another."""
    begun_s = time.monotonic()
    for number in itertools.count():
        passed_s = time.monotonic() - begun_s
        has_enough = min(len(turn.plain_s), len(turn.structured_s)) >= _MIN_CALLS
        if passed_s > (seconds if has_enough else _LONGEST * seconds):
            return
        title = f"{turn.attack}{turn.num_connections}{turn.rate_per_s}{number}{begun_s}"
        calls = (
            (turn.plain_s, chat(f"What is {number} + 2?")),
            (
                turn.structured_s,
                chat("Hi", response_format=structured({**_SCHEMA, "title": title})),
            ),
        )
        for found, body in calls:
            first_s = await victim.ttft_s(body)
            if first_s is None:
                turn.num_failed += 1
            else:
                found.append(first_s)


async def _watch_children(memory: Memory, pid: int) -> None:
    while True:
        memory.child = max([memory.child, *child_peaks(pid)])
        await asyncio.sleep(_LOOK_S)


async def _come_back(memory: Memory, pid: int, first_bytes: int) -> None:
    """Waits until the gateway has given back its memory, or has had the time to."""
    ended_s = time.monotonic()
    while memory.after > first_bytes + _BACK_BYTES and memory.back_s < _BACK_S:
        await asyncio.sleep(_LOOK_S)
        memory.back_s = time.monotonic() - ended_s
        memory.after = memory_bytes(pid)


async def _settle(victim: Client) -> None:
    """Waits until what an attack left behind is done, or for a while: calls are fast again."""
    end_s, num_fast = time.monotonic() + _BACK_S, 0
    while num_fast < _MIN_FAST and time.monotonic() < end_s:
        first_s = await victim.ttft_s(chat("Hi"))
        num_fast = num_fast + 1 if first_s is not None and first_s < _FAST_S else 0


@contextlib.asynccontextmanager
async def _background(work: Any) -> AsyncIterator[None]:
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _attack(turn: Turn, client: Client, started: asyncio.Event) -> None:
    """Attacks until cancelled, by its own process, which must not delay what is measured here."""
    if turn.attack == BATCHES:
        await _run_batches(client, started)
        return
    options = [turn.attack, f"{turn.num_connections}", f"{turn.rate_per_s}", client.url, client.key]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.hostile_calls", *options),
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    await process.stdout.readline()
    started.set()
    try:
        await process.wait()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        turn.attacks = json.loads(await process.stdout.read() or "{}")
        await process.wait()


async def _run_batches(client: Client, started: asyncio.Event) -> None:
    """Runs three batches at once; they are cancelled with this task."""
    batch_ids = []
    for number in range(3):
        lines = []
        for line in range(_BATCH_LINES):
            body = chat("Hi", response_format=structured(slow_schema(_BATCH_LINES * number + line)))
            lines.append(
                json.dumps({"custom_id": f"{line}", "method": "POST", "url": CHAT, "body": body})
            )
        form: Any = {"file": ("in.jsonl", "\n".join(lines).encode()), "purpose": (None, "batch")}
        file_id = (await client.http.post("/v1/files", files=form)).raise_for_status().json()["id"]
        batch = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
        made = await client.http.post("/v1/batches", json=batch)
        batch_ids.append(made.raise_for_status().json()["id"])
    started.set()
    try:
        await asyncio.Event().wait()
    finally:
        for batch_id in batch_ids:
            await client.http.post(f"/v1/batches/{batch_id}/cancel")


def make_reranker(folder: Path) -> Path:
    """Writes a reranker of random weights."""
    from transformers import BertConfig, BertForSequenceClassification

    from bench.models import save_tokenizer

    shape: dict[str, Any] = {
        "vocab_size": 300,
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "max_position_embeddings": 2048,
        "num_labels": 1,
    }
    config = BertConfig(**shape)
    BertForSequenceClassification(config).save_pretrained(folder)
    save_tokenizer(folder, config.vocab_size, has_pairs=True)
    return folder


Pair = tuple[Turn, Turn]  # alone, and beside the attack


async def _run(
    url: str, redis_url: str, pid: int, options: argparse.Namespace
) -> tuple[list[Pair], int]:
    """The turns, and the gateway's memory before the first one. `pid`: of the gateway."""
    client = redis.asyncio.Redis.from_url(redis_url)
    keys = ApiKeys(client, Keys("default"))

    async def new_client(tenant: str, limit: int = 0) -> Client:
        key, _ = await keys.create(KeyTerms(tenant=tenant, requests_per_minute=limit))
        return Client(url, key)

    clients = {tenant: await new_client(tenant) for tenant in ("victim", "reader")}
    await measure(Turn(""), clients, options.seconds, pid)  # warms up
    first_bytes, pairs = memory_bytes(pid), list[Pair]()
    for attack in options.attacks:
        await _settle(clients["victim"])
        alone = await measure(Turn(""), clients, options.seconds, pid)
        # The batches' owner has no limit: else its lines would wait for their minute.
        limit = 0 if attack == BATCHES else ATTACKS[attack].requests_per_minute
        for num in [1] if attack == BATCHES else options.connections:
            attacker = await new_client(f"attacker{len(pairs)}", limit)
            turn = Turn(attack, num, options.rate)
            await measure(turn, {**clients, "attacker": attacker}, options.seconds, pid)
            await _come_back(turn.memory, pid, first_bytes)
            pairs.append((alone, turn))
            print(" | ".join(turn.row(alone, first_bytes)), file=sys.stderr, flush=True)
            await attacker.http.aclose()
    for each in clients.values():
        await each.http.aclose()
    await client.aclose()
    return pairs, first_bytes


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="bench.neighbours",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    *others, half_heads = ATTACKS
    names = [*others, BATCHES, half_heads]
    parser.add_argument("--attacks", nargs="+", default=names, choices=names, metavar="NAME")
    parser.add_argument("--connections", nargs="+", type=int, default=[4, 16, 120])
    parser.add_argument("--rate", type=int, default=200, help="calls a second, in all")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each turn, at least")
    parser.add_argument("--json", metavar="FILE", help="also write the figures; -: print them")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as temp, EmbeddedRedis() as server:
        folder = make_reranker(Path(temp) / RERANKER)
        models = [
            {"model": "demo", "served_model_name": "demo", "threads": 1},
            {"model": str(folder), "served_model_name": RERANKER, "threads": 1},
        ]
        fleet = Path(temp) / "fleet.yaml"
        fleet.write_text(json.dumps({"models": models}))  # YAML too
        arguments = [
            f"--fleet={fleet}",
            f"--redis-url={server.url}",
            f"--object-store={temp}/objects",
        ]
        with running_batchway(arguments) as running:
            pid = pid_of("gateway", running.pid)
            pairs, first_bytes = asyncio.run(_run(running.url, server.url, pid, options))
    rows = [list(_HEAD), *(turn.row(alone, first_bytes) for alone, turn in pairs)]
    figures = [{"alone": asdict(alone), "beside": asdict(turn)} for alone, turn in pairs]
    write(figures, markdown_table(rows), options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
