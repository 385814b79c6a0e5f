"""Validates the `callback` of a job's body. Errors name the field."""

from contract.callback_secrets import is_secret
from contract.callback_urls import BadCallbackUrl, parse_callback_url
from contract.callbacks import Callback, CallbackKind, is_open_target
from gateway.http.errors import bad_request, invalid_value
from gateway.prepare.job_bodies import CallbackBody
from gateway.settings import GatewaySettings

PROGRESS_TOKENS = 256  # default number of tokens between two progress messages


def to_callback(
    body: CallbackBody | None, tenant: str, settings: GatewaySettings
) -> Callback | None:
    """The body's callback; None if it has none. Raises ApiError without a URL or a secret."""
    if body is None:
        return None
    kind, target = _target(body)
    events = body.events or []
    progress_tokens = body.progress_tokens or PROGRESS_TOKENS if "job.progress" in events else 0
    if body.progress_tokens is not None and not progress_tokens:
        message = "callback.progress_tokens is for callbacks with the event job.progress"
        raise invalid_value("callback.progress_tokens", message)
    callback = Callback(
        kind=kind,
        target=target,
        secret=body.secret,
        is_full=body.payload == "full",
        notifies_start="job.started" in events,
        progress_tokens=progress_tokens,
    )
    if kind is CallbackKind.URL:
        _check_url(callback, tenant, settings)
    else:
        _check_aws(callback, settings)
    return callback


def _target(body: CallbackBody) -> tuple[CallbackKind, str]:
    given = {
        CallbackKind.URL: body.url,
        CallbackKind.SQS: body.sqs,
        CallbackKind.SNS: body.sns,
        CallbackKind.EVENTBRIDGE: body.eventbridge,
        CallbackKind.LAMBDA: body.function,
        CallbackKind.S3: body.s3,
    }
    targets = [(kind, target) for kind, target in given.items() if target is not None]
    if len(targets) != 1:
        names = ", ".join(kind.value for kind in given)
        raise invalid_value("callback", f"callback needs exactly one of {names}")
    return targets[0]


def _check_url(callback: Callback, tenant: str, settings: GatewaySettings) -> None:
    try:
        parse_callback_url(callback.target, settings.allowed_targets())
    except BadCallbackUrl as exc:
        raise invalid_value("callback.url", f"callback.url {exc}") from None
    if callback.secret is None and not settings.known_secrets().of(tenant):
        raise bad_request(
            "missing_required_parameter",
            "callback.secret is missing, and this installation has none of its own: messages are "
            "always signed",
            "callback.secret",
        )
    if callback.secret is not None and not is_secret(callback.secret):
        message = "callback.secret must be `whsec_` and 24 to 64 bytes in base64"
        raise invalid_value("callback.secret", message)


def _check_aws(callback: Callback, settings: GatewaySettings) -> None:
    param = f"callback.{callback.kind}"
    if not is_open_target(callback, settings.callback_aws):
        raise invalid_value(param, f"{param} is not open to callbacks here")
    if callback.secret is not None:
        message = "callback.secret is for URLs: AWS says who sent a message"
        raise invalid_value("callback.secret", message)
