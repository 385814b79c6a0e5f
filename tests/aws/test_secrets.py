"""Secrets reach a function's settings from the vault, and nothing else does."""

import json
from datetime import UTC, datetime

import boto3
import pytest
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials as BotoCredentials

from contract.redis_url import redis_url_of
from gateway.aws.environment import load_settings
from gateway.aws.secrets_manager import Credentials, SecretUnavailable, read_secret, signed_headers

CREDENTIALS = Credentials(
    region="eu-central-1",
    access_key_id="AKIDEXAMPLE",
    secret_access_key="wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY",
    session_token="token",
)


def make_secret(name: str, text: str) -> str:
    client = boto3.client("secretsmanager")
    return str(client.create_secret(Name=name, SecretString=text)["ARN"])


def test_a_request_is_signed_as_botocore_signs_it() -> None:
    """The reference implementation, on the same request at the same moment."""
    payload = b'{"SecretId": "arn"}'
    host = "secretsmanager.eu-central-1.amazonaws.com"
    ours = signed_headers(CREDENTIALS, host, payload, datetime.now(UTC))

    request = AWSRequest("POST", f"https://{host}/", data=payload, headers={})
    for name, value in ours.items():
        if name not in ("authorization", "x-amz-date", "x-amz-security-token"):
            request.headers[name] = value
    request.context["timestamp"] = ours["x-amz-date"]
    theirs = BotoCredentials("AKIDEXAMPLE", CREDENTIALS.secret_access_key, "token")
    signer = SigV4Auth(theirs, "secretsmanager", CREDENTIALS.region)
    signer._modify_request_before_signing(request)
    canonical = signer.canonical_request(request)
    signature = signer.signature(signer.string_to_sign(request, canonical), request)

    assert ours["authorization"].endswith(f"Signature={signature}")


def test_secrets_become_settings(aws_environ: dict[str, str]) -> None:
    """The key and the password of Redis; the variables of the function hold neither."""
    key = make_secret("key", json.dumps({"BATCHWAY_API_KEY": "s" * 32}))
    user = make_secret("user", json.dumps({"username": "gateway", "REDIS_PASSWORD": "p/w@1"}))
    environ = aws_environ | {
        "REDIS_URL": "rediss://gateway@cache.example:6379",
        "BATCHWAY_SECRET_ARNS": f"{key},{user}",
    }

    settings = load_settings(environ)

    assert settings.api_key == "s" * 32
    assert settings.redis_url == "rediss://gateway:p%2Fw%401@cache.example:6379"
    assert "s" * 32 not in repr(settings)


def test_a_secret_that_is_missing_or_odd_is_named(aws_environ: dict[str, str]) -> None:
    """By its ARN and the reason, never by what is in it."""
    odd = make_secret("odd", "hunter2")
    with pytest.raises(SecretUnavailable, match="not a JSON object") as odd_error:
        read_secret(odd, aws_environ)
    with pytest.raises(SecretUnavailable, match="ResourceNotFoundException"):
        read_secret("arn:aws:secretsmanager:eu-central-1:1:secret:none", aws_environ)
    nobody = aws_environ | {"AWS_ENDPOINT_URL_SECRETS_MANAGER": "http://127.0.0.1:1"}
    with pytest.raises(SecretUnavailable, match="ConnectionRefusedError"):
        read_secret(odd, nobody)
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
def test_a_password_finds_its_url(url: str | None, password: str, expected: str | None) -> None:
    """REDIS_PASSWORD fills in what REDIS_URL leaves out."""
    environ = {"REDIS_PASSWORD": password} | ({"REDIS_URL": url} if url else {})
    assert redis_url_of(environ) == expected
