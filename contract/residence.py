"""Marks of what a worker holds in its memory: prefixes of prompts, and sessions.

Gateways mark a job's prompt, workers what they have computed, and `claim` compares the two
(contract/lua/_residence.lua). A mark is a hash over the tenant's name, so no tenant's prompt tells
anything of another's.
"""

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from itertools import count

from contract.jobs import Job

MARK_BYTES = 8
_NO_SESSION = bytes(MARK_BYTES)
_FIRST = 64  # tokens: shorter prefixes are not worth a wait
_PER_DOUBLING = 4


def marks_of(job: Job) -> bytes:
    """The mark of a job's session, or zeros, then those of its prompt's prefixes, if it has one
    prompt. Empty where there are none."""
    session = session_mark(job.tenant, job.session) if job.session else _NO_SESSION
    prefixes = b"" if job.prompt_list or job.pooling else prefix_marks(job.tenant, job.prompt_ids)
    return session + prefixes if job.session or prefixes else b""


def mark_positions() -> Iterator[int]:
    """The lengths of marked prefixes, in tokens: 64, 80, 96, 112, 128, 160, …"""
    for octave in count():
        step = (_FIRST << octave) // _PER_DOUBLING
        for i in range(_PER_DOUBLING):
            yield (_FIRST << octave) + i * step


def prefix_marks(tenant: str, token_ids: Sequence[int]) -> bytes:
    """The marks of all marked prefixes of the tokens, one after another."""
    hashed = _hash_of(tenant, b"prefix")
    marks, start = list[bytes](), 0
    for end in mark_positions():
        if end > len(token_ids):
            return b"".join(marks)
        hashed.update(array("q", token_ids[start:end]).tobytes())
        marks.append(hashed.copy().digest())
        start = end
    raise AssertionError("positions have no end")


def session_mark(tenant: str, session: str) -> bytes:
    """The mark of a tenant's session, by the name that its callers give it."""
    hashed = _hash_of(tenant, b"session")
    hashed.update(session.encode())
    return hashed.digest()


def _hash_of(tenant: str, kind: bytes) -> hashlib.blake2b:
    key = hashlib.blake2b(tenant.encode()).digest()
    return hashlib.blake2b(key=key, digest_size=MARK_BYTES, person=kind)
