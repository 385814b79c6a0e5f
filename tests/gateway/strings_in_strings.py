"""Bodies with JSON, or what looks like it, inside of strings, against the gateway's app.

python -m tests.gateway.strings_in_strings --bodies 200000 --seed 1
"""

import argparse
import asyncio
import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import httpx

from contract import library
from contract.connection import connect
from contract.keys import Keys
from contract.library import ensure_library
from gateway.app import create_app
from infra.embedded_redis import EmbeddedRedis
from tests.clock import library_with_test_clock
from tests.gateway.conftest import make_settings
from tests.gateway.fake_worker import MODEL, publish_model

Body = dict[str, Any]
CHAT, RESPONSES, COMPLETIONS = "/v1/chat/completions", "/v1/responses", "/v1/completions"
# What an answer says where a process for templates or grammars died of a request.
_DEATHS = ("its process ended", "needs too much memory", "takes too long", "cannot start")
_NUM_TRIES = 8
_ATOMS = (
    *('"a"', '""', "1", "-0", "1.5", "true", "null", "[]", "{}", "NaN", "Infinity", "-Infinity"),
    *("1e999", "-1e999", "1e-999", "1E400", "01", "18446744073709551616", "-9223372036854775809"),
    *('"\\ud800"', '"\\udfff\\ud800"', '"\\u0000"', '"\\x"', '"\\u12"', '"a\nb"', '"\x00"', '"'),
    *("'a'", "undefined", "/* */", "\ufeff", "{{ x }}", "{% for %}", "<|im_end|>", "<call>"),
)


def texts(rng: random.Random) -> str:
    """JSON, damaged JSON, or nothing like it."""
    kind = rng.randrange(9)
    if kind == 0:
        depth = rng.choice([1, 30, 31, 32, 33, 34, 99, 199, 200, 201, 940, 950, 964, 1000, 3000])
        depth += rng.randrange(-1, 9)
        opened = rng.choice(["[", '{"a":', '{"type":"array","items":', '{"a":[', '[{"":'])
        closed = "".join({"[": "]", "{": "}"}.get(char, "") for char in reversed(opened))
        middle = rng.choice([*_ATOMS, ""])
        text = opened * max(depth, 1) + middle + closed * rng.choice([depth, depth, 0, depth - 1])
        return f'{{"a": {text}}}' if rng.randrange(2) else text
    if kind == 1:
        return f'{{"a": {rng.choice("-1")}{"9" * rng.choice([18, 400, 4298, 4299, 4300, 6000])}}}'
    if kind == 2:
        return rng.choice(_ATOMS)
    if kind == 3:
        return "{" + ", ".join(f'"{rng.choice("ab")}": {rng.choice(_ATOMS)}' for _ in "ab") + "}"
    if kind == 4:
        return '{"\\ud800": 1}' if rng.randrange(2) else '{"a\\udc00b": {"\\ud83d\\ude00": 2}}'
    text = json.dumps(values(rng), ensure_ascii=bool(rng.randrange(2)))
    for _ in range(rng.randrange(3) if kind > 5 else 0):
        at = rng.randrange(len(text) + 1)
        text = (
            text[:at] + rng.choice([*_ATOMS, "\\", ",", "[", "}"]) + text[at + rng.randrange(3) :]
        )
    return text


def values(rng: random.Random, depth: int = 0) -> Any:
    """Values of JSON, some of which look like schemas."""
    kind = rng.randrange(9 if depth < 4 else 5)
    if kind < 5:
        return rng.choice(["a", "é😀", "", 1, -7, 2**70, 1.5, 1e308, True, None, "\x00\n", '{"a"'])
    if kind == 5:
        return [values(rng, depth + 1) for _ in range(rng.randrange(4))]
    if kind == 6:
        return {rng.choice("abé"): values(rng, depth + 1) for _ in range(rng.randrange(4))}
    return schemas(rng, depth)


def schemas(rng: random.Random, depth: int = 0) -> Body:
    """Schemas, right and wrong."""
    found: Body = {"type": rng.choice(["object", "array", "string", "integer", "number", "what"])}
    if depth < 4:
        found["properties"] = {rng.choice("abc"): schemas(rng, depth + 1) for _ in "ab"}
        found["items"] = schemas(rng, depth + 1)
    for name in rng.sample(
        ["enum", "const", "pattern", "minimum", "maxLength", "required", "$ref", "format"], k=2
    ):
        found[name] = rng.choice(
            [values(rng, 4), ["a"], "a+", 2**70, "#", "date", rng.choice(_ATOMS)]
        )
    return found


def _arguments(rng: random.Random) -> Any:
    text = texts(rng)
    with suppress(ValueError, RecursionError):
        return json.loads(text) if rng.randrange(4) == 0 else text
    return text


def _tools(rng: random.Random) -> list[Body]:
    return [{"type": "function", "function": {"name": "f", "parameters": schemas(rng)}}]


def chats(rng: random.Random) -> Body:
    """A chat with one text, or a few, where it may be JSON."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": _arguments(rng)}}
    body: Body = {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": "a"}]}
    match rng.randrange(8):
        case 0 | 1:
            body["messages"] += [
                {"role": "assistant", "content": texts(rng), "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c", "content": texts(rng)},
            ]
        case 2:
            body["guided_json"] = _arguments(rng)
        case 3:
            body["structured_outputs"] = {"json": _arguments(rng)}
        case 4:
            schema = {"name": "s", "schema": schemas(rng), "strict": bool(rng.randrange(2))}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        case 5:
            body["chat_template_kwargs"] = {"a": values(rng), "b": texts(rng)}
        case 6:
            body |= {"tools": _tools(rng), "tool_choice": rng.choice(["auto", "required"])}
        case _:
            body |= {"metadata": {"a": texts(rng)[:512]}, "stop": texts(rng)[:60]}
    return body


def responses(rng: random.Random) -> Body:
    """The same of a response."""
    text = _arguments(rng)
    body: Body = {"model": MODEL, "max_output_tokens": 16, "store": bool(rng.randrange(2))}
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": text}
    body["input"] = [{"role": "user", "content": "a"}]
    match rng.randrange(4):
        case 0 | 1:
            output = {"type": "function_call_output", "call_id": "c", "output": texts(rng)}
            body["input"] += [call, output]
        case 2:
            body["text"] = {"format": {"type": "json_schema", "name": "s", "schema": schemas(rng)}}
        case _:
            body["tools"] = [{"type": "function", "name": "f", "parameters": schemas(rng)}]
    return body


def bodies(rng: random.Random) -> Iterator[tuple[str, Body]]:
    """Jobs, and quotes, which prepare a call as each way into the queue does."""
    while True:
        path: str
        path, make = rng.choice([(CHAT, chats), (CHAT, chats), (RESPONSES, responses)])
        body = make(rng)
        match rng.randrange(10):
            case 0:
                metadata = {"a": texts(rng)[:512]}
                job = {"endpoint": path, "body": body, "metadata": metadata}
                yield "/v1/jobs", job
            case _:
                yield "/v1/quote", {"endpoint": path, "body": body}


async def fuzz(
    redis_url: str, num_bodies: int, seed: int, say: Callable[[str], None] = lambda _: None
) -> Counter[int]:
    """The statuses of so many bodies. Raises AssertionError for an error of the server's, and for
    one that killed a process."""
    client = connect(redis_url, Keys("test"))
    await client.flushall()
    await ensure_library(client)
    keys = Keys("test")
    await publish_model(client, keys)
    app = create_app(make_settings(redis_url))
    made, rng, statuses = bodies(random.Random(seed)), random.Random(seed), Counter[int]()

    async def post(http: httpx.AsyncClient) -> None:
        path, body = next(made)
        content = json.dumps(body, ensure_ascii=bool(rng.randrange(2))).encode(errors="replace")
        for _ in range(_NUM_TRIES):  # the machine may be busy
            answer = await http.post(
                path, content=content, headers={"content-type": "application/json"}
            )
            if answer.status_code != 503 or "retry-after" not in answer.headers:
                break
        statuses[answer.status_code] += 1
        about = path, content[:2_000], answer.text[:500]
        assert answer.status_code < 500, about
        assert not any(reason in answer.text for reason in _DEATHS), about

    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://localhost", timeout=60
        ) as http,
    ):
        for number in range(num_bodies):
            await post(http)
            if number % 1_000 == 0:
                await client.flushdb()  # of jobs, which nobody runs
                await publish_model(client, keys)
                say(f"{number} bodies, {dict(statuses)}")
    await client.aclose()
    return statuses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bodies", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    library.library_source = library_with_test_clock
    with EmbeddedRedis() as server:
        found = asyncio.run(
            fuzz(
                server.url,
                options.bodies,
                options.seed,
                lambda line: print(line, file=sys.stderr, flush=True),
            )
        )
    print(f"{options.bodies} bodies, {dict(found)}")
