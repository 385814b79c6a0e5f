"""Secrets reach a function's settings from Secrets Manager only."""

import json
import secrets

import boto3
import pytest

from contract.connection import redis_url_of
from gateway.aws.environment import SecretUnavailable, load_settings, read_secrets

pytestmark = pytest.mark.usefixtures("aws_environ")


def make_secret(name: str, text: str) -> str:
    """Under a name of its own: moto's server is that of all tests."""
    client, name = boto3.client("secretsmanager"), f"{name}-{secrets.token_hex(4)}"
    return str(client.create_secret(Name=name, SecretString=text)["ARN"])


def test_secrets_become_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The API key and the Redis password. The function's environment has neither."""
    key = make_secret("key", json.dumps({"BATCHWAY_API_KEY": "s" * 32}))
    user = make_secret("user", json.dumps({"username": "gateway", "REDIS_PASSWORD": "p/w@1"}))
    monkeypatch.setenv("REDIS_URL", "rediss://gateway@cache.example:6379")
    monkeypatch.setenv("BATCHWAY_SECRET_ARNS", f"{key},{user}")

    settings = load_settings()

    assert settings.api_key == "s" * 32
    assert settings.redis_url == "rediss://gateway:p%2Fw%401@cache.example:6379"
    assert "s" * 32 not in repr(settings)


def test_errors_name_a_missing_or_malformed_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its ARN and the reason, without its value."""
    odd = make_secret("odd", "hunter2")
    with pytest.raises(SecretUnavailable, match="not a JSON object") as odd_error:
        read_secrets([odd])
    missing = "arn:aws:secretsmanager:eu-central-1:1:secret:none"
    with pytest.raises(SecretUnavailable, match=f"{missing}.*ResourceNotFoundException"):
        read_secrets([missing])
    monkeypatch.setenv("AWS_ENDPOINT_URL_SECRETS_MANAGER", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with pytest.raises(SecretUnavailable, match="Could not connect"):
        read_secrets([odd])
    assert "hunter2" not in str(odd_error.value)


@pytest.mark.parametrize(
    ("url", "password", "expected"),
    [
        (None, "p", None),
        ("redis://h:1/0", "", "redis://h:1/0"),
        ("redis://h:1/0", "p w", "redis://:p%20w@h:1/0"),
        ("rediss://user@h:1", "p", "rediss://user:p@h:1"),
        ("rediss://user:own@h:1", "p", "rediss://user:own@h:1"),
        ("unix:///run/redis.sock", "p", "unix:///run/redis.sock"),
    ],
)
def test_redis_password_is_put_into_redis_url(
    url: str | None, password: str, expected: str | None
) -> None:
    environ = {"REDIS_PASSWORD": password} | ({"REDIS_URL": url} if url else {})
    assert redis_url_of(environ) == expected


def test_settings_of_the_operator_take_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over those of the template. A word that is no setting is named; what a function must not do
    stays off."""
    monkeypatch.setenv("REDIS_URL", "redis://h:1")
    monkeypatch.setenv("BATCHWAY_SYNC_DEADLINE_S", "900")
    words = "BATCHWAY_SYNC_DEADLINE_S=60 BATCHWAY_LANE_BOUNDS=interactive=2s,standard=9s"
    monkeypatch.setenv("BATCHWAY_SETTINGS", f"{words} BATCHWAY_FEEDS_BATCHES=1")
    settings = load_settings()
    assert settings.sync_deadline_s == 60
    assert settings.lane_bounds == ("interactive=2s", "standard=9s")
    assert not settings.feeds_batches
    for wrong in ("BATCHWAY_LANE_BOUND=x", "BATCHWAY_LANE_BOUNDS", "x"):
        monkeypatch.setenv("BATCHWAY_SETTINGS", wrong)
        with pytest.raises(ValueError, match=f"no setting '{wrong.partition('=')[0]}'"):
            load_settings()
