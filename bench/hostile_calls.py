"""A process that attacks: python -m bench.hostile_calls ATTACK CONNECTIONS RATE URL KEY

Its requests are made before it begins, and it has the lowest priority, since it shares the cores
with what is measured.
"""

import asyncio
import gzip
import itertools
import json
import os
import random
import signal
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any
from urllib.parse import urlsplit

CHAT, RESPONSES, JOBS = "/v1/chat/completions", "/v1/responses", "/v1/jobs"
RERANKER = "reranker"
BODY_BYTES = 4 * 2**20 - 64 * 1024  # below the limit of a decoded body, with room for the rest
_DOCUMENT_BYTES = 3_900_000
_BOMB_BYTES = 4 * 10**9
_NUM_KEPT_JOBS = 200  # in the lists that are filtered
_ID = b"{id}"  # in a call: replaced by an id that the server gave


@dataclass(frozen=True)
class Call:
    """One request. `body` is sent as it is, so it may be compressed already."""

    path: str
    body: bytes = b""
    method: str = "POST"
    headers: dict[str, str] = field(default_factory=lambda: {"content-type": "application/json"})

    def packed(self) -> "Call":
        """The same request with a body of gzip."""
        headers = {**self.headers, "content-encoding": "gzip"}
        return replace(self, body=gzip.compress(self.body, 6), headers=headers)

    def about(self, found: str) -> "Call":
        """The same request about what has this id."""
        path = self.path.replace(_ID.decode(), found)
        return replace(self, path=path, body=self.body.replace(_ID, found.encode()))

    def raw(self, host: str, key: str) -> bytes:
        headers = {"host": host, **self.headers, "content-length": f"{len(self.body)}"}
        if key:
            headers["authorization"] = f"Bearer {key}"
        lines = [f"{self.method} {self.path} HTTP/1.1", *(f"{k}: {v}" for k, v in headers.items())]
        return ("\r\n".join(lines) + "\r\n\r\n").encode() + self.body


@dataclass(frozen=True)
class Attack:
    """What one tenant sends. `calls` are sent in turns; `number` makes those of two turns differ.
    `prepare` returns the id that they are about. `then` follows each accepted call, about the id in
    its answer. `requests_per_minute`: of the attacker's key, 0: no limit."""

    calls: Callable[[int], list[Call]]
    requests_per_minute: int = 20
    has_key: bool = True
    prepare: Callable[[str, str], str] | None = None  # from the URL and the key
    then: tuple[Call, ...] = ()
    is_half_head: bool = False  # each on a new connection, as fast as it can


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


def large_schema(number: int, *, is_accepted: bool) -> dict[str, Any]:
    """A schema that fills a body. Its letters take two bytes there and six in JSON's escapes."""
    words = f"{number}" + "\u00e9" * (BODY_BYTES // 2)
    refused = {} if is_accepted else {"unevaluatedItems": False, "type": "no type"}
    return {"type": "object", "title": f"{number}", "description": words, **refused}


def with_large_schema(number: int, *, is_accepted: bool) -> Call:
    schema = large_schema(number, is_accepted=is_accepted)
    return json_call(CHAT, _with_schema(schema)).packed()


def json_call(path: str, body: Any, **fields: Any) -> Call:
    return Call(path, json.dumps(body, ensure_ascii=False).encode(), **fields)


def text_call(path: str, start: str, repeated: str, end: str, num_bytes: int = BODY_BYTES) -> Call:
    """A compressed body of this length: `start`, the same text again and again, `end`."""
    text = start + repeated * (num_bytes // len(repeated))
    return Call(path, (text.removesuffix(",") + end).encode()).packed()


def many_includes() -> Call:
    start = '{"model":"demo","input":"Hi","include":['
    return text_call(RESPONSES, start, "1,", "]}", 2**20)


def long_name() -> Call:
    return text_call(CHAT, _START + ',"', "m", '":1}')


def small_objects(path: str) -> Call:
    """4 MiB of empty objects in 4 kB."""
    return text_call(path, '{"key":"x","a":[', "{},", "]}")


@cache
def _zeros() -> bytes:
    return gzip.compress(bytes(16 * 2**20), 9)


def bomb(path: str, start: bytes = b'{"model":"', **headers: str) -> Call:
    """Gigabytes in 4 MB: members of gzip one after another."""
    num_members = _BOMB_BYTES // (16 * 2**20)
    body = gzip.compress(start) + _zeros() * num_members
    given = {"content-type": "application/json", "content-encoding": "gzip", **headers}
    return Call(path, body, headers=given)


def many_members(path: str) -> Call:
    """As many members of gzip as a body can have, of one space each."""
    member = gzip.compress(b" ")
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    return Call(path, member * (BODY_BYTES // len(member)), headers=headers)


def reasoning(num_bytes: int) -> Call:
    """A response that keeps one item of this length."""
    item = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "x" * num_bytes}]}
    items = [item, {"role": "user", "content": "Hi"}]
    return json_call(RESPONSES, {"model": "demo", "input": items, "max_output_tokens": 16})


def references(number: int) -> Call:
    """A response that refers to one item as often as this."""
    items = [{"id": _ID.decode()}] * number + [{"role": "user", "content": "Hi"}]
    return json_call(RESPONSES, {"model": "demo", "input": items, "max_output_tokens": 16})


def upload_of(name: bytes) -> tuple[bytes, dict[str, str]]:
    """The start of a form with a file that never ends, and its headers."""
    form = (
        b'--x\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        b'--x\r\ncontent-disposition: form-data; name="file"; filename="' + name + b'"\r\n\r\n'
    )
    return form, {"content-type": "multipart/form-data; boundary=x"}


def ask(url: str, key: str, call: Call, timeout_s: float = 60.0) -> tuple[int, dict[str, Any]]:
    """The status and the JSON of one call."""
    headers = {**call.headers, **({"authorization": f"Bearer {key}"} if key else {})}
    request = urllib.request.Request(url + call.path, call.body or None, headers)  # noqa: S310
    request.method = call.method
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:  # noqa: S310
            return answer.status, json.loads(answer.read() or b"{}")
    except urllib.request.HTTPError as refused:
        return refused.code, json.loads(refused.read() or b"{}")


def stored_item(url: str, key: str, num_bytes: int = 1_000_000) -> str:
    """Stores a response with one long item; returns the item's id, or "" if it is refused."""
    _, response = ask(url, key, reasoning(num_bytes))
    path = f"{RESPONSES}/{response.get('id')}/input_items?order=asc"
    _, found = ask(url, key, Call(path, method="GET", headers={}))
    return next((item["id"] for item in found.get("data", ()) if item["type"] == "reasoning"), "")


def _kept_jobs(url: str, key: str) -> str:
    """Submits short jobs for a list; returns the id of the last one."""
    job = {"endpoint": CHAT, "body": chat("Hi", max_tokens=1), "metadata": {"a": "b"}}
    answers = [ask(url, key, json_call(JOBS, job)) for _ in range(_NUM_KEPT_JOBS)]
    return str(answers[-1][1].get("id", ""))


def _past_call(arguments: str) -> dict[str, Any]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    body = chat("Hi")
    body["messages"] += [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "x"},
    ]
    return body


def _strict_tools(number: int) -> dict[str, Any]:
    tools = [
        {
            "type": "function",
            "function": {
                "name": f"f{number}_{tool}",
                "strict": True,
                "parameters": {
                    "type": "object",
                    "properties": {f"p{i}": {"type": "string"} for i in range(8)},
                    "required": [f"p{i}" for i in range(8)],
                    "additionalProperties": False,
                },
            },
        }
        for tool in range(128)
    ]
    return chat("Hi", tools=tools, tool_choice="required")


def _one(make: Callable[[], Call]) -> Callable[[int], list[Call]]:
    return lambda _: [make()]


def _many(make: Callable[[int], Call], num_calls: int = 64) -> Callable[[int], list[Call]]:
    """Calls that differ, also from those of another turn."""
    return lambda number: [make(number * num_calls + i) for i in range(num_calls)]


def _with_schema(schema: Any) -> dict[str, Any]:
    return chat("Hi", response_format=structured(schema))


def _numbered(name: str, value: str) -> Call:
    """A chat whose object of this name has as many wrong values as fit."""
    entries = ",".join(f'"{i}":{value}' for i in range(BODY_BYTES // (len(value) + 10)))
    return Call(CHAT, f'{_START},"{name}":{{{entries}}}}}'.encode()).packed()


def _many_names() -> Call:
    names = ",".join(f'"n{i}":1' for i in range(BODY_BYTES // 12))
    return Call(CHAT, f"{_START},{names}}}".encode()).packed()


def _file_bomb() -> Call:
    start, headers = upload_of(b"a.jsonl")
    return bomb("/v1/files", start, **headers)


_START = json.dumps(chat("Hi"))[:-1]  # of a body, open
_LANES = "/v1/lanes/pause"
_OTHERS = (
    *("/v1/jobs/cancel", "/v1/jobs/replay", "/v1/callbacks/dead/replay", "/v1/batches"),
    *("/v1/uploads", "/v1/workers/w/drain"),
)
_NO_BODY: dict[str, str] = {}
_JOB = json_call(JOBS, {"endpoint": CHAT, "body": chat("Hi", max_tokens=200, ignore_eos=True)})
_MOVE = Call(JOBS + "/{id}", b'{"lane":"batch"}', "PATCH")
_CANCEL = Call(JOBS + "/{id}/cancel", headers=_NO_BODY)
_PAUSES = [Call(_LANES, b'{"lane":"batch"}'), Call("/v1/lanes/resume", b'{"lane":"batch"}')]
_LIST = Call(f"{JOBS}?metadata[a]=b&metadata[c]=d&limit=100", method="GET", headers=_NO_BODY)
_EIGHT = chat("Hi", n=8, logprobs=True, top_logprobs=20, max_tokens=64, ignore_eos=True)
_PAIR = {"model": RERANKER, "query": "a", "documents": ["word " * (_DOCUMENT_BYTES // 5)]}

ATTACKS: dict[str, Attack] = {
    "a surrogate in arguments": Attack(
        _one(lambda: json_call(CHAT, _past_call('{"a":"\\ud800"}')))
    ),
    "deep arguments": Attack(
        _one(lambda: json_call(CHAT, _past_call('{"a":' + "[" * 964 + "]" * 964 + "}")))
    ),
    "slow schemas": Attack(_many(lambda n: json_call(CHAT, _with_schema(slow_schema(n))))),
    "quotes of slow schemas": Attack(
        _many(
            lambda n: json_call(
                "/v1/quote", {"endpoint": CHAT, "body": _with_schema(slow_schema(n))}
            )
        )
    ),
    "long documents": Attack(_one(lambda: json_call("/v1/rerank", _PAIR))),
    "console without a key": Attack(_one(lambda: small_objects("/console/session")), has_key=False),
    "lanes without a key": Attack(_one(lambda: small_objects(_LANES)), has_key=False),
    "lanes": Attack(_one(lambda: small_objects(_LANES))),
    "other routes without a key": Attack(
        lambda _: [small_objects(path) for path in _OTHERS], has_key=False
    ),
    "other routes": Attack(lambda _: [small_objects(path) for path in _OTHERS]),
    "include": Attack(_one(lambda: many_includes())),
    "metadata": Attack(_one(lambda: _numbered("metadata", "1"))),
    "logit_bias": Attack(_one(lambda: _numbered("logit_bias", '"x"'))),
    "a name of 4 MB": Attack(_one(lambda: long_name())),
    "many names": Attack(_one(_many_names)),
    "100 references": Attack(_one(lambda: references(100)), prepare=stored_item),
    "800 references": Attack(_one(lambda: references(800)), prepare=stored_item),
    "large schemas, accepted": Attack(
        _many(lambda n: with_large_schema(n, is_accepted=True), 16), requests_per_minute=0
    ),
    "large schemas, refused": Attack(
        _many(lambda n: with_large_schema(n, is_accepted=False), 16), requests_per_minute=0
    ),
    "submit and cancel": Attack(_one(lambda: _JOB), requests_per_minute=0, then=(_MOVE, _CANCEL)),
    "lane changes": Attack(lambda _: [*_PAUSES, _MOVE], requests_per_minute=0, prepare=_kept_jobs),
    "filtered lists": Attack(_one(lambda: _LIST), requests_per_minute=0, prepare=_kept_jobs),
    "n = 8 with log probabilities": Attack(_one(lambda: json_call(CHAT, _EIGHT))),
    "128 strict tools": Attack(_many(lambda n: json_call(CHAT, _strict_tools(n)).packed(), 16)),
    "a gzip bomb": Attack(_one(lambda: bomb(CHAT))),
    "a gzip bomb without a key": Attack(_one(lambda: bomb(_LANES)), has_key=False),
    "a gzip bomb as a file": Attack(_one(_file_bomb)),
    "many members of gzip": Attack(_one(lambda: many_members(CHAT))),
    # Last: it spends the credit that all here share, as they have one address.
    "half heads": Attack(_one(lambda: Call(CHAT)), has_key=False, is_half_head=True),
}


def main() -> None:
    """Sends calls over each connection at its part of the rate, and waits for each answer. Prints
    the numbers of answers by status once it is terminated."""
    name, num_connections, rate_per_s, url, key = sys.argv[1:]
    os.nice(19)
    attack, number = ATTACKS[name], random.SystemRandom().randrange(10**6)
    found = attack.prepare(url, key) if attack.prepare is not None else ""
    calls = [call.about(found) for call in attack.calls(number)]
    sender = _Sender(attack, calls, url, key if attack.has_key else "")
    asyncio.run(sender.run(int(num_connections), int(rate_per_s)))


class _Sender:
    def __init__(self, attack: Attack, calls: list[Call], url: str, key: str) -> None:
        self._attack, self._key = attack, key
        self._host, self._port = urlsplit(url).hostname or "", urlsplit(url).port
        self._requests = itertools.cycle([call.raw(self._host, key) for call in calls])
        self._statuses: Counter[str] = Counter()

    async def run(self, num_connections: int, rate_per_s: int) -> None:
        ended = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
        if self._attack.is_half_head:
            senders = [self._half_heads() for _ in range(num_connections)]
        else:
            start_s = (1 + len(self._attack.then)) / rate_per_s
            senders = [
                self._calls(n * start_s, num_connections * start_s) for n in range(num_connections)
            ]
        tasks = [asyncio.create_task(each) for each in senders]
        print("attacking", flush=True)
        await ended.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        print(json.dumps(self._statuses))

    async def _half_heads(self) -> None:
        head = next(self._requests).partition(b"\r\ncontent-type")[0] + b"\r\n"
        while True:
            try:
                _, writer = await asyncio.open_connection(self._host, self._port)
                writer.write(head)
                await writer.drain()
                writer.close()
                self._statuses["half heads"] += 1
            except OSError:
                self._statuses["no connection"] += 1
                await asyncio.sleep(0.01)

    async def _calls(self, start_s: float, each_s: float) -> None:
        """`start_s`: the rate is even, not a burst of all at once. `each_s`: from one call to the
        next."""
        await asyncio.sleep(start_s)
        while True:
            begun_s = time.monotonic()
            try:
                reader, writer = await asyncio.open_connection(self._host, self._port)
                try:
                    while not reader.at_eof():  # after a refusal of a long body
                        begun_s = time.monotonic()
                        await self._asked(reader, writer)
                        await asyncio.sleep(max(0.0, begun_s + each_s - time.monotonic()))
                finally:
                    writer.close()
            except (OSError, asyncio.IncompleteReadError):
                self._statuses["closed"] += 1
                await asyncio.sleep(max(0.0, begun_s + each_s - time.monotonic()))

    async def _asked(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        body = await self._answer(reader, writer, next(self._requests))
        if self._attack.then and (found := json.loads(body).get("id")):
            for call in self._attack.then:
                await self._answer(reader, writer, call.about(found).raw(self._host, self._key))

    async def _answer(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes
    ) -> bytes:
        writer.write(request)
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        self._statuses[head.split()[1]] += 1
        return await reader.readexactly(int(head.partition("content-length: ")[2].split()[0]))


if __name__ == "__main__":
    main()
