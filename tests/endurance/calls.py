"""All kinds of calls of a soak, each with what its answer must be."""

import asyncio
import contextlib
import gzip
import json
import random
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx

from tests.callbacks.receiver import SECRET, Answer, Behaviour
from tests.campaigns.load import Ask, Callers
from tests.fakes import PAD_ID
from tests.fleet import until
from tests.infra.stack import MODEL
from tests.streams import events_of, whole_answer

BAD_ROW_ID = PAD_ID  # only in prompts that are to fail: no model draws it; see HashModelOptions
# Few: `tokenizers` keeps the last 10,000 texts, 16 MiB of texts such as ours, which is no leak.
NUM_TEXTS = 50
EMBEDDER, RANKER, CLASSIFIER = "embedder", "ranker", "classifier"
# models.yaml, one flow of each kind.
FLOWS = {
    "route": {
        "rules": [{"when": {"pattern": "1"}, "to": [{"model": MODEL}]}],
        "otherwise": [{"model": MODEL}],
    },
    "cascade": {"members": [{"model": MODEL, "threshold": 0.5}, {"model": MODEL}]},
    "ensemble": {"members": [MODEL, MODEL], "combine": "best-by-score", "scorer": RANKER},
    "pipeline": {
        "steps": [
            {
                "name": "first",
                "model": MODEL,
                "endpoint": "/v1/completions",
                "body": {"prompt": "a"},
            },
            {
                "name": "second",
                "model": MODEL,
                "endpoint": "/v1/chat/completions",
                "body": {"messages": [{"role": "user", "content": "b"}], "max_tokens": 8},
            },
        ]
    },
}
_CHAT = "/v1/chat/completions"
ALL_RIGHTS, LIMITED = "soak", "limited"  # tenants; the second has one request a minute


@dataclass(frozen=True, slots=True)
class Caller:
    """What a call is made with: `callers` for completions, `http` with all rights for the rest;
    `callback_url` accepts."""

    callers: Callers
    http: httpx.AsyncClient
    callback_url: str


Call = Callable[[Caller, random.Random], Awaitable[None]]


def first_time(answer: Answer) -> Behaviour:
    """Gives this answer to the first delivery to a path, and accepts the next one."""
    refused: set[str] = set()

    def behave(path: str) -> Answer:
        if path in refused:
            return Answer()
        refused.add(path)
        return answer

    return behave


BEHAVIOURS: dict[str, Behaviour] = {
    "/ok": lambda _: Answer(),
    "/busy": first_time(Answer(503)),
    "/gone": first_time(Answer(410)),
}


def _ask(rng: random.Random, tenant: str = ALL_RIGHTS, **changes: Any) -> Ask:
    prompt_ids = [rng.randrange(32, 127) for _ in range(rng.choice((3, 30, 200)))]
    fields = {"n": rng.choice((1, 1, 2)), "ignore_eos": False, **changes}
    return Ask(tenant, "standard", prompt_ids, rng.randrange(2, 40), fields)


def _body(rng: random.Random, **changes: Any) -> dict[str, Any]:
    _, job = _ask(rng, **changes).request(MODEL, is_job=True)
    body: dict[str, Any] = job["body"]
    return body


async def _submit(caller: Caller, body: dict[str, Any], **fields: Any) -> str:
    submission = {"endpoint": "/v1/completions", "body": body, **fields}
    answer = await caller.http.post("/v1/jobs", json=submission)
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])


async def _stream(caller: Caller, rng: random.Random) -> None:
    attempt = await caller.callers.call(_ask(rng))
    assert attempt.is_whole, attempt.reason


async def _job(caller: Caller, rng: random.Random) -> None:
    """A job that is followed by two readers: one reads everything, the other leaves."""
    job_id = await _submit(caller, _body(rng))
    async with caller.http.stream("GET", f"/v1/jobs/{job_id}/events") as events:
        await anext(events.aiter_lines())
    async with caller.http.stream("GET", f"/v1/jobs/{job_id}/events") as events:
        if events.status_code == 404:
            return  # forgotten meanwhile: a soak keeps nothing for long
        found = await whole_answer(events)
    assert found[-1].type == "succeeded"
    answer = await caller.http.get(f"/v1/jobs/{job_id}")
    assert answer.status_code == 404 or answer.json()["status"] == "succeeded", answer.text


async def _cancelled_job(caller: Caller, rng: random.Random) -> None:
    job_id = await _submit(caller, _body(rng, max_tokens=100))
    await asyncio.sleep(rng.random() / 2)
    answer = await caller.http.post(f"/v1/jobs/{job_id}/cancel")
    assert answer.status_code in (200, 409), answer.text


async def _closed_stream(caller: Caller, rng: random.Random) -> None:
    await caller.callers.call(_ask(rng, max_tokens=100), hang_up_after=1)


async def _closed_call(caller: Caller, rng: random.Random) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(rng.random() / 2):
            await caller.callers.call(_ask(rng, max_tokens=100), is_stream=False)


async def _failing_job(caller: Caller, rng: random.Random) -> None:
    """A job that fails in the engine at each attempt."""
    ask = _ask(rng, prompt=[BAD_ROW_ID] * rng.randrange(1, 50))
    attempt = await caller.callers.call(ask, is_stream=False)
    assert attempt.status == 500, attempt.reason


async def _asked(
    caller: Caller, path: str, body: dict[str, Any], status: int = 200, **options: Any
) -> dict[str, Any]:
    """The JSON of an answer with this status."""
    answer = await caller.http.post(path, json=body, **options)
    assert answer.status_code == status, f"{path}: {answer.status_code} {answer.text}"
    found: dict[str, Any] = answer.json()
    return found


def _text(rng: random.Random) -> str:
    return f"hello {rng.randrange(NUM_TEXTS)}"


def _messages(rng: random.Random, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": _text(rng)}]
    return {"model": MODEL, "messages": messages, "max_tokens": rng.randrange(2, 40), **fields}


def _schema(rng: random.Random) -> dict[str, Any]:
    name = f"p{rng.randrange(10)}"
    number = {"type": "object", "properties": {name: {"type": "boolean"}}, "required": [name]}
    return {**number, "additionalProperties": False}


async def _chat_stream(caller: Caller, rng: random.Random) -> None:
    body = _messages(rng, stream=True, stream_options={"include_usage": True}, logprobs=True)
    async with caller.http.stream("POST", _CHAT, json=body) as answer:
        await whole_answer(answer)


def _structured(rng: random.Random) -> dict[str, Any]:
    format_ = {"type": "json_schema", "json_schema": {"name": "x", "schema": _schema(rng)}}
    return _messages(rng, response_format=format_)


def _tools(rng: random.Random) -> dict[str, Any]:
    function = {"name": "f", "strict": True, "parameters": _schema(rng)}
    tools = [{"type": "function", "function": function}]
    return _messages(rng, tools=tools, tool_choice=rng.choice(("auto", "required")))


def _embeddings(rng: random.Random) -> dict[str, Any]:
    return {"model": EMBEDDER, "input": [_text(rng)] * rng.randrange(1, 5)}


def _rerank(rng: random.Random) -> dict[str, Any]:
    return {"model": RANKER, "query": "a", "documents": [_text(rng) for _ in range(5)]}


def _plain(path: str, body: Callable[[random.Random], dict[str, Any]]) -> Call:
    """A call that is answered with 200."""

    async def call(caller: Caller, rng: random.Random) -> None:
        await _asked(caller, path, body(rng))

    return call


async def _response(caller: Caller, rng: random.Random) -> None:
    """One that is not stored, whole or streamed."""
    body = {"model": MODEL, "input": _text(rng), "max_output_tokens": 16, "store": False}
    if rng.random() < 0.5:
        await _asked(caller, "/v1/responses", body)
        return
    async with caller.http.stream("POST", "/v1/responses", json={**body, "stream": True}) as answer:
        last = [event async for event in events_of(answer)][-1].type
    assert last in ("response.completed", "response.incomplete"), last


async def _chained_responses(caller: Caller, rng: random.Random) -> None:
    body = {"model": MODEL, "input": _text(rng), "max_output_tokens": 16}
    first = await _asked(caller, "/v1/responses", body)
    later = {**body, "previous_response_id": first["id"]}
    answer = await caller.http.post("/v1/responses", json=later)
    assert answer.status_code in (200, 404), answer.text  # forgotten: nothing is kept for long
    await caller.http.delete(f"/v1/responses/{first['id']}")


async def _job_with_callback(caller: Caller, rng: random.Random) -> None:
    """Delivered at once, or at the second attempt."""
    url = f"{caller.callback_url}/{rng.choice(('ok', 'busy'))}?{uuid.uuid4().hex}"
    await _submit(caller, _body(rng), callback={"url": url, "secret": SECRET})


async def _dead_callback(caller: Caller, rng: random.Random) -> None:
    """One that the receiver refuses for good, until it is replayed."""
    url = f"{caller.callback_url}/gone?{uuid.uuid4().hex}"
    job_id = await _submit(caller, _body(rng, n=1), callback={"url": url, "secret": SECRET})
    path = f"/v1/callbacks/dead/{job_id}"

    async def is_dead() -> bool:
        return (await caller.http.get(path)).status_code == 200

    await until(is_dead)
    answer = await caller.http.post(f"{path}/replay")
    assert answer.status_code == 202, answer.text


async def _batch(caller: Caller, rng: random.Random) -> None:
    """Uploaded whole or in parts, and deleted with its results."""
    lines = [
        json.dumps(
            {
                "custom_id": f"{number}",
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": _messages(rng, **({"max_tokens": -2} if number == 0 else {})),
            }
        ).encode()
        for number in range(rng.randrange(2, 10))
    ]
    input_id = await rng.choice((_file, _uploaded))(caller, b"\n".join(lines))
    batch = {"input_file_id": input_id, "endpoint": "/v1/chat/completions"}
    found = await _asked(caller, "/v1/batches", {**batch, "completion_window": "24h"})
    ended = dict[str, Any]()

    async def has_ended() -> bool:
        ended.update((await caller.http.get(f"/v1/batches/{found['id']}")).json())
        return ended["status"] in ("completed", "failed", "cancelled")

    if rng.random() < 0.25:
        await caller.http.post(f"/v1/batches/{found['id']}/cancel")
    await until(has_ended)
    for file_id in filter(None, (input_id, ended["output_file_id"], ended["error_file_id"])):
        assert (await caller.http.get(f"/v1/files/{file_id}/content")).status_code == 200
        assert (await caller.http.delete(f"/v1/files/{file_id}")).status_code == 200


async def _file(caller: Caller, content: bytes) -> str:
    form: Any = {"file": ("in.jsonl", content), "purpose": (None, "batch")}
    answer = await caller.http.post("/v1/files", files=form)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


async def _uploaded(caller: Caller, content: bytes) -> str:
    asked = {"purpose": "batch", "filename": "in.jsonl", "bytes": len(content), "mime_type": "x"}
    upload = await _asked(caller, "/v1/uploads", asked)
    path, part_ids = f"/v1/uploads/{upload['id']}", []
    for part in (content[:100], content[100:]):
        answer = await caller.http.post(f"{path}/parts", files={"data": ("part", part)})
        assert answer.status_code == 200, answer.text
        part_ids.append(answer.json()["id"])
    done = await _asked(caller, f"{path}/complete", {"part_ids": part_ids})
    return str(done["file"]["id"])


async def _operation(caller: Caller, rng: random.Random) -> None:
    """Cancels by filter."""
    mark = {"metadata": {"soak": uuid.uuid4().hex}}
    await _submit(caller, _body(rng, max_tokens=100), **mark)
    answer = await caller.http.post("/v1/jobs/cancel", json=mark)
    # 429: a tenant may have only some open operations.
    assert answer.status_code in (202, 429), answer.text


async def _reads(caller: Caller, rng: random.Random) -> None:
    for path in ("/v1/models", "/metrics", "/v1/jobs?metadata[soak]=x&limit=100", "/v1/batches"):
        answer = await caller.http.get(path)
        assert answer.status_code == 200, f"{path}: {answer.text}"
    await _asked(caller, "/v1/quote", {"endpoint": "/v1/completions", "body": _body(rng)})
    pause = {"tenant": f"nobody{rng.randrange(3)}"}
    await _asked(caller, "/v1/lanes/pause", pause)
    answer = await caller.http.post("/v1/lanes/resume", json=pause)
    assert answer.status_code in (200, 404), answer.text  # another caller has resumed it


async def _refused_call(caller: Caller, rng: random.Random) -> None:
    """One of each kind of refusal."""
    bad, json_type = {"headers": {"authorization": "Bearer wrong"}}, "application/json"
    bomb = {"headers": {"content-type": json_type, "content-encoding": "gzip"}}
    deep = b'{"model":' + b"[" * 1000 + b"]" * 1000 + b"}"
    path, options, statuses = rng.choice(
        (
            ("/v1/completions", {"json": _body(rng, model="nobody")}, (404,)),
            ("/v1/completions", {"json": _body(rng, max_tokens=-2)}, (400,)),
            ("/v1/completions", {"json": _body(rng, prompt="x" * 5000)}, (400,)),
            ("/v1/completions", {"json": _body(rng, unknown=1)}, (400,)),
            ("/v1/chat/completions", {"json": _body(rng)}, (400,)),
            ("/v1/responses", {"json": {"model": MODEL, "input": 1}}, (400,)),
            ("/v1/completions", {"content": deep, "headers": {"content-type": json_type}}, (400,)),
            ("/v1/completions", {"json": _body(rng), **bad}, (401,)),
            ("/v1/completions", {"content": _BOMB, **bomb}, (413,)),
            ("/v1/completions", {"content": b"{}"}, (415,)),
            ("/v1/completions", {"json": _body(rng, response_format=_NO_SCHEMA)}, (400,)),
            ("/v1/nothing", {"json": {}}, (404,)),
            ("/v1/batches", {"json": {"input_file_id": "no"}}, (400,)),
        )
    )
    answer = await caller.http.post(path, **options)
    assert answer.status_code in statuses, f"{path}: {answer.status_code} {answer.text}"


async def _call_over_the_limit(caller: Caller, rng: random.Random) -> None:
    attempt = await caller.callers.call(_ask(rng, LIMITED), is_stream=False)
    assert attempt.status in (200, 429), attempt.reason  # one a minute is allowed


async def _reused_idempotency_key(caller: Caller, rng: random.Random) -> None:
    headers = {"idempotency-key": uuid.uuid4().hex}
    await _asked(caller, "/v1/completions", _body(rng, max_tokens=5, n=1), headers=headers)
    changed = _body(rng, max_tokens=6, n=1)
    answer = await caller.http.post("/v1/completions", json=changed, headers=headers)
    assert answer.status_code in (200, 422), answer.text  # 200: the first is forgotten


async def _half_head(caller: Caller, rng: random.Random) -> None:
    """Leaves within the head, or within the body."""
    url, body = caller.http.base_url, b'{"model":'
    _, writer = await asyncio.open_connection(url.host, url.port)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
    rest = b"content-type: application/json\r\ncontent-length: 100\r\n\r\n" + body
    writer.write(head + (rest if rng.random() < 0.5 else b""))
    await writer.drain()
    writer.close()


_BOMB = gzip.compress(bytes(64 * 2**20))
_NO_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no type"}}}

CALLS: dict[str, Call] = {
    "stream": _stream,
    "chat": _plain(_CHAT, _messages),
    "chat stream": _chat_stream,
    "structured": _plain(_CHAT, _structured),
    "tools": _plain(_CHAT, _tools),
    "embeddings": _plain("/v1/embeddings", _embeddings),
    "rerank": _plain("/v1/rerank", _rerank),
    "score": _plain("/v1/score", lambda r: {"model": RANKER, "text_1": "a", "text_2": _text(r)}),
    "classify": _plain("/v1/classify", lambda rng: {"model": CLASSIFIER, "input": _text(rng)}),
    "response": _response,
    "chained responses": _chained_responses,
    **{
        f"flow {name}": _plain(_CHAT, partial(_messages, model=name, max_tokens=8))
        for name in FLOWS
    },
    "job": _job,
    "job with callback": _job_with_callback,
    "dead callback": _dead_callback,
    "cancelled job": _cancelled_job,
    "operation": _operation,
    "batch": _batch,
    "reads": _reads,
    "closed stream": _closed_stream,
    "closed call": _closed_call,
    "failing job": _failing_job,
    "refused call": _refused_call,
    "call over the limit": _call_over_the_limit,
    "reused idempotency key": _reused_idempotency_key,
    "half head": _half_head,
}
