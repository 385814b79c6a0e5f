"""A client for what the `openai` package has no word for: jobs.

Submit, find, follow across broken connections, move, cancel, delete; and verify callbacks. Needs
httpx alone, and standardwebhooks for callbacks. Answers themselves are OpenAI's: read them with the
`openai` package, or as the dictionaries that they are.
"""

from batchway_client.async_client import AsyncClient
from batchway_client.client import Client
from batchway_client.errors import (
    AnswerError,
    ClientError,
    Conflict,
    ConnectionLost,
    NotAllowed,
    NotFound,
    Unavailable,
    WaitTimeout,
)
from batchway_client.events import Event
from batchway_client.jobs import Job, JobError
from batchway_client.webhooks import BadSignature, verify_webhook

__all__ = [
    "AnswerError",
    "AsyncClient",
    "BadSignature",
    "Client",
    "ClientError",
    "Conflict",
    "ConnectionLost",
    "Event",
    "Job",
    "JobError",
    "NotAllowed",
    "NotFound",
    "Unavailable",
    "WaitTimeout",
    "verify_webhook",
]
