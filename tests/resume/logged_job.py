"""A job and its log, cut at any position, without Redis."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import msgspec

from contract.codec import decode_job, decode_logged, encode
from contract.events import LogEntry, LogEvent
from contract.function_types import Claimed
from contract.jobs import Endpoint, Job, SamplingParams
from tests.fleet import Answer


@dataclass
class LoggedJob:
    """What Redis stores of a job; `num_tokens` is the number of output tokens."""

    job: Job
    log: list[LogEntry] = field(default_factory=list)
    num_tokens: int = 0
    num_claims: int = 0
    has_ended: bool = False

    def claim(self) -> Claimed:
        """Claims the job for the next worker, in the form sent to workers."""
        self.num_claims += 1
        return Claimed(
            job=decode_job(encode(self.job)),
            epoch=self.num_claims,
            attempt=self.num_claims,
            next_number=len(self.log) + 1,
            hash="",
            num_logged_tokens=self.num_tokens,
            deadline_s=1e6,
            is_alone=False,
        )

    def append(self, event: LogEvent, num_tokens: int) -> None:
        """Logs an event, encoded and decoded as in Redis."""
        assert not self.has_ended
        self.log.append(decode_logged(b"%d  " % (len(self.log) + 1) + encode(event)))
        self.num_tokens += num_tokens

    def cut(self, num_events: int) -> "LoggedJob":
        """The same job under its own id, interrupted after this many logged events."""
        job = msgspec.structs.replace(self.job, id=f"{self.job.id}-cut-{num_events}")
        log = self.log[:num_events]
        return LoggedJob(job, log, sum(num_tokens_of(entry) for entry in log), num_claims=1)

    def cuts(self) -> list["LoggedJob"]:
        """The job interrupted before its first event and after each. After the last event only the
        end is missing."""
        return [self.cut(num_events) for num_events in range(len(self.log) + 1)]

    @property
    def answer(self) -> Answer:
        """The log as a caller reads it; positions are checked."""
        answer = Answer()
        for entry in self.log:
            answer.add(entry)
        return answer


def num_tokens_of(entry: LogEntry) -> int:
    deltas = getattr(entry.event, "deltas", ())
    return sum(len(delta.token_ids) for delta in deltas)


def new_job(job_id: str, *prompts: Seq[int], **params: Any) -> Job:
    fields: dict[str, Any] = {"max_tokens": 32, "seed": 7, "temperature": 0.0, **params}
    return Job(
        id=job_id,
        tenant="t",
        model="m",
        lane="standard",
        endpoint=Endpoint.COMPLETIONS,
        prompt_ids=tuple(prompts[0]) if len(prompts) == 1 else (),
        prompt_list=tuple(map(tuple, prompts)) if len(prompts) > 1 else (),
        params=SamplingParams(**fields),
        created_s=0,
    )
