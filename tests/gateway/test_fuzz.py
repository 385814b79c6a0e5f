"""Malformed requests: each answer is a 4xx in the gateway's format, never a 5xx."""

import httpx
import pytest

from tests.gateway.bad_requests import BAD_HOSTS, BODIES, CONTENT_TYPES, spoilt_bodies
from tests.gateway.fake_worker import FakeWorker, says
from tests.gateway.test_security import ROUTES

pytestmark = pytest.mark.anyio

JSON = {"content-type": "application/json"}
_CALLS = (
    *("completions", "chat/completions", "embeddings", "rerank", "score", "classify"),
    *("responses", "responses/input_tokens", "messages", "messages/count_tokens", "jobs", "quote"),
)
TAKES_BODIES = (
    *(("POST", f"/v1/{path}") for path in _CALLS),
    ("PATCH", "/v1/jobs/job-0-" + "0" * 32),
)


def check_refusal(answer: httpx.Response, about: object) -> None:
    """Checks the format of an error."""
    assert 400 <= answer.status_code < 500, (about, answer.status_code)
    error = answer.json()["error"]
    assert set(error) >= {"message", "type", "code", "param"}, about
    assert error["message"], about
    assert answer.headers["x-request-id"]


@pytest.mark.parametrize(("method", "path"), TAKES_BODIES)
async def test_every_bad_body_is_refused(
    idle_worker: FakeWorker, http: httpx.AsyncClient, method: str, path: str
) -> None:
    """Malformed, ambiguous, deep, large and out of range, on every route that takes a body."""
    for name, body in BODIES.items():
        answer = await http.request(method, path, content=body, headers=JSON)
        check_refusal(answer, name)


async def test_every_other_content_type_is_refused(http: httpx.AsyncClient) -> None:
    """This also keeps other sites' pages from posting."""
    for method, path in TAKES_BODIES:
        for kind in CONTENT_TYPES:
            headers = {"content-type": kind}
            answer = await http.request(method, path, content=b"{}", headers=headers)
            assert answer.status_code in (404, 415), (path, kind)
            check_refusal(answer, (path, kind))


async def test_a_spoilt_body_is_refused_or_runs(
    worker: FakeWorker, http: httpx.AsyncClient
) -> None:
    """With a fixed seed. A body that is still valid may be served."""
    worker.script = says("ab")  # at most two tokens, as most requests ask for
    num_refused = 0
    for body in spoilt_bodies(80, seed=5):
        answer = await http.post("/v1/completions", content=body, headers=JSON)
        if answer.status_code != 200:
            check_refusal(answer, body)
            num_refused += 1
    assert 50 < num_refused < 80  # some are still good


@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_no_route_answers_to_another_host(
    http: httpx.AsyncClient, method: str, path: str
) -> None:
    """Three names on each route: a foreign one, one with a user, one with a path."""
    for host in BAD_HOSTS:
        answer = await http.request(method, path, headers=[(b"host", host)])
        check_refusal(answer, (path, host))
        assert answer.json()["error"]["code"] == "untrusted_host"
