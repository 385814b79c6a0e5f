"""examples/nginx.conf in front of a gateway, with a real nginx."""

import asyncio
import contextlib
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.gateway.fake_worker import MODEL, FakeWorker, says
from tests.streams import events_of

NGINX = shutil.which("nginx")
CONFIGURATION = Path(__file__).parents[2] / "examples" / "nginx.conf"
CALL: dict[str, Any] = {"model": MODEL, "prompt": "ab", "max_tokens": 20}

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(NGINX is None, reason="nginx is not installed (apt install nginx-light)"),
]


@pytest.fixture(scope="module")
def nginx_url(gateway_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.URL]:
    """The URL of an nginx with the example's configuration, other addresses and shorter times."""
    folder = tmp_path_factory.mktemp("nginx")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    text = CONFIGURATION.read_text()
    for old, new in {
        "127.0.0.1:8000": httpx.URL(gateway_url).netloc.decode(),
        "listen 8080": f"listen 127.0.0.1:{port}",
        "_timeout 10s": "_timeout 1s",
        "error_log stderr warn;": f"error_log stderr notice; pid {folder}/pid;",
        "access_log off;": "access_log off;"
        + "".join(
            f"{kind}_temp_path {folder}/{kind};"
            for kind in ("client_body", "proxy", "fastcgi", "scgi", "uwsgi")
        ),
    }.items():
        assert old in text
        text = text.replace(old, new)
    (folder / "nginx.conf").write_text(text)
    process = subprocess.Popen(
        [NGINX or "", "-e", "stderr", "-c", folder / "nginx.conf", "-g", "daemon off;"],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    try:
        # nginx logs this when it listens.
        assert any("event method" in line for line in process.stderr)
        yield httpx.URL(f"http://127.0.0.1:{port}")
    finally:
        process.terminate()
        process.communicate(timeout=20)


async def test_nginx_forwards_events_at_once_and_disconnects(
    idle_worker: FakeWorker, http: httpx.AsyncClient, nginx_url: httpx.URL
) -> None:
    """The first token arrives before the second is computed. A reader's disconnect ends its job."""
    async with httpx.AsyncClient(base_url=nginx_url, timeout=20) as client:
        async with client.stream("POST", "/v1/completions", json=CALL | {"stream": True}) as answer:
            claimed = await idle_worker.claim()
            await idle_worker.say(claimed, 1, says("a", "b")(claimed.job)[0])
            await anext(events_of(answer))
        await idle_worker.wait_until_ended(claimed)


async def test_calls_reuse_connections_to_the_gateway(
    worker: FakeWorker, http: httpx.AsyncClient, nginx_url: httpx.URL
) -> None:
    """Several whole responses."""
    async with httpx.AsyncClient(base_url=nginx_url, timeout=20) as client:
        for _ in range(3):
            answer = await client.post("/v1/completions", json=CALL)
            assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"GET /livez HTTP/1.1\r\nhost: localhost\r\nx: ", b""),
        (
            b"POST /v1/jobs HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            b"content-length: 4000\r\n\r\n{",
            b"",
        ),
        (
            b"POST /v1/jobs HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n"
            b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n",
            b"HTTP/1.1 400 ",
        ),
    ],
    ids=["a head that does not end", "a body that does not end", "a length beside chunks"],
)
async def test_nginx_closes_slow_and_malformed_requests_itself(
    http: httpx.AsyncClient, nginx_url: httpx.URL, raw: bytes, status: bytes
) -> None:
    """The gateway does not see them."""
    reader, writer = await asyncio.open_connection(nginx_url.host, nginx_url.port)
    writer.write(raw)
    received = b""
    with contextlib.suppress(ConnectionResetError):  # by `reset_timedout_connection`
        received = await reader.read()
    writer.close()
    assert received.startswith(status)
