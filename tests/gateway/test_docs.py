"""The documents are complete: settings, routes, codes."""

import re
from pathlib import Path

import pytest

from contract.errors import ErrorCode
from gateway.http.errors import STATUS_BY_CODE
from gateway.prepare.response_bodies import UNSUPPORTED_OF_RESPONSES
from gateway.prepare.unsupported import IGNORED, UNSUPPORTED
from gateway.prepare.vector_bodies import UNSUPPORTED_OF_VECTORS
from gateway.settings import GatewaySettings
from infra.options import GATEWAY_DRAIN_S

DOCS = Path(__file__).parents[2] / "docs"
GATEWAY = Path(__file__).parents[2] / "gateway"


API_PAGE = (DOCS / "api.md").read_text()


def test_every_error_code_has_a_status_and_a_line() -> None:
    """Each error code of the contract."""
    assert set(STATUS_BY_CODE) == set(ErrorCode)
    assert [code for code in ErrorCode if f"`{code}`" not in API_PAGE] == []


def test_every_code_of_the_gateway_is_documented() -> None:
    """Codes are quoted words in the source; the table has a line for each."""
    pattern = r'(?:ApiError\(\s*\d+,|bad_request\(|_dropped\(\d+,)\s*"([a-z_]+)"'
    codes = set()
    for path in GATEWAY.rglob("*.py"):
        codes |= set(re.findall(pattern, path.read_text()))
    assert len(codes) > 10
    assert {code for code in codes if f"`{code}`" not in API_PAGE} == set()


def test_every_unsupported_or_ignored_parameter_is_documented() -> None:
    names = {*IGNORED, *UNSUPPORTED, *UNSUPPORTED_OF_VECTORS, *UNSUPPORTED_OF_RESPONSES}
    assert [name for name in names if f"`{name}`" not in API_PAGE] == []


def test_settings_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty variable counts as unset, and secrets are not shown."""
    environ = {"REDIS_URL": "redis://x", "BATCHWAY_API_KEY": "k" * 16, "BATCHWAY_POLL_S": "2"}
    environ |= {"BATCHWAY_ALLOWED_HOSTS": "a, b", "BATCHWAY_DRAIN_S": ""}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    settings = GatewaySettings.from_env()
    assert (settings.poll_s, settings.allowed_hosts) == (2.0, ("a", "b"))
    assert settings.redis_url == "redis://x"
    assert settings.drain_s == GATEWAY_DRAIN_S  # which `batchway gateway --help` tells
    assert "k" * 16 not in repr(settings)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("REDIS_URL", ""),
        ("BATCHWAY_POLL_S", "soon"),
        ("BATCHWAY_POLL_S", "0"),
        ("BATCHWAY_POLL_S", "inf"),
        *[("BATCHWAY_BATCH_PRICE", price) for price in ("-0.1", "1.5", "nan", "half")],
        ("BATCHWAY_API_KEY", "short-secret"),
        ("BATCHWAY_KEY_PEPPER", "short-secret"),
        ("BATCHWAY_MAX_BODY_BYTES", "1.5"),
        ("BATCHWAY_DRAIN_S", "-1"),
        ("BATCHWAY_LANE_BOUNDS", "batch"),
        ("BATCHWAY_CALLBACK_ALLOW", "10.0.0.0/99"),
        ("BATCHWAY_CALLBACK_SECRETS", "acme=short-secret"),
        ("BATCHWAY_OBJECT_STORE", "s3://"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the start, not at the first request. A secret is not repeated."""
    monkeypatch.setenv("REDIS_URL", "redis://x")
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"^{name}: ") as refused:
        GatewaySettings.from_env()
    assert "short-secret" not in f"{refused.value}{refused.value.__cause__}"
