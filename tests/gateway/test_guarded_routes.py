"""The order of every route: identify the caller, count its call, and only then read."""

import asyncio
import contextlib
import gc
import gzip
import json
import re
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio
from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.types import Message, Scope

from contract.api_keys import ApiKeys, KeyTerms
from contract.keys import Keys
from gateway.app import create_app
from gateway.http import bodies
from gateway.http.bodies import JsonBodies, is_light, parse_object
from gateway.http.errors import ApiError
from gateway.http.strict_json import MAX_STRINGS, MAX_VALUES
from gateway.routes.requests import GuardedRoute
from gateway.settings import GatewaySettings
from gateway.turns import Owner, current_owner, work_for
from infra.embedded_redis import EmbeddedRedis
from tests.gateway.conftest import gateway_client
from tests.gateway.fake_worker import MODEL, FakeWorker

pytestmark = pytest.mark.anyio

KEY = "a-gateway-s-own-key"
ROOT = Path(__file__).resolve().parents[2]
FILLED = {"job_id": "job-0-" + "0" * 32, "response_id": "resp_0-" + "0" * 32}
BOMB = gzip.compress(b'{"key":"x","a":[' + b"{}," * (2**22 // 3) + b"{}]}")
# Calls that submit work; all others are free.
COUNTED = {
    *("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/score", "/v1/classify"),
    *("/rerank", "/v1/rerank", "/v2/rerank", "/v1/responses", "/v1/responses/input_tokens"),
    *("/v1/messages", "/v1/messages/count_tokens"),
    *("/v1/jobs", "/v1/jobs/replay", "/v1/quote", "/v1/batches"),
}


def app_with_key(**overrides: Any) -> FastAPI:
    """An app that wants a key and needs no Redis to check its own."""
    return create_app(GatewaySettings(redis_url="redis://127.0.0.1:1", api_key=KEY, **overrides))


def routes(app: FastAPI) -> Iterator[tuple[str, str, GuardedRoute]]:
    """Each method and path of the app, with ids filled in."""
    for route in app.routes:
        if isinstance(route, GuardedRoute):
            path = re.sub(r"\{(\w+)[^}]*\}", lambda m: FILLED.get(m[1], "x"), route.path)
            for method in route.methods or ():
                yield method, path, route


async def answered(
    app: FastAPI, method: str, path: str, headers: dict[str, str], parts: list[bytes]
) -> tuple[int, int]:
    """The status of the answer, and how many parts of the body were read before it."""
    sent: list[Message] = []
    unread = list(parts)

    async def receive() -> Message:
        if not unread:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": unread.pop(0), "more_body": bool(unread)}

    async def send(message: Message) -> None:
        sent.append(message)

    raw = [(name.encode(), value.encode()) for name, value in {"host": "x", **headers}.items()]
    scope: Scope = {"type": "http", "method": method, "path": path, "query_string": b""}
    await app({**scope, "scheme": "http", "headers": raw}, receive, send)
    return sent[0]["status"], len(parts) - len(unread)


async def test_without_a_key_nothing_of_a_body_is_read() -> None:
    """401 on every route but the open ones, whatever the body claims to be."""
    app, open_paths = app_with_key(), set()
    kinds = [
        {"content-type": "application/json", "content-encoding": "gzip"},
        {"content-type": "application/json", "content-length": f"{2**40}"},
        {"content-type": "multipart/form-data; boundary=x", "transfer-encoding": "chunked"},
        {"content-encoding": "br"},
    ]
    for method, path, route in routes(app):
        if route.right is None:
            open_paths.add(f"{method} {route.path}")
            continue
        for headers in kinds:
            assert await answered(app, method, path, headers, [BOMB] * 3) == (401, 0), path
    document = (ROOT / "docs" / "security.md").read_text()
    [listed] = re.findall(r"\| Open routes \| (.*) \| `", document)
    assert open_paths == set(re.findall(r"`([A-Z]+ /[^`]*)`", listed))


async def test_some_routes_read_little_and_nothing_encoded() -> None:
    """The login takes a kilobyte: 413 for more after the first part; a key fits. A file may not be
    encoded, because a few bytes would stand for gigabytes on a disk."""
    app = app_with_key()
    login, typed = ("POST", "/console/session"), {"content-type": "application/json"}
    assert await answered(app, *login, typed, [b" " * 1025] * 3) == (413, 1)
    right = json.dumps({"key": KEY}).encode()
    assert await answered(app, *login, typed, [right]) == (200, 1)
    form = {"content-type": "multipart/form-data; boundary=x"}
    paths = {login[1]: typed, "/v1/files": form, "/v1/uploads/x/parts": form}
    for path, headers in paths.items():
        encoded = headers | {"x-api-key": KEY, "content-encoding": "gzip"}
        assert await answered(app, "POST", path, encoded, [BOMB]) == (415, 0)


def test_a_route_cannot_forget_to_ask_who_calls() -> None:
    """Neither an endpoint without a caller nor a router of another class."""
    router = APIRouter(route_class=GuardedRoute)

    async def forgetful(body: dict[str, str]) -> None:
        raise AssertionError

    with pytest.raises(TypeError, match="takes a caller"):
        router.post("/v1/new")(forgetful)
    app = app_with_key()
    own = [route for route in app.routes if isinstance(route, APIRoute)]
    assert all(isinstance(route, GuardedRoute) for route in own)


async def test_a_spent_limit_refuses_what_submits_work_and_nothing_else(
    redis_server: EmbeddedRedis, redis_client: redis.asyncio.Redis, keys: Keys, worker: FakeWorker
) -> None:
    """Reads, changes and cancels go on; what is refused is not read. A call that submits no work
    reads 64 KiB at most."""
    key, _ = await ApiKeys(redis_client, keys).create(
        KeyTerms(tenant="acme", requests_per_minute=1)
    )
    headers, seen = {"content-type": "application/json"}, set()
    async with gateway_client(redis_server.url, {"x-api-key": key}, console=True) as http:
        body = {"model": MODEL, "prompt": "ab"}
        assert (await http.post("/v1/completions", json=body)).status_code == 200
        for method, path, route in routes(app_with_key(console=True)):
            if path.endswith("/feed") or route.right is None:
                continue
            answer = await http.request(method, path, content=b"{", headers=headers)
            is_refused = answer.status_code == 429
            assert is_refused == (method == "POST" and path in COUNTED), (method, path)
            if is_refused:
                seen.add(path)
                assert answer.headers["x-dropped-reason"] == "tenant_quota"
        assert seen == COUNTED
        content = b'{"lane": "' + b"a" * 2**16 + b'"}'
        for path in ("/v1/lanes/pause", "/v1/jobs/cancel", "/v1/callbacks/dead/replay"):
            answer = await http.post(path, content=content, headers=headers)
            assert answer.status_code == 413, path


HEAVY = [
    b'{"a": [' + b"{}," * 10_000 + b"{}]}",
    b'{"a": [' + b'"",' * 10_000 + b'""]}',
    b'{"a": {' + b",".join(b'"%d": 1' % n for n in range(10_000)) + b"}}",
    b'{"a": {' + b",".join(b'"%d": 1' % (n % 5_000) for n in range(10_000)) + b"}}",
    b'{"a": "' + b"\\n" * 40_000 + b'"}',
    b'{"a": "' + "ä".encode() * 2_200_000 + b'"}',
    b'{"a": "' + b"\xff" * 4_400_000 + b'"}',
    b'{"a": [' + b"1e400," * 10_000 + b"1]}",
    b'{"a": [' + b"NaN," * 10_000 + b"1]}",
    b'{"a": ' + b"[" * 10_000 + b"]" * 10_000 + b"}",
    b'{"a": [' + b"1," * 10_000 + b"1}",
    b'["a"' + b",1" * 10_000 + b"]",
    b'{"a": "\\ud800' + b"\\n" * 40_000 + b'"}',
    b'{"a": ' + b"1" * 4_400_000 + b"}",
]


@pytest.fixture
async def json_bodies() -> AsyncIterator[JsonBodies]:
    own = JsonBodies()
    yield own
    await own.aclose()


async def parse_here(raw: bytes) -> Any:
    return parse_object(raw)


async def test_a_heavy_body_is_read_as_a_light_one(json_bodies: JsonBodies) -> None:
    """The same value, or the same refusal, with the same hash."""
    for raw in HEAVY:
        assert not is_light(raw)
        results: list[Any] = []
        for read in (parse_here, json_bodies.parse):
            try:
                results.append(await read(raw))
            except ApiError as error:
                results.append((error.status, error.message))
        assert results[0] == results[1], raw[:20]
    raw = json.dumps({"b": list(range(5_000)), "a": "ä"}).encode()
    same = json.dumps({"a": "ä", "b": list(range(5_000))}, indent=1, ensure_ascii=False).encode()
    hashes = {await json_bodies.hash(each, "/v1/jobs") for each in (raw, same)}
    assert len(hashes) == 1
    assert await json_bodies.hash(raw, "/v1/quote") not in hashes


SHAPES = st.sampled_from(
    [b"{},", b"[],", b'"",', b"1,", b'{"a":[1]},', b'"\\n\\"",', b'"a b c",', b"]", b"\\"]
)


@settings(max_examples=60, deadline=None)
@given(SHAPES, SHAPES, st.integers(1, 40))
def test_a_light_body_takes_little_time(one: bytes, other: bytes, share: int) -> None:
    """The longest body of any mixture that is parsed on the loop; of a process's time."""
    piece = one * share + other * (40 - share)
    raw = b'{"a":['
    while is_light(raw + piece) and len(raw) < bodies._LIGHT_BYTES:
        raw += piece * max(1, len(raw) // len(piece) // 2)
    while not is_light(raw):
        raw = raw[: len(raw) // 2]
    gc.disable()  # what other tests left behind is not the body's
    try:
        started_s = time.thread_time()
        with contextlib.suppress(ApiError):
            parse_object(raw)
        assert time.thread_time() - started_s < 0.05
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("value", "most", "words"),
    [
        (b"1,", MAX_VALUES, "values"),
        *[(value, MAX_STRINGS, "strings") for value in (b"{},", b'"",', b"[],", b'{"a":1},')],
    ],
)
async def test_a_body_has_a_bounded_number_of_values(
    json_bodies: JsonBodies, value: bytes, most: int, words: str
) -> None:
    """Refused without making them; half as many are taken."""
    with pytest.raises(ApiError) as refused:
        await json_bodies.parse(b'{"a":[' + value * most + b"1]}")
    assert f"{most} {words}" in refused.value.message
    assert await json_bodies.parse(b'{"a":[' + value * (most // 3) + b"1]}")


async def test_one_process_checks_one_heavy_body_after_another(json_bodies: JsonBodies) -> None:
    """It takes long for each, and its start took longer."""
    raw = b'{"a":[' + b"1," * (MAX_VALUES // 2) + b"1]}"
    pids = []
    for _ in range(4):
        await json_bodies.parse(raw)
        pids.append(json_bodies._checks.pid)
    assert pids == [pids[0]] * 4 != [None] * 4


async def test_each_owner_has_one_heavy_body_checked_at_a_time(
    json_bodies: JsonBodies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another owner's is checked beside it."""
    checks, running = json_bodies._checks, list[str]()
    seen = set[tuple[str, ...]]()
    ask = checks.ask

    async def recorded(request: Any) -> str:
        running.append(current_owner().tenant)
        seen.add(tuple(sorted(running)))
        try:
            return await ask(request)
        finally:
            running.remove(current_owner().tenant)

    async def read(tenant: str) -> None:
        work_for(Owner(tenant))
        await json_bodies.parse(b'{"a": [' + b"{}," * 50_000 + b"{}]}")

    monkeypatch.setattr(checks, "ask", recorded)
    tenants = [*["many"] * 6, "one"]
    await asyncio.gather(*[asyncio.create_task(read(tenant)) for tenant in tenants])
    assert seen == {("many",), ("many", "one")}


async def test_an_encoded_body_comes_in_small_pieces() -> None:
    """Other tasks run between them, and a file of many members is refused."""
    scope: Scope = {"type": "http", "headers": [(b"content-encoding", b"gzip")]}

    async def whole(data: bytes) -> list[int]:
        async def receive() -> Message:
            return {"type": "http.request", "body": data, "more_body": False}

        body, sizes = bodies.Body(scope, receive, 2**23, "the test's"), []
        while True:
            message = await body.receive()
            sizes.append(len(message["body"]))
            if not message["more_body"]:
                return sizes

    sizes = await whole(BOMB)
    assert sum(sizes) == len(gzip.decompress(BOMB))
    assert max(sizes) <= 2**16
    assert sum(await whole(gzip.compress(b"a" * 5_000) * 500)) == 2_500_000
    with pytest.raises(ApiError) as refused:
        await whole(gzip.compress(b"a") * 1_000)
    assert "members" in refused.value.message
