"""Signs messages as Standard Webhooks (standardwebhooks.com) says. Never logs a secret."""

import base64
import hashlib
import hmac
from collections.abc import Sequence

from contract.callback_secrets import SECRET_PREFIX


def signed_headers(
    message_id: str, timestamp_s: int, body: bytes, secrets: Sequence[str]
) -> dict[str, str]:
    """The three headers of a message; `timestamp_s` is the attempt's, Unix seconds."""
    headers = {"webhook-id": message_id, "webhook-timestamp": str(timestamp_s)}
    if secrets:
        signed = f"{message_id}.{timestamp_s}.".encode() + body
        headers["webhook-signature"] = " ".join(f"v1,{_sign(s, signed)}" for s in secrets)
    return headers


def _sign(secret: str, signed: bytes) -> str:
    key = base64.b64decode(secret.removeprefix(SECRET_PREFIX))
    return base64.b64encode(hmac.digest(key, signed, hashlib.sha256)).decode()
