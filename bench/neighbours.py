"""What a tenant's first tokens take beside another tenant's attack: python -m bench.neighbours

Serves the demo model and a reranker (Linux). The attacker's key has five requests a minute. Each
attack is sent over some connections at a total rate; a victim makes plain and structured calls one
after another, and a third tenant reads a stream whose gaps are measured. Turns alone stand between.
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
from transformers import BertConfig, BertForSequenceClassification

from bench.hostile_calls import ATTACKS, CHAT, RERANKER, chat, slow_schema, structured
from bench.models import save_tokenizer
from bench.processes import running_batchway
from contract.api_keys import ApiKeys, KeyTerms
from contract.keys import Keys
from infra.embedded_redis import EmbeddedRedis
from infra.tables import markdown_table, percentile, write

_BATCH_LINES = 300
_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


BATCHES = "three batches of slow schemas"


@dataclass
class Turn:
    """The figures of one turn, in seconds."""

    attack: str  # "": alone
    num_connections: int = 0
    rate_per_s: int = 0
    plain_s: list[float] = field(default_factory=list)
    structured_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    num_refused: int = 0  # of the victim
    attacks: dict[str, int] = field(default_factory=dict)  # by status

    def row(self) -> list[str]:
        shown = [
            self.attack or "alone",
            f"{self.num_connections or ''}",
            f"{self.rate_per_s or ''}",
        ]
        for values in (self.plain_s, self.structured_s, self.gaps_s):
            for share in (0.5, 0.99):
                found = percentile(values, share)
                shown.append("-" if found is None else f"{1000 * found:.1f}")
        statuses = ", ".join(f"{n} × {status}" for status, n in sorted(self.attacks.items()))
        return [*shown, f"{self.num_refused}", statuses]


class Client:
    """One tenant's calls."""

    def __init__(self, url: str, key: str, num_connections: int = 4) -> None:
        limits = httpx.Limits(max_connections=num_connections)
        headers = {"authorization": f"Bearer {key}"}
        self.url, self.key = url, key
        self.http = httpx.AsyncClient(base_url=url, headers=headers, limits=limits, timeout=120)

    async def ttft_s(self, body: dict[str, Any]) -> float | None:
        """Returns the seconds until the first event of a stream with output; None if refused."""
        sent_s = time.monotonic()
        async with self.http.stream("POST", CHAT, json={**body, "stream": True}) as answer:
            first_s = None
            async for line in answer.aiter_lines():
                if first_s is None and line.startswith("data:") and '"content"' in line:
                    first_s = time.monotonic() - sent_s
            return first_s if answer.status_code == 200 else None

    async def gaps(self, found: list[float]) -> None:
        """Records the gaps of streams, one after another, until cancelled."""
        while True:
            body = chat("Count to 200.", max_tokens=400, ignore_eos=True, stream=True)
            async with self.http.stream("POST", CHAT, json=body) as answer:
                last_s = None
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        now_s = time.monotonic()
                        if last_s is not None:
                            found.append(now_s - last_s)
                        last_s = now_s


async def measure(turn: Turn, clients: dict[str, Client], seconds: float) -> Turn:
    started = asyncio.Event()
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(_background(clients["reader"].gaps(turn.gaps_s)))
        if turn.attack:
            await stack.enter_async_context(
                _background(_attack(turn, clients["attacker"], started))
            )
            await started.wait()
            await asyncio.sleep(1.0)
        end_s = time.monotonic() + seconds
        for number in itertools.count():
            if time.monotonic() > end_s:
                return turn
            schema = {**_SCHEMA, "title": f"{turn.attack}{turn.rate_per_s}{number}"}
            calls = (
                (turn.plain_s, chat(f"What is {number} + 2?")),
                (turn.structured_s, chat("Hi", response_format=structured(schema))),
            )
            for found, body in calls:
                first_s = await clients["victim"].ttft_s(body)
                if first_s is None:
                    turn.num_refused += 1
                else:
                    found.append(first_s)
    raise AssertionError("unreachable")


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


async def _run(url: str, redis_url: str, options: argparse.Namespace) -> list[Turn]:
    client = redis.asyncio.Redis.from_url(redis_url)
    keys = ApiKeys(client, Keys("default"))
    # The batches' owner has no limit: else its lines would wait for their minute.
    owners = {"victim": 0, "reader": 0, "attacker": 5, "batcher": 0}
    clients = {}
    for tenant, limit in owners.items():
        key, _ = await keys.create(KeyTerms(tenant=tenant, requests_per_minute=limit))
        clients[tenant] = Client(url, key, num_connections=256)
    plans = [
        Turn(attack, num, rate)
        for attack in options.attacks
        for num in options.connections
        for rate in options.rates
        if attack != BATCHES
    ]
    if BATCHES in options.attacks:
        plans.append(Turn(BATCHES))
    turns = []
    await measure(Turn(""), clients, options.seconds)  # warms up
    for plan in plans:
        attacker = clients["batcher" if plan.attack == BATCHES else "attacker"]
        for turn in (Turn(""), plan):
            measured = await measure(turn, {**clients, "attacker": attacker}, options.seconds)
            turns.append(measured)
            print(" ".join(turns[-1].row()), file=sys.stderr)
    for each in clients.values():
        await each.http.aclose()
    await client.aclose()
    return turns


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.neighbours", description=__doc__)
    parser.add_argument("--attacks", nargs="+", default=[*ATTACKS, BATCHES], metavar="NAME")
    parser.add_argument("--connections", nargs="+", type=int, default=[4, 16, 120])
    parser.add_argument("--rates", nargs="+", type=int, default=[50, 200], help="a second, in all")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each turn")
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
            turns = asyncio.run(_run(running.url, server.url, options))
    head = ["attack", "connections", "calls/s", "plain p50 (ms)", "p99", "structured p50", "p99"]
    rows = [[*head, "gaps p50", "p99", "victim refused", "attacker's answers"]]
    rows += [turn.row() for turn in turns]
    write([asdict(turn) for turn in turns], markdown_table(rows), options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
