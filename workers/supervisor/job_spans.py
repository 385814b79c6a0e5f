"""Trace spans of the jobs that a worker runs: queue, prefill, decode, publish. Without content.

Times and counts are collected while a job runs; the spans are created when the worker drops it.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from contract.telemetry.tracing import Tracing, job_attributes, parent_of
from workers.ipc.messages import EngineLoad
from workers.supervisor.held_job import HeldJob

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

_MAX_CHUNKS = 64  # events of a prefill span


@dataclass(slots=True)
class _JobRecord:
    """Times and counts of one traced job. Nanoseconds of the wall clock; 0: not yet."""

    job: HeldJob
    claimed_ns: int
    computed_ns: int = 0  # start of its first step
    first_ns: int = 0  # its first token
    last_ns: int = 0
    num_before: int = 0  # tokens in its log when it was claimed
    chunks_ns: list[int] = field(default_factory=list)  # ends of the steps before its first token
    num_chunks: int = 0
    num_steps: int = 0  # steps that gave it a token
    num_step_seqs: int = 0  # sum of their batch sizes
    step_s: float = 0.0
    longest_step_s: float = 0.0
    has_token: bool = False  # in the current step


class JobSpans:
    """The spans of one worker; does nothing while tracing is off."""

    def __init__(self, tracing: Tracing, now_ns: Callable[[], int] = time.time_ns) -> None:
        self._tracing = tracing
        self._now_ns = now_ns
        self._records: dict[tuple[str, int], _JobRecord] = {}

    def note_claim(self, job: HeldJob, *, is_first: bool) -> None:
        """Starts recording a job; a first claim also ends its queue span."""
        tracer, trace = self._tracing.tracer, job.job.trace
        if tracer is None or trace is None:
            return
        now_ns = self._now_ns()
        record = _JobRecord(job, now_ns, num_before=job.num_output_tokens)
        self._records[(job.job.id, job.epoch)] = record
        if is_first:
            _span(tracer, "queue", parent_of(trace.traceparent), trace.submitted_ns, now_ns,
                  {"batchway.lane": job.job.lane})  # fmt: skip

    def note_running(self, job_ids: Iterable[str]) -> None:
        """Records which jobs are in the step that begins."""
        if self._records:
            ids = set(job_ids)
            for (job_id, _), record in self._records.items():
                if job_id in ids and not record.computed_ns:
                    record.computed_ns = self._now_ns()

    def note_token(self, job: HeldJob) -> None:
        """Records a token; `note_step` for its step follows."""
        if self._records and (record := self._records.get((job.job.id, job.epoch))) is not None:
            record.has_token = True

    def note_step(self, load: EngineLoad) -> None:
        for record in self._records.values():
            if not record.computed_ns:
                continue
            now_ns = self._now_ns()
            if not record.first_ns and load.num_step_tokens:
                record.num_chunks += 1
                if len(record.chunks_ns) < _MAX_CHUNKS:
                    record.chunks_ns.append(now_ns)
            if record.has_token:
                record.has_token = False
                record.first_ns = record.first_ns or now_ns
                record.last_ns = now_ns
                record.num_steps += 1
                record.num_step_seqs += load.num_step_seqs
                record.step_s += load.step_s
                record.longest_step_s = max(record.longest_step_s, load.step_s)

    def note_end(self, job: HeldJob, how: str) -> None:
        """Creates the spans of a job that leaves the worker. `how`: its status, or the reason."""
        record = self._records.pop((job.job.id, job.epoch), None)
        if record is None or self._tracing.tracer is None or job.job.trace is None:
            return
        _emit(self._tracing.tracer, record, how, self._now_ns())


def _emit(tracer: "Tracer", record: _JobRecord, how: str, now_ns: int) -> None:
    from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context

    job = record.job
    trace = job.job.trace
    assert trace is not None
    attributes = job_attributes(job.job)
    num_tokens = job.num_output_tokens - record.num_before
    run = tracer.start_span(
        f"{attributes['gen_ai.operation.name']} {job.job.model}",
        parent_of(trace.traceparent),
        SpanKind.CONSUMER,
        {
            **attributes,
            "gen_ai.usage.input_tokens": job.job.num_prompt_tokens,
            "gen_ai.usage.output_tokens": job.num_output_tokens,
            "gen_ai.response.finish_reasons": job.finish_reasons,
            "batchway.epoch": job.epoch,
            "batchway.end": how,
        },
        start_time=record.claimed_ns,
    )
    if how == "failed":
        run.set_status(StatusCode.ERROR)
    within = set_span_in_context(run)
    if record.computed_ns and record.first_ns:
        prefill = {"batchway.chunks": record.num_chunks, "batchway.resumed_at": record.num_before}
        chunks = [("chunk", at_ns) for at_ns in record.chunks_ns]
        _span(tracer, "prefill", within, record.computed_ns, record.first_ns, prefill, chunks)
    if record.num_steps:
        decode = {
            "batchway.steps": record.num_steps,
            "batchway.tokens": num_tokens,
            "batchway.batch_size.mean": record.num_step_seqs / record.num_steps,
            "batchway.step_s.mean": record.step_s / record.num_steps,
            "batchway.step_s.max": record.longest_step_s,
        }
        _span(tracer, "decode", within, record.first_ns, record.last_ns, decode)
        published = {"batchway.events": job.next_number - 1}
        _span(tracer, "publish", within, record.last_ns, now_ns, published)
    run.end(now_ns)


def _span(
    tracer: "Tracer", name: str, context: Any, start_ns: int, end_ns: int,
    attributes: dict[str, Any], events: Iterable[tuple[str, int]] = (),
) -> None:  # fmt: skip
    span = tracer.start_span(name, context, attributes=attributes, start_time=start_ns)
    for event, at_ns in events:
        span.add_event(event, timestamp=at_ns)
    span.end(max(start_ns, end_ns))
