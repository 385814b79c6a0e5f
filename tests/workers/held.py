"""Jobs that a worker holds, without Redis and without an engine."""

from typing import Any

from msgspec.structs import replace
from tokenizers import Tokenizer

from contract.events import LogEntry, LogEvent
from contract.function_types import Claimed
from contract.jobs import Job
from tests.fakes import hash_tokenizer
from tests.resume.logged_job import new_job
from workers.supervisor.held_job import HeldJob


def hold(job: Job, *logged: LogEvent, cost_tokens: int = 0) -> HeldJob:
    """A claimed job with what its log has."""
    number = len(logged) + 1
    claimed = Claimed(job, 1, 1, number, "", 0, 100.0, is_alone=False, cost_tokens=cost_tokens)
    held = HeldJob(claimed, Tokenizer.from_str(hash_tokenizer().tokenizer_json))
    held.replay([LogEntry(k, "", event) for k, event in enumerate(logged, 1)])
    return held


def job_of(*prompts: tuple[int, ...], params: dict[str, Any], **fields: Any) -> Job:
    """`params` are sampling parameters, `fields` those of the job."""
    return replace(new_job("job", *prompts, **params), **fields)
