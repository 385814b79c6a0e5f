"""The errors that a call can raise.

ClientError
├── ConnectionLost      the gateway could not be reached in several attempts
├── WaitTimeout         the job did not end within the timeout
├── BadSignature        a callback was not signed with the secret, or is too old
└── AnswerError         the gateway returned an error; docs/api.md lists the codes
    ├── NotAllowed      401, 403
    ├── NotFound        404: no such job, or it belongs to another tenant
    ├── Conflict        409: the job has, or has not, ended already
    └── Unavailable     429, 503: try again, after `retry_after_s` if it is not None
"""

import json
from collections.abc import Mapping


class ClientError(Exception):
    """Root of all errors of this package."""


class ConnectionLost(ClientError):
    """The gateway cannot be reached."""


class WaitTimeout(ClientError):
    """The job did not end within the timeout; it continues."""


class BadSignature(ClientError):
    """The signature is wrong, or older than five minutes. The receiver should answer 400."""


class AnswerError(ClientError):
    """An error that the gateway returned. `param` is the path of the invalid field, or None."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(f"{status} {code}: {message}")
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


class NotAllowed(AnswerError):
    """The API key is missing or wrong, or does not permit this request."""


class NotFound(AnswerError):
    """The job does not exist, belongs to another tenant, or is no longer kept."""


class Conflict(AnswerError):
    """The job's state does not permit this request."""


class Unavailable(AnswerError):
    """The server is overloaded, a limit is reached, or no worker is available."""


_BY_STATUS: Mapping[int, type[AnswerError]] = {
    401: NotAllowed,
    403: NotAllowed,
    404: NotFound,
    409: Conflict,
    429: Unavailable,
    503: Unavailable,
}


def error_of(status: int, headers: Mapping[str, str], body: bytes) -> AnswerError:
    """The error for a response with a status of 400 or more, from the gateway or a proxy."""
    code, message, param = "unknown", "the response is not in batchway's format", None
    try:
        error = json.loads(body)["error"]
        code, message, param = error["code"], error["message"], error["param"]
    except (ValueError, KeyError, TypeError):
        pass  # for example the error page of a proxy
    retry_after = headers.get("retry-after", "")
    retry_after_s = float(retry_after) if retry_after.isdigit() else None
    kind = _BY_STATUS.get(status, AnswerError)
    return kind(status, code, message, param, retry_after_s)
