"""What comes from nowhere good: every answer is a 4xx of our own shape, never a 5xx."""

import httpx
import pytest

from tests.gateway.bad_requests import BODIES, CONTENT_TYPES
from tests.gateway.fake_worker import FakeWorker

pytestmark = pytest.mark.anyio

JSON = {"content-type": "application/json"}
TAKES_BODIES = (
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/jobs"),
    ("POST", "/v1/quote"),
    ("PATCH", "/v1/jobs/job-0-" + "0" * 32),
)


def check_refusal(answer: httpx.Response, about: object) -> None:
    """One shape for every error."""
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
    """Which also keeps pages elsewhere from posting here."""
    for method, path in TAKES_BODIES:
        for kind in CONTENT_TYPES:
            headers = {"content-type": kind}
            answer = await http.request(method, path, content=b"{}", headers=headers)
            assert answer.status_code in (404, 415), (path, kind)
            check_refusal(answer, (path, kind))
