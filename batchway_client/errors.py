"""What a call can end in.

ClientError
├── ConnectionLost      the gateway did not answer, again and again
├── WaitTimeout         the job has not ended in the time that was given
└── AnswerError         the gateway refused: status, code, param, as docs/api.md lists them
    ├── NotAllowed      401, 403
    ├── NotFound        404: no such job, or not yours
    ├── Conflict        409: it has ended, or it has not
    └── Unavailable     429, 503: try again, after `retry_after_s` where that is known
"""

import json
from collections.abc import Mapping


class ClientError(Exception):
    """Root of all errors of this package."""


class ConnectionLost(ClientError):
    """The gateway cannot be reached."""


class WaitTimeout(ClientError):
    """Patience ended before the job did, which goes on."""


class AnswerError(ClientError):
    """The gateway's error. `param` is the path of the field that is wrong, where one is."""

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
    """The key is missing or wrong, or not for this."""


class NotFound(AnswerError):
    """No such job, or not yours, or no longer kept."""


class Conflict(AnswerError):
    """The job is not in a state for this."""


class Unavailable(AnswerError):
    """No room, or nobody there, just now."""


_BY_STATUS: Mapping[int, type[AnswerError]] = {
    401: NotAllowed,
    403: NotAllowed,
    404: NotFound,
    409: Conflict,
    429: Unavailable,
    503: Unavailable,
}


def error_of(status: int, headers: Mapping[str, str], body: bytes) -> AnswerError:
    """The error that an answer of 400 or more stands for, whoever sent it."""
    code, message, param = "unknown", "the answer is not batchway's", None
    try:
        error = json.loads(body)["error"]
        code, message, param = error["code"], error["message"], error["param"]
    except (ValueError, KeyError, TypeError):
        pass  # a proxy's page
    retry_after = headers.get("retry-after", "")
    retry_after_s = float(retry_after) if retry_after.isdigit() else None
    kind = _BY_STATUS.get(status, AnswerError)
    return kind(status, code, message, param, retry_after_s)
