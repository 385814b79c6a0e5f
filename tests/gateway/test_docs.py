"""The documents say everything: settings, routes, codes."""

import re
from dataclasses import fields
from pathlib import Path

import pytest
from fastapi.routing import APIRoute

from contract.errors import ErrorCode
from gateway.http import health
from gateway.http.app import create_app
from gateway.http.errors import STATUS_BY_CODE
from gateway.jobs import job_lists, job_routes, objects, quotes
from gateway.openai import models, sync_answers
from gateway.openai.unsupported import UNSUPPORTED
from gateway.settings import GatewaySettings, variable

DOCS = Path(__file__).parents[2] / "docs"
GATEWAY = Path(__file__).parents[2] / "gateway"


def test_every_error_code_has_a_status_and_a_line() -> None:
    """What the contract can say, HTTP can say."""
    assert set(STATUS_BY_CODE) == set(ErrorCode)
    text = (DOCS / "api.md").read_text()
    for code in ErrorCode:
        assert f"`{code}`" in text, code


def test_every_code_of_the_gateway_is_documented() -> None:
    """Codes stand in the source as words in quotes; each has a line in the table."""
    text = (DOCS / "api.md").read_text()
    pattern = r'(?:ApiError\(\s*\d+,|bad_request\(|_dropped\(\d+,)\s*"([a-z_]+)"'
    codes = set()
    for path in GATEWAY.rglob("*.py"):
        codes |= set(re.findall(pattern, path.read_text()))
    assert len(codes) > 10
    assert {code for code in codes if f"`{code}`" not in text} == set()


def test_every_route_is_documented() -> None:
    """Method and path."""
    text = (DOCS / "api.md").read_text()
    modules = (sync_answers, health, job_lists, job_routes, models, objects, quotes)
    for router in (module.router for module in modules):
        for route in router.routes:
            assert isinstance(route, APIRoute)
            path = re.sub(r"\{(\w+?)_id(:path)?\}", "{id}", route.path)
            for method in route.methods or ():
                assert f"`{method} {path}`" in text, (method, path)


def test_every_unsupported_parameter_is_documented() -> None:
    """Who reads the page knows what will be refused."""
    text = (DOCS / "api.md").read_text()
    assert [name for name in UNSUPPORTED if f"`{name}`" not in text] == []


def test_every_setting_is_documented_and_read() -> None:
    """With its variable and its default; from_env reads each of them."""
    text = (DOCS / "configuration.md").read_text()
    environ = {"REDIS_URL": "redis://x", "BATCHWAY_API_KEY": "k" * 16, "BATCHWAY_POLL_S": "2"}
    settings = GatewaySettings.from_env(environ | {"BATCHWAY_ALLOWED_HOSTS": "a, b"})
    assert (settings.poll_s, settings.allowed_hosts) == (2.0, ("a", "b"))
    for spec in fields(GatewaySettings):
        assert f"`{variable(spec.name)}`" in text, spec.name
    assert "k" * 16 not in repr(settings)


@pytest.mark.parametrize(
    "environ",
    [{}, {"REDIS_URL": "x", "BATCHWAY_POLL_S": "soon"}, {"REDIS_URL": "x", "BATCHWAY_POLL_S": "0"}],
)
def test_a_wrong_setting_is_refused_by_name(environ: dict[str, str]) -> None:
    """At the start, not at the first request."""
    with pytest.raises(ValueError, match=r"REDIS_URL|BATCHWAY_POLL_S"):
        GatewaySettings.from_env(environ)


def test_the_app_is_built_without_redis() -> None:
    """Constructors build, they do not start."""
    create_app(GatewaySettings(redis_url="redis://127.0.0.1:1"))
