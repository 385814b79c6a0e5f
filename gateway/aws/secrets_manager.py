"""Reads a secret from AWS Secrets Manager, with the standard library alone.

One signed request. boto3 would do it too, for some 220 ms of CPU in every cold start, which is
more than half of what the whole gateway needs. The tests hold the signature against botocore's.
"""

import hashlib
import hmac
import http.client
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Self
from urllib.parse import urlsplit

import msgspec

from contract.errors import BatchwayError

TIMEOUT_S = 5.0
_SERVICE = "secretsmanager"
_TARGET = "secretsmanager.GetSecretValue"


class SecretUnavailable(BatchwayError):
    """Secrets Manager did not give the secret; the message says why, never what is in it."""


class Credentials(msgspec.Struct, frozen=True, kw_only=True):
    """The function's own, as Lambda puts them into the environment."""

    region: str
    access_key_id: str
    secret_access_key: str
    session_token: str

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Self:
        """Raises KeyError."""
        return cls(
            region=environ["AWS_REGION"],
            access_key_id=environ["AWS_ACCESS_KEY_ID"],
            secret_access_key=environ["AWS_SECRET_ACCESS_KEY"],
            session_token=environ.get("AWS_SESSION_TOKEN", ""),
        )


def read_secret(arn: str, environ: Mapping[str, str]) -> dict[str, str]:
    """A secret that is a JSON object of strings. Raises SecretUnavailable."""
    credentials = Credentials.from_env(environ)
    default = f"https://{_SERVICE}.{credentials.region}.amazonaws.com"
    url = urlsplit(environ.get("AWS_ENDPOINT_URL_SECRETS_MANAGER") or default)
    payload = json.dumps({"SecretId": arn}).encode()
    headers = signed_headers(credentials, url.netloc, payload, datetime.now(UTC))
    is_tls = url.scheme == "https"
    connect = http.client.HTTPSConnection if is_tls else http.client.HTTPConnection
    connection = connect(url.netloc, timeout=TIMEOUT_S)
    try:
        connection.request("POST", "/", body=payload, headers=headers)
        response = connection.getresponse()
        answer = json.loads(response.read())
    except (OSError, http.client.HTTPException, ValueError) as exc:
        raise SecretUnavailable(f"{arn}: {type(exc).__name__}") from exc
    finally:
        connection.close()
    if response.status != 200:
        kind = str(answer.get("__type", "")).rpartition("#")[2]
        raise SecretUnavailable(f"{arn}: {response.status} {kind}")
    return _object_of(arn, answer.get("SecretString"))


def signed_headers(
    credentials: Credentials, host: str, payload: bytes, now: datetime
) -> dict[str, str]:
    """The headers of a POST to `/` with AWS Signature Version 4."""
    date_time = now.strftime("%Y%m%dT%H%M%SZ")
    headers = {
        "content-type": "application/x-amz-json-1.1",
        "host": host,
        "x-amz-date": date_time,
        "x-amz-target": _TARGET,
    }
    if credentials.session_token:
        headers["x-amz-security-token"] = credentials.session_token
    names = ";".join(sorted(headers))
    lines = [f"{name}:{headers[name]}" for name in sorted(headers)]
    body_hash = hashlib.sha256(payload).hexdigest()
    canonical = "\n".join(["POST", "/", "", *lines, "", names, body_hash])
    scope = f"{date_time[:8]}/{credentials.region}/{_SERVICE}/aws4_request"
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    to_sign = f"AWS4-HMAC-SHA256\n{date_time}\n{scope}\n{digest}"
    key = f"AWS4{credentials.secret_access_key}".encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    signature = hmac.digest(key, to_sign.encode(), "sha256").hex()
    authorization = (
        f"AWS4-HMAC-SHA256 Credential={credentials.access_key_id}/{scope}, "
        f"SignedHeaders={names}, Signature={signature}"
    )
    return headers | {"authorization": authorization}


def _object_of(arn: str, text: object) -> dict[str, str]:
    try:
        found = json.loads(str(text))
    except ValueError:
        found = None
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise SecretUnavailable(f"{arn}: not a JSON object of strings")
    return found
