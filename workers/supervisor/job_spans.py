"""Trace spans of the jobs that a worker runs: queue, prefill, decode, publish. No content.

Collects figures while a job runs and creates the spans when it leaves.
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

MAX_CHUNKS = 64  # events of a prefill span


@dataclass(slots=True)
class _Course:
    """Figures of one traced job. Nanoseconds of the wall clock; 0: not yet."""

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
        self._courses: dict[tuple[str, int], _Course] = {}

    def note_claim(self, job: HeldJob, *, is_first: bool) -> None:
        """Starts recording a job; a first claim also ends its queue span."""
        tracer, trace = self._tracing.tracer, job.job.trace
        if tracer is None or trace is None:
            return
        now_ns = self._now_ns()
        course = _Course(job, now_ns, num_before=job.num_output_tokens)
        self._courses[(job.job.id, job.epoch)] = course
        if is_first:
            _span(tracer, "queue", parent_of(trace.traceparent), trace.submitted_ns, now_ns,
                  {"batchway.lane": job.job.lane})  # fmt: skip

    def note_running(self, job_ids: Iterable[str]) -> None:
        """Notes which jobs are in the step that begins."""
        if self._courses:
            ids = set(job_ids)
            for (job_id, _), course in self._courses.items():
                if job_id in ids and not course.computed_ns:
                    course.computed_ns = self._now_ns()

    def note_token(self, job: HeldJob) -> None:
        """Notes a token of the step whose load comes next."""
        if self._courses and (course := self._courses.get((job.job.id, job.epoch))) is not None:
            course.has_token = True

    def note_step(self, load: EngineLoad) -> None:
        for course in self._courses.values():
            if not course.computed_ns:
                continue
            now_ns = self._now_ns()
            if not course.first_ns and load.num_step_tokens:
                course.num_chunks += 1
                if len(course.chunks_ns) < MAX_CHUNKS:
                    course.chunks_ns.append(now_ns)
            if course.has_token:
                course.has_token = False
                course.first_ns = course.first_ns or now_ns
                course.last_ns = now_ns
                course.num_steps += 1
                course.num_step_seqs += load.num_step_seqs
                course.step_s += load.step_s
                course.longest_step_s = max(course.longest_step_s, load.step_s)

    def note_end(self, job: HeldJob, how: str) -> None:
        """Turns the figures of a leaving job into spans."""
        course = self._courses.pop((job.job.id, job.epoch), None)
        if course is None or self._tracing.tracer is None or job.job.trace is None:
            return
        _emit(self._tracing.tracer, course, how, self._now_ns())


def _emit(tracer: "Tracer", course: _Course, how: str, now_ns: int) -> None:
    from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context

    job = course.job
    trace = job.job.trace
    assert trace is not None
    attributes = job_attributes(job.job)
    num_tokens = job.num_output_tokens - course.num_before
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
        start_time=course.claimed_ns,
    )
    if how == "failed":
        run.set_status(StatusCode.ERROR)
    within = set_span_in_context(run)
    if course.computed_ns and course.first_ns:
        prefill = {"batchway.chunks": course.num_chunks, "batchway.resumed_at": course.num_before}
        chunks = [("chunk", at_ns) for at_ns in course.chunks_ns]
        _span(tracer, "prefill", within, course.computed_ns, course.first_ns, prefill, chunks)
    if course.num_steps:
        decode = {
            "batchway.steps": course.num_steps,
            "batchway.tokens": num_tokens,
            "batchway.batch_size.mean": course.num_step_seqs / course.num_steps,
            "batchway.step_s.mean": course.step_s / course.num_steps,
            "batchway.step_s.max": course.longest_step_s,
        }
        _span(tracer, "decode", within, course.first_ns, course.last_ns, decode)
        published = {"batchway.events": job.next_number - 1}
        _span(tracer, "publish", within, course.last_ns, now_ns, published)
    run.end(now_ns)


def _span(
    tracer: "Tracer", name: str, context: Any, start_ns: int, end_ns: int,
    attributes: dict[str, Any], events: Iterable[tuple[str, int]] = (),
) -> None:  # fmt: skip
    span = tracer.start_span(name, context, attributes=attributes, start_time=start_ns)
    for event, at_ns in events:
        span.add_event(event, timestamp=at_ns)
    span.end(max(start_ns, end_ns))
