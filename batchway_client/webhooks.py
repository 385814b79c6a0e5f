"""Callbacks: whether a delivery is batchway's. The signatures are those of Standard Webhooks."""

from collections.abc import Mapping
from typing import Any

from batchway_client.errors import ClientError


class BadSignature(ClientError):
    """The delivery is not signed with this secret, or is older than five minutes: answer 400."""


def verify_webhook(secret: str, headers: Mapping[str, str], body: bytes) -> dict[str, Any]:
    """The delivery's content. Raises BadSignature.

    `secret` begins with `whsec_`; `body` are the bytes as they came. A delivery may come more than
    once: its `webhook-id` is always the same.
    """
    from standardwebhooks.webhooks import Webhook, WebhookVerificationError

    try:
        content: dict[str, Any] = Webhook(secret).verify(body, dict(headers))
    except WebhookVerificationError as exc:
        raise BadSignature(str(exc)) from exc
    except ValueError as exc:  # of a header that is no signature, a body that is no text
        raise BadSignature("the delivery cannot be read") from exc
    return content
