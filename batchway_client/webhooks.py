"""Verifies the signatures of callbacks (https://www.standardwebhooks.com)."""

from collections.abc import Mapping
from typing import Any

from batchway_client.errors import ClientError


class BadSignature(ClientError):
    """The signature is wrong, or older than five minutes. The receiver should answer 400."""


def verify_webhook(secret: str, headers: Mapping[str, str], body: bytes) -> dict[str, Any]:
    """Returns the callback's content. Raises BadSignature.

    `secret` begins with `whsec_`; `body` is the request's body, unchanged. A callback may be
    delivered more than once, each time with the same `webhook-id` header.
    """
    from standardwebhooks.webhooks import Webhook, WebhookVerificationError

    try:
        content: dict[str, Any] = Webhook(secret).verify(body, dict(headers))
    except WebhookVerificationError as exc:
        raise BadSignature(str(exc)) from exc
    except ValueError as exc:  # a malformed header, or a body that is not UTF-8 text
        raise BadSignature("the delivery cannot be read") from exc
    return content
