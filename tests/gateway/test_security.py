"""Keys, hosts, sizes, ids and logs: what strangers and careless callers must not get."""

import asyncio
import logging
import re
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest

from gateway.http.listener import UnsafeBinding, bind
from gateway.server import serve
from infra.embedded_redis import EmbeddedRedis
from tests.gateway.conftest import make_settings, openapi_document, operations, running_gateway
from tests.gateway.fake_worker import MODEL, FakeWorker

pytestmark = pytest.mark.anyio

KEY = "a-key-of-the-operator"
BODY: dict[str, Any] = {"model": MODEL, "prompt": "ab"}


# Routes without a key: probes, and signed URLs.
OPEN = {"/health", "/livez", "/readyz", "/v1/objects/{job_id}/{name}"}


def v1_routes() -> list[tuple[str, str]]:
    """Method and path of every route that needs a key, from the app."""
    ids = {"{job_id}": "job-0-" + "0" * 32}
    ids["{response_id}"] = "resp_0-" + "0" * 32
    ids |= {"{file_id}": "file-" + "0" * 32, "{batch_id}": "batch_" + "0" * 32}
    return [
        (method, re.sub(r"\{\w+\}", lambda found: ids.get(found[0], "x"), path))
        for method, path in operations()
        if path not in OPEN
    ]


ROUTES = v1_routes()


@pytest.fixture(scope="module")
def keyed_url(redis_server: EmbeddedRedis) -> Iterator[str]:
    with running_gateway(make_settings(redis_server.url, api_key=KEY)) as url:
        yield url


@pytest.fixture
async def keyed(keyed_url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=keyed_url, timeout=20) as client:
        yield client


@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_every_route_needs_the_key(keyed: httpx.AsyncClient, method: str, path: str) -> None:
    """401 without a key, with a wrong one, or with another scheme; something else with the key. It
    may come in a header of its own, beside an Authorization of another kind, such as the signature
    of AWS' IAM. A bearer counts for more."""
    signed = {"authorization": "AWS4-HMAC-SHA256 Credential=a"}
    wrong: list[dict[str, str]] = [
        *({"authorization": value} for value in ("Bearer wrong", f"Basic {KEY}", "Bearer")),
        {},
        {"authorization": f"Bearer {KEY}x"},
        *(beside | {"x-api-key": value} for beside in ({}, signed) for value in (f"{KEY}x", "")),
        {"authorization": f"Bearer {KEY}x", "x-api-key": KEY},
    ]
    for headers in wrong:
        answer = await keyed.request(method, path, headers=headers)
        assert answer.status_code == 401, headers
        assert answer.json()["error"]["code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"].startswith("Bearer")
    for right in (
        {"authorization": f"Bearer {KEY}"},
        {"x-api-key": KEY},
        signed | {"x-api-key": KEY},
    ):
        assert (await keyed.request(method, path, headers=right)).status_code != 401, right


def test_only_these_routes_need_no_key() -> None:
    """A new route must be in this list or need the key."""
    without_key = {
        path
        for path, item in openapi_document()["paths"].items()
        for operation in item.values()
        if "security" not in operation
    }
    assert without_key == OPEN
    assert len(ROUTES) > 12


async def test_probes_need_no_key(keyed: httpx.AsyncClient) -> None:
    assert (await keyed.get("/livez")).status_code == 200
    assert (await keyed.get("/readyz")).status_code in (200, 503)
    assert (await keyed.get("/health")).status_code in (200, 503)


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "", "a b", "localhost@x"]
)
async def test_without_a_key_only_loopback_names_are_served(
    http: httpx.AsyncClient, host: str
) -> None:
    answer = await http.get("/v1/models", headers={"host": host})
    assert answer.status_code == 400
    for own in ("localhost:1", "[::1]:8000", "127.0.0.1"):
        assert (await http.get("/livez", headers={"host": own})).status_code == 200


def test_other_addresses_need_a_key(redis_server: EmbeddedRedis) -> None:
    """One sentence says what to do."""
    settings = make_settings(redis_server.url)
    with pytest.raises(UnsafeBinding, match="BATCHWAY_API_KEY"):
        serve(settings, "0.0.0.0", 0)
    bind(make_settings(redis_server.url, api_key=KEY), "0.0.0.0", 0).close()
    bind(settings, "0.0.0.0", 0, has_keys=True).close()


async def test_answers_do_not_wait_for_acknowledgements() -> None:
    """Accepted connections send small writes at once."""
    taken: asyncio.Queue[int] = asyncio.Queue()

    async def take(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sock: socket.socket = writer.get_extra_info("socket")
        taken.put_nowait(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    listener = bind(make_settings("redis://127.0.0.1:1"), "127.0.0.1", 0)
    async with await asyncio.start_server(take, sock=listener):
        _, writer = await asyncio.open_connection(*listener.getsockname())
        assert await taken.get()
        writer.close()
        await writer.wait_closed()


async def test_a_long_body_is_rejected(http: httpx.AsyncClient) -> None:
    """413, with and without a Content-Length."""
    headers = {"content-type": "application/json"}
    raw = b'"' + b"x" * (5 * 2**20) + b'"'

    async def chunks() -> AsyncIterator[bytes]:
        for start in range(0, len(raw), 100_000):
            yield raw[start : start + 100_000]

    for content in (raw, chunks()):
        answer = await http.post("/v1/completions", content=content, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")


async def test_a_request_id_is_returned_or_generated(http: httpx.AsyncClient) -> None:
    """Only if it is well-formed, because it is logged."""
    good = await http.get("/livez", headers={"x-request-id": "a-1.b:c_2"})
    assert good.headers["x-request-id"] == "a-1.b:c_2"
    for bad in ("a b", "x" * 129, 'a"b'):
        made = (await http.get("/livez", headers={"x-request-id": bad})).headers["x-request-id"]
        assert made.startswith("req-")


async def test_no_prompt_output_or_query_is_ever_logged(
    worker: FakeWorker, http: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    """Canaries in prompts, names, keys, queries, malformed bodies and outputs."""
    canary = "CANARY"
    caplog.set_level(logging.DEBUG, logger="batchway")
    caplog.set_level(logging.DEBUG, logger="uvicorn")
    ours = [BODY | {"prompt": canary}, BODY | {canary: canary}, BODY | {"model": canary}]
    ours += [BODY | {"prompt": canary, "n": 9}, BODY | {"stop": [canary * 20]}]
    for body in ours:
        await http.post(f"/v1/completions?q={canary}", json=body)
        await http.post("/v1/completions", json=body | {"stream": True})
        await http.post("/v1/jobs", json={"endpoint": "/v1/completions", "body": body})
    await http.post("/v1/completions", content=canary, headers={"content-type": "application/json"})
    await http.get(f"/v1/jobs/{canary}")
    names = {record.name for record in caplog.records}
    assert "batchway.gateway" in names
    for record in caplog.records:
        if record.name.startswith(("batchway", "uvicorn")):
            assert canary not in record.getMessage(), record.name
            assert "wörld" not in record.getMessage()
            assert record.exc_info is None


def test_a_gateway_needs_no_torch_and_no_worker() -> None:
    """Serverless functions have neither."""
    code = """
import sys
for name in ("torch", "transformers", "numpy", "workers"):
    sys.modules[name] = None
from gateway.app import create_app
from gateway.server import build_server
from gateway.settings import GatewaySettings
build_server(GatewaySettings(redis_url="redis://127.0.0.1:1"))
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=60)
