"""Targets of requests in other forms: they are answered as the plain one."""

import socket
from urllib.parse import urlsplit

import httpx
import pytest

from gateway.http.limits import plain_target
from tests.gateway.bare_connection import connected, echo
from tests.gateway.fake_worker import MODEL, FakeWorker

pytestmark = pytest.mark.anyio


def raw_answer(url: str, request: bytes) -> bytes:
    """What comes back on a connection of its own, until it is closed."""
    place = urlsplit(url)
    with socket.create_connection((place.hostname, place.port), timeout=20) as connection:
        connection.sendall(request)
        found = b""
        while part := connection.recv(65_536):
            found += part
    return found


@pytest.mark.parametrize(
    ("target", "path", "host"),
    [
        (b"/v1/models", "/v1/models", b"x"),
        (b"/v1/models/", "/v1/models", b"x"),
        (b"/v1/models//", "/v1/models", b"x"),
        (b"/", "/", b"x"),
        (b"//", "/", b"x"),
        (b"/v1/models/a%2Fb/", "/v1/models/a/b", b"x"),
        (b"http://a.example/v1/models", "/v1/models", b"a.example"),
        (b"HTTPS://a.example:8000/v1/models/", "/v1/models", b"a.example:8000"),
        (b"http://[::1]:80", "/", b"[::1]:80"),
        (b"http://u@a/v1", "http://u@a/v1", b"x"),
        (b"ftp://a/v1", "ftp://a/v1", b"x"),
        (b"/http://a/v1", "/http://a/v1", b"x"),
        (b"*", "*", b"x"),
    ],
)
def test_each_form_of_a_target_has_a_plain_one(target: bytes, path: str, host: bytes) -> None:
    """One that names a host stands before the Host header; a plain one stays the same object."""
    shown = target.decode().replace("%2F", "/")
    headers = [(b"accept", b"*/*"), (b"host", b"x"), (b"host", b"y")]
    scope = {"type": "http", "path": shown, "raw_path": target, "headers": headers}
    found = plain_target(scope)
    assert found["path"] == path
    hosts = [value for name, value in found["headers"] if name == b"host"]
    assert hosts == ([host] if host != b"x" else [b"x", b"y"])
    assert plain_target(found) is found


@pytest.mark.parametrize("ends", [b"\r\n", b"\n", b"\r\n\r\n\r\n"])
@pytest.mark.parametrize("target", [b"/v1/models", b"/v1/models/", b"http://localhost/v1/models"])
async def test_requests_in_other_forms_are_answered(
    worker: FakeWorker, http: httpx.AsyncClient, ends: bytes, target: bytes
) -> None:
    """Empty lines before a request, a target with a host, a path with a slash at its end."""
    head = b"GET " + target + b" HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    answer = raw_answer(str(http.base_url), ends + head)
    assert answer.startswith(b"HTTP/1.1 200"), answer
    assert b'"list"' in answer


@pytest.mark.parametrize("path", ["/v1/chat/completions/", "/v1/chat/completions"])
async def test_calls_are_answered_with_and_without_a_slash(
    worker: FakeWorker, http: httpx.AsyncClient, path: str
) -> None:
    """And counted under the same route."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
    assert (await http.post(path, json=body)).status_code == 200
    assert 'route="/v1/chat/completions/"' not in (await http.get("/metrics")).text


async def test_a_target_s_host_is_checked_as_the_header_is(http: httpx.AsyncClient) -> None:
    """A page of another site cannot reach the gateway by either."""
    head = b"GET http://evil.example/v1/models HTTP/1.1\r\nhost: localhost\r\n"
    answer = raw_answer(str(http.base_url), head + b"connection: close\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400")
    assert b"untrusted_host" in answer


async def test_empty_lines_between_requests_are_ignored_and_those_in_a_body_are_not() -> None:
    """Each request of a connection may have them before it; a body may begin with them."""
    post = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 6\r\n\r\n"
    async with connected(echo) as client:
        await client.send(b"\r\n")
        await client.send(post)
        await client.send(b"\r\n")
        await client.send(b"\nabc")
        first = await client.part()
        await client.send(b"\r\n\r\n" + post.replace(b"/ ", b"/last ") + b"\n\n\n\n\n\n")
        second = await client.part()
    assert first.startswith(b"HTTP/1.1 200")
    assert b"POST / \r\n\nabc" in first
    assert b"POST /last \n\n\n\n\n\n" in second
