"""A process that attacks: python -m bench.hostile_calls ATTACK CONNECTIONS RATE URL KEY

Imports little, since it shares the cores with what is measured.
"""

import asyncio
import itertools
import json
import random
import signal
import sys
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

CHAT = "/v1/chat/completions"
RERANKER = "reranker"
_DOCUMENT_BYTES = 3_900_000
_NUM_REQUESTS = 64  # of an attack, in turns


def chat(text: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": "demo", "messages": messages, "max_tokens": 16, **fields}


def structured(schema: Any, name: str = "x") -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": name, "schema": schema}}


def slow_schema(number: int) -> dict[str, Any]:
    """An object that takes about a second to compile, and that nobody has compiled before."""
    chance = random.Random(number)
    letters = "abcdefghijklmnopqrstuvwxyz"
    patterns = {
        f"^{''.join(chance.choices(letters, k=6))}.*{chance.choice(letters)}$": {"type": "string"}
        for _ in range(150)
    }
    return {"type": "object", "patternProperties": patterns}


def _past_call(arguments: str) -> dict[str, Any]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    body = chat("Hi")
    body["messages"] += [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "x"},
    ]
    return body


# Name -> a function from a call's number to its path and body.
ATTACKS: dict[str, Callable[[int], tuple[str, dict[str, Any]]]] = {
    "a surrogate in arguments": lambda _: (CHAT, _past_call('{"a":"\\ud800"}')),
    "deep arguments": lambda _: (CHAT, _past_call('{"a":' + "[" * 964 + "]" * 964 + "}")),
    "slow schemas": lambda n: (CHAT, chat("Hi", response_format=structured(slow_schema(n)))),
    "quotes of slow schemas": lambda n: (
        "/v1/quote",
        {
            "endpoint": CHAT,
            "body": chat("Hi", response_format=structured(slow_schema(n))),
        },
    ),
    "long documents": lambda _: (
        "/v1/rerank",
        {"model": RERANKER, "query": "a", "documents": ["word " * (_DOCUMENT_BYTES // 5)]},
    ),
}


def main() -> None:
    """Sends calls over each connection at its part of the rate, and waits for each answer. Prints
    the numbers of answers by status once it is terminated."""
    name, num_connections, rate_per_s, url, key = sys.argv[1:]
    asyncio.run(_send(name, int(num_connections), int(rate_per_s), url, key))


async def _send(name: str, num_connections: int, rate_per_s: int, url: str, key: str) -> None:
    host, port = urlsplit(url).hostname or "", urlsplit(url).port
    statuses: dict[str, int] = {}
    requests = [_request(name, number, host, key) for number in range(_NUM_REQUESTS)]
    turns = itertools.cycle(requests)

    async def one(number: int) -> None:
        await asyncio.sleep(number / rate_per_s)  # the rate is even, not a burst of all at once
        while True:
            reader, writer = await asyncio.open_connection(host, port)
            try:
                while not reader.at_eof():  # after a refusal of a long body
                    await asked(reader, writer)
            except (OSError, asyncio.IncompleteReadError):
                statuses["closed"] = statuses.get("closed", 0) + 1
            finally:
                writer.close()

    async def asked(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        begun_s = time.monotonic()
        writer.write(next(turns))
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        status = head.split()[1]
        statuses[status] = statuses.get(status, 0) + 1
        await reader.readexactly(int(head.partition("content-length: ")[2].split()[0]))
        rest_s = num_connections / rate_per_s - (time.monotonic() - begun_s)
        await asyncio.sleep(max(0.0, rest_s))

    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    sending = [asyncio.create_task(one(number)) for number in range(num_connections)]
    print("attacking", flush=True)
    await ended.wait()
    for task in sending:
        task.cancel()
    await asyncio.gather(*sending, return_exceptions=True)
    print(json.dumps(statuses))


def _request(name: str, number: int, host: str, key: str) -> bytes:
    path, body = ATTACKS[name](number)
    raw = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: {host}\r\nauthorization: Bearer {key}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(raw)}\r\n\r\n"
    )
    return head.encode() + raw


if __name__ == "__main__":
    main()
