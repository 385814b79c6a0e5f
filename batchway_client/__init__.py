"""A client for batchway's job API, which the `openai` package does not cover.

It submits, lists, follows, moves, cancels and deletes jobs, and verifies callbacks. A followed
stream continues after a broken connection. The client needs httpx; verifying callbacks also needs
standardwebhooks. Results have OpenAI's format and are returned as dictionaries.
"""

from batchway_client.client import AsyncClient, Client
from batchway_client.errors import (
    AnswerError,
    BadSignature,
    ClientError,
    Conflict,
    ConnectionLost,
    NotAllowed,
    NotFound,
    Unavailable,
    WaitTimeout,
)
from batchway_client.events import Event, verify_webhook
from batchway_client.jobs import Job, JobError

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
