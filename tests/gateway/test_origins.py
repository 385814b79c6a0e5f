"""Which pages may change something without a key, for every route that changes anything; CORS; and
what a proxy may say of how a request came."""

import asyncio
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
from fastapi.routing import APIRoute

from gateway.app import create_app
from gateway.settings import GatewaySettings
from infra.embedded_redis import EmbeddedRedis
from tests.aws.conftest import Invoke, running_function
from tests.aws.lambda_events import HEADERS, http_event, rest_event
from tests.gateway.conftest import Gateways, answered, make_settings, running_gateway
from tests.gateway.fake_worker import MODEL, FakeWorker

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module", autouse=True)
def empty_redis(redis_server: EmbeddedRedis) -> Iterator[None]:
    """Without keys of tests before, and for tests behind without this one's object store."""
    with redis.Redis.from_url(redis_server.url) as client:
        client.flushall()
        yield
        client.flushall()


Pairs = list[tuple[str, str]]

KEY = "a-key-of-the-operator"
APP = "https://app.example.com"
READING = {"GET", "HEAD", "OPTIONS"}
WITH_KEY: list[Pairs] = [
    [("authorization", f"Bearer {KEY}")],
    [("authorization", f"bearer {KEY}")],
    [("x-api-key", KEY)],
]
SESSION: Pairs = [("cookie", "batchway_session=x")]
TOKEN_MISSING = "csrf_token_missing"
# What a browser adds by itself, or holds no key.
WITHOUT_KEY: list[Pairs] = [
    [],
    SESSION,
    [("authorization", "Basic dXNlcjpzZWNyZXQ=")],
    [("authorization", "Bearer")],
    [("x-api-key", "")],
]
SITES = ("cross-site", "same-site", "CROSS-SITE", "", "x", "same-origin, cross-site")


def own_headers(url: str) -> list[Pairs]:
    """What the gateway's own pages and callers that are no browsers send."""
    return [
        [],
        [("origin", url)],
        [("origin", url.upper())],
        [("sec-fetch-site", "same-origin")],
        [("sec-fetch-site", "none")],
        [("origin", url), ("sec-fetch-site", "same-origin")],
    ]


def foreign_headers(url: str) -> list[Pairs]:
    """What pages of other origins, or nobody, would send."""
    name, _, port = url.removeprefix("http://").rpartition(":")
    origins = [
        *("https://evil.example", "null", "NULL", "", "file://", "chrome-extension://abc"),
        *(f"http://{name}", f"http://{name}:{int(port) - 1}", f"https://{name}:{port}"),
        *(f"http://localhost:{port}", f"http://[::1]:{port}", "http://[::1", "http://", url[7:]),
        *(f"{url}.evil.example", f"http://evil.example/{url}", f"{url}/", f"{url}#", f"{url}0"),
        *(f"http://{name}:{port}@evil.example", f"http://x@{name}:{port}", f"http://{name}:"),
        *(f"{url}, https://evil.example", f"{url} {url}", f"{url}\u00e9", "http://a:999999999"),
    ]
    return [
        *([("origin", origin)] for origin in origins),
        [("origin", url), ("origin", "https://evil.example")],
        [("origin", "https://evil.example"), ("origin", url)],
        [("origin", url), ("origin", url)],
        [("origin", "https://evil.example"), ("sec-fetch-site", "same-origin")],
        *([("sec-fetch-site", site)] for site in SITES),
        *([("origin", url), ("sec-fetch-site", site)] for site in SITES),
        [("sec-fetch-site", "same-origin"), ("sec-fetch-site", "cross-site")],
    ]


@cache
def changing_routes() -> list[tuple[str, str]]:
    """Method and path of each route of the app that is not for reading."""
    app = create_app(GatewaySettings(redis_url="redis://127.0.0.1:1", console=True))
    routes = [route for route in app.routes if isinstance(route, APIRoute)]
    return sorted(
        (method, re.sub(r"\{.*?\}", "x", route.path))
        for route in routes
        for method in (route.methods or set()) - READING
    )


def encoded(*parts: Pairs) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode("latin-1")) for part in parts for name, value in part]


async def ask(
    http: httpx.AsyncClient, method: str, path: str, *parts: Pairs, **options: Any
) -> httpx.Response:
    return await http.request(method, path, headers=encoded(*parts), **options)


def is_refused(answer: httpx.Response) -> bool:
    """Whether the page's origin was the reason."""
    is_so = '"code":"foreign_origin"' in answer.text
    assert answer.status_code == 403 or not is_so
    return is_so


@pytest.fixture(scope="module", params=[None, KEY], ids=["without keys", "with a key"])
def url(redis_server: EmbeddedRedis, request: pytest.FixtureRequest) -> Iterator[str]:
    """A gateway with pages, and with a key or none."""
    with running_gateway(make_settings(redis_server.url, console=True, api_key=request.param)) as u:
        yield u


@pytest.mark.parametrize(("method", "path"), changing_routes())
async def test_no_route_lets_a_page_of_another_origin_change_anything(
    url: str, method: str, path: str
) -> None:
    """Whatever cookies a browser adds. The gateway's own pages may, and so may whoever puts a key
    into a header."""
    async with httpx.AsyncClient(base_url=url, timeout=20) as http:
        for headers in (
            [("origin", "https://evil.example")],
            [("origin", "null"), ("sec-fetch-site", "cross-site")],
            [("sec-fetch-site", "same-site")],
        ):
            for without in WITHOUT_KEY[:2]:
                assert is_refused(await ask(http, method, path, headers, without)), headers
            assert not is_refused(await ask(http, method, path, headers, WITH_KEY[0])), headers
        for headers in ([], [("origin", url)]):
            assert not is_refused(await ask(http, method, path, headers)), headers


@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/files", "/console/session"])
async def test_whatever_a_page_of_another_origin_sends_is_refused(url: str, path: str) -> None:
    """Origins that are almost the gateway's own, several, malformed; with and without a cookie or a
    user's password, which a browser adds by itself. Only a header that no page can set holds a
    key."""
    evil = [("origin", "https://evil.example")]
    async with httpx.AsyncClient(base_url=url, timeout=20) as http:
        for headers in foreign_headers(url):
            for without in WITHOUT_KEY[:2]:
                assert is_refused(await ask(http, "POST", path, headers, without)), headers
        for headers in own_headers(url):
            assert not is_refused(await ask(http, "POST", path, headers)), headers
        for without in WITHOUT_KEY:
            assert is_refused(await ask(http, "POST", path, evil, without)), without
        for key in WITH_KEY:
            assert not is_refused(await ask(http, "POST", path, evil, key)), key


def test_many_routes_change_something() -> None:
    """The routes of the test above are those of the app."""
    assert {"DELETE", "PATCH", "POST"} == {method for method, _ in changing_routes()}
    assert len(changing_routes()) > 30
    assert ("POST", "/v1/files") in changing_routes()
    assert ("DELETE", "/console/session") in changing_routes()


async def test_unknown_methods_are_changes(url: str) -> None:
    """Reading is free, as another page cannot read the answer."""
    evil = [("origin", "https://evil.example")]
    async with httpx.AsyncClient(base_url=url) as http:
        for method in ("PUT", "QUERY", "TRACE", "X", *READING):
            refused = is_refused(await ask(http, method, "/v1/models", evil))
            assert refused == (method not in READING), method


async def test_a_form_of_another_site_stores_no_file(gateways: Gateways, tmp_path: Path) -> None:
    """Neither whole nor as a part of an upload, on a gateway without keys."""
    upload = {"purpose": "batch", "filename": "a", "bytes": 2, "mime_type": "text/plain"}
    async with gateways(object_store=str(tmp_path)) as http:
        part = f"/v1/uploads/{(await answered(http, '/v1/uploads', upload))['id']}/parts"
        for headers in ({"origin": "https://evil.example"}, {"sec-fetch-site": "cross-site"}):
            for path, name in (("/v1/files", "file"), (part, "data")):
                form: dict[str, Any] = {"data": {"purpose": "batch"}, "files": {name: b"{}"}}
                assert is_refused(await http.post(path, headers=headers, **form)), path
        assert (await http.get("/v1/files")).json()["data"] == []
        own = {"origin": str(http.base_url).rstrip("/")}
        answer = await http.post(part, headers=own, files={"data": b"{}"})
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("host", "own"),
    [
        ("localhost:8000", "http://localhost:8000"),
        ("LocalHost:8000", "http://localhost:8000"),
        ("localhost", "http://localhost"),
        ("localhost", "http://localhost:80"),
        ("localhost:80", "http://localhost"),
        ("[::1]:8000", "http://[::1]:8000"),
        ("[::1]", "http://[::1]:80"),
    ],
)
async def test_the_same_origin_is_that_of_the_host(url: str, host: str, own: str) -> None:
    """With its port, of which the scheme's own may be left out."""
    async with httpx.AsyncClient(base_url=url) as http:
        found = [
            is_refused(await ask(http, "POST", "/v1/jobs", [("host", host), ("origin", origin)]))
            for origin in (own, url, f"{own}1", own.replace("http", "https"))
        ]
    assert found == [False, True, True, True]


async def test_the_host_of_an_absolute_target_counts(url: str) -> None:
    """As for the check of the Host header."""
    for origin, refused in (("http://localhost:5", False), (url, True)):
        reader, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(url).port)
        head = (
            f"POST http://localhost:5/v1/jobs HTTP/1.1\r\nhost: {url[7:]}\r\norigin: {origin}\r\n"
            "content-length: 0\r\nconnection: close\r\n\r\n"
        )
        writer.write(head.encode())
        answer = await reader.read()
        writer.close()
        assert (b"foreign_origin" in answer) == refused, answer


# --- behind a proxy ---------------------------------------------------------------------------

TLS = ("x-forwarded-proto", "https")
NAME = ("x-forwarded-host", "models.example.com")
FORWARDED: list[tuple[Pairs, str]] = [
    ([TLS], "https://127.0.0.1:{port}"),
    ([("x-forwarded-proto", "HTTPS")], "https://127.0.0.1:{port}"),
    ([TLS, NAME], "https://models.example.com"),
    ([NAME], "http://models.example.com"),
    ([TLS, ("x-forwarded-host", "models.example.com:8443")], "https://models.example.com:8443"),
    # Not to be understood: as if they were not there.
    ([("x-forwarded-proto", "https, http")], "http://127.0.0.1:{port}"),
    ([TLS, TLS], "http://127.0.0.1:{port}"),
    ([("x-forwarded-proto", "javascript")], "http://127.0.0.1:{port}"),
    ([NAME, NAME], "http://127.0.0.1:{port}"),
]


@pytest.fixture(scope="module")
def untrusting_url(redis_server: EmbeddedRedis) -> Iterator[str]:
    """A gateway whose proxies have other addresses than this machine."""
    settings = make_settings(
        redis_server.url, console=True, api_key=KEY, trusted_proxies=("192.0.2.0/24", "2001:db8::1")
    )
    with running_gateway(settings) as url:
        yield url


@pytest.mark.parametrize(("headers", "own"), FORWARDED)
async def test_a_trusted_proxy_says_how_a_request_came(
    url: str, untrusting_url: str, headers: Pairs, own: str
) -> None:
    """Others' words have no effect: the origin is that of the Host header."""
    for gateway, is_trusted in ((url, True), (untrusting_url, False)):
        plain = httpx.URL(gateway)
        named = own.format(port=plain.port)
        async with httpx.AsyncClient(base_url=gateway) as http:
            for origin in {named, gateway, "https://models.example.com", "https://evil.example"}:
                answer = await ask(http, "POST", "/v1/jobs", headers, [("origin", origin)])
                expected = named if is_trusted else gateway
                assert is_refused(answer) == (origin != expected), (gateway, origin)


@pytest.mark.parametrize(
    ("headers", "is_https"),
    [
        ([], False),
        ([TLS], True),
        ([("x-forwarded-proto", "HTTPS")], True),
        ([("x-forwarded-proto", "http")], False),
        ([("x-forwarded-proto", "https,https")], False),
        ([TLS, ("x-forwarded-proto", "http")], False),
        ([("forwarded", "proto=https"), ("x-forwarded-ssl", "on")], False),
    ],
)
async def test_the_session_cookie_is_secure_where_a_trusted_proxy_ends_tls(
    redis_server: EmbeddedRedis, untrusting_url: str, headers: Pairs, is_https: bool
) -> None:
    """Both when it is set and when it is deleted; a stranger's header changes nothing."""
    settings = make_settings(redis_server.url, console=True, api_key=KEY)
    with running_gateway(settings) as trusting_url:
        for gateway, expected in ((trusting_url, is_https), (untrusting_url, False)):
            async with httpx.AsyncClient(base_url=gateway) as http:
                begun = await ask(http, "POST", "/console/session", headers, json={"key": KEY})
                assert begun.status_code == 200, begun.text
                cookie = begun.headers["set-cookie"]
                sent = [("cookie", cookie.partition(";")[0])]
                token = [("x-csrf-token", begun.json()["token"])]
                ended = await ask(http, "DELETE", "/console/session", headers, sent, token)
                assert ended.status_code == 204, ended.text
            for each in (cookie, ended.headers["set-cookie"]):
                assert ("; Secure" in each, "HttpOnly" in each) == (expected, True), each


@pytest.mark.parametrize(
    ("client", "is_trusted"),
    [
        (("127.0.0.1", 1), True),
        (("::1", 1), True),
        (("::ffff:127.0.0.1", 1), True),
        (("127.0.0.2", 1), False),
        (("::ffff:127.0.0.2", 1), False),
        (("0.0.0.0", 1), False),
        (("", 0), False),
        (None, False),
    ],
)
async def test_only_listed_addresses_are_proxies(client: object, is_trusted: bool) -> None:
    """By default those of this machine, also as an IPv6 socket shows them."""
    app = create_app(GatewaySettings(redis_url="redis://127.0.0.1:1"))
    transport = httpx.ASGITransport(app, client=client)  # type: ignore[arg-type]
    headers = encoded([("origin", "https://localhost"), TLS])
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        assert is_refused(await http.post("/v1/x", headers=headers)) != is_trusted


@pytest.mark.parametrize("event", [rest_event, http_event])
async def test_on_lambda_the_host_is_the_name_that_callers_use(
    redis_server: EmbeddedRedis, event: Any
) -> None:
    """API Gateway passes it on, always over TLS, and no address is a proxy's. The cookie is
    Secure."""
    own = f"https://{HEADERS['Host']}"

    async def code(invoke: Invoke, **headers: str) -> tuple[int, bool]:
        keyless = {"Authorization": "", "X-Forwarded-Proto": "http"} | headers
        answer = await invoke(event("POST", "/v1/jobs", {}, keyless))
        return answer["statusCode"], "foreign_origin" in answer["body"]

    settings = make_settings(redis_server.url, api_key=KEY, console=True, allowed_hosts=("*",))
    async with running_function(settings) as invoke:
        assert await code(invoke, Origin=own) == (401, False)
        assert await code(invoke, Origin="https://evil.example") == (403, True)
        assert await code(invoke, Origin=own.replace("https", "http")) == (403, True)
        spoofed = {"X-Forwarded-Host": "evil.example", "Origin": "https://evil.example"}
        assert await code(invoke, **spoofed) == (403, True)
        with_http = {"X-Forwarded-Proto": "http"}
        answer = await invoke(event("POST", "/console/session", {"key": KEY}, with_http))
    assert answer["statusCode"] == 200, answer
    shown = str(answer.get("multiValueHeaders") or "") + str(answer.get("cookies") or "")
    assert "; Secure" in shown + str(answer["headers"])


# --- CORS -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def open_url(redis_server: EmbeddedRedis) -> Iterator[str]:
    """A gateway that wants a key and serves the pages of one other origin."""
    settings = make_settings(
        redis_server.url, api_key=KEY, allowed_origins=("https://APP.example.com:443", "http://x")
    )
    with running_gateway(settings) as url:
        yield url


def cors(answer: httpx.Response) -> dict[str, str]:
    prefix = "access-control-"
    return {
        name.removeprefix(prefix): value
        for name, value in answer.headers.items()
        if name.startswith(prefix)
    }


def preflight(origin: str, method: str, *names: str) -> dict[str, str]:
    asked = {"origin": origin, "access-control-request-method": method}
    return asked | ({"access-control-request-headers": ",".join(names)} if names else {})


@pytest.mark.parametrize(("method", "path"), [*changing_routes(), ("GET", "/v1/jobs/x/events")])
async def test_a_preflight_is_answered_before_a_key_is_asked_for(
    open_url: str, method: str, path: str
) -> None:
    """For the listed origins, with whatever headers the page will send; never with cookies."""
    names = ("authorization", "x-api-key", "content-type", "idempotency-key", "last-event-id")
    async with httpx.AsyncClient(base_url=open_url) as http:
        found = await http.options(path, headers=preflight(APP, method, *names, "x-stainless-os"))
        other = await http.options(path, headers=preflight("https://evil.example", method))
    shown = cors(found)
    assert (found.status_code, shown["allow-origin"]) == (200, APP)
    assert method in shown["allow-methods"]
    assert set(names) <= set(shown["allow-headers"].split(","))
    assert "allow-credentials" not in shown
    assert "Origin" in found.headers["vary"]
    assert (other.status_code, "allow-origin" in cors(other)) == (400, False)


async def test_errors_are_readable_by_the_listed_origins(open_url: str) -> None:
    """Of whatever layer: the page learns why its call failed."""
    key = {"authorization": f"Bearer {KEY}"}
    json_key = {**key, "content-type": "application/json"}
    asked: list[tuple[int, str, str, dict[str, str]]] = [
        (200, "GET", "/v1/models", key),
        (400, "POST", "/v1/jobs", json_key),
        (401, "POST", "/v1/jobs", {}),
        (401, "GET", "/v1/models", {"x-api-key": "wrong"}),
        (404, "GET", "/v1/x", key),
        (404, "GET", "/v1/jobs/job-0-" + "0" * 32, key),
        (405, "PUT", "/v1/models", key),
        (413, "POST", "/v1/jobs", json_key),
        (415, "POST", "/v1/jobs", {**key, "content-type": "text/plain"}),
        (415, "POST", "/v1/jobs", {**key, "content-encoding": "br"}),
        (431, "GET", "/v1/models", {"x": "x" * 16_300}),
    ]
    async with httpx.AsyncClient(base_url=open_url) as http:
        for status, method, path, headers in asked:
            content = bytes(5 * 2**20) if status == 413 else b""
            answer = await http.request(
                method, path, headers={"origin": APP, **headers}, content=content
            )
            assert answer.status_code == status, (answer.status_code, method, path)
            assert cors(answer) == {"allow-origin": APP, "expose-headers": "*"}, path
            assert "Origin" in answer.headers["vary"]
            assert answer.headers["x-request-id"]
            answer = await http.request(method, path, headers={"origin": "https://e.x", **headers})
            assert "allow-origin" not in cors(answer), path
            assert "Origin" in answer.headers["vary"]


async def test_a_refusal_of_load_and_a_stream_are_readable(
    gateways: Gateways, worker: FakeWorker
) -> None:
    """429 with Retry-After; and events, of which each arrives at once."""
    call = {"model": MODEL, "prompt": "ab", "max_tokens": 20, "stream": True}
    async with gateways(allowed_origins=(APP,), lane_bounds=("batch=1",)) as http:
        http.headers["origin"] = APP
        answer = await http.post("/v1/completions", json=call)
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert cors(answer)["allow-origin"] == APP
        assert "data: [DONE]" in answer.text
        job = {"endpoint": "/v1/completions", "lane": "batch", "body": call | {"stream": False}}
        refused = await http.post("/v1/jobs", json=job)
        assert (refused.status_code, cors(refused)["allow-origin"]) == (429, APP)


async def test_listed_origins_may_change_what_callers_may(gateways: Gateways) -> None:
    """Without keys by themselves; the console's session stays with the gateway's own pages, as the
    token of its changes cannot be read elsewhere."""
    async with gateways(allowed_origins=(APP,)) as http:
        for site in ("cross-site", "same-site"):
            headers = [("origin", APP), ("sec-fetch-site", site)]
            for session, code in (([], "missing_required_parameter"), (SESSION, TOKEN_MISSING)):
                answer = await ask(http, "POST", "/v1/jobs", headers, session, json={})
                assert answer.json()["error"]["code"] == code
        for headers in ([("origin", f"{APP}:444")], [("sec-fetch-site", "same-site")]):
            assert is_refused(await ask(http, "POST", "/v1/jobs", headers, json={}))


async def test_any_origin_may_call_but_not_with_cookies(gateways: Gateways) -> None:
    """`*` opens what needs no cookie."""
    async with gateways(allowed_origins=("*",)) as http:
        url = str(http.base_url).rstrip("/")
        found = await http.options("/v1/jobs", headers=preflight("https://any.example", "POST"))
        assert (found.status_code, cors(found)["allow-origin"]) == (200, "*")
        assert "allow-credentials" not in cors(found)
        for headers in foreign_headers(url):
            answer = await ask(http, "POST", "/v1/jobs", headers, json={})
            assert answer.json()["error"]["code"] == "missing_required_parameter"
            assert cors(answer).get("allow-origin", "*") == "*"
            assert is_refused(await ask(http, "POST", "/v1/jobs", headers, SESSION))
        for headers in own_headers(url):
            assert not is_refused(await ask(http, "POST", "/v1/jobs", headers, SESSION))


async def test_without_the_setting_there_is_no_cors(url: str) -> None:
    async with httpx.AsyncClient(base_url=url) as http:
        answer = await http.options("/v1/jobs", headers=preflight(url, "POST"))
        assert (answer.status_code, cors(answer)) == (405, {})
        assert cors(await http.get("/v1/models", headers={"origin": url})) == {}


# --- the settings -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        *("app.example.com", "https://app.example.com/", "https://app.example.com/x", "null"),
        *("https://*.example.com", "file://", "1://a", "https://u@a", "https://b\u00fcch.er", "**"),
        *("https://a:port", "https://a:", "http://[::1", "https://a?b", "https://a#b", "https://"),
    ],
)
def test_what_is_no_origin_is_refused_at_the_start(wrong: str) -> None:
    """The message names the variable and the text."""
    with pytest.raises(ValueError, match=r"BATCHWAY_ALLOWED_ORIGINS: .* is no origin") as caught:
        GatewaySettings.from_env(redis_url="redis://x", allowed_origins=f"https://ok, {wrong}")
    assert repr(wrong) in str(caught.value)


def test_an_origin_is_kept_as_browsers_write_it() -> None:
    """So that the text of the setting need not be the very same; desktop programs have schemes."""
    written = (
        "HTTPS://App.Example.com:443, http://[::1]:080,http://localhost:3000,tauri://localhost,*"
    )
    settings = GatewaySettings.from_env(redis_url="redis://x", allowed_origins=written)
    assert settings.allowed_origins == (
        APP, "http://[::1]", "http://localhost:3000", "tauri://localhost", "*"
    )  # fmt: skip


@pytest.mark.parametrize("wrong", ["nginx", "localhost", "10.0.0.1/8", "*", "10.0.0.0/33"])
def test_a_proxy_without_an_address_is_refused_at_the_start(wrong: str) -> None:
    """A name would have to be looked up."""
    with pytest.raises(ValueError, match="BATCHWAY_TRUSTED_PROXIES"):
        GatewaySettings.from_env(redis_url="redis://x", trusted_proxies=f"10.0.0.0/8,{wrong}")
