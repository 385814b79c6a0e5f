"""What a worker tells of its work: counts of the engine's steps, served at `/metrics`, and trace
spans of jobs (queue, prefill, decode, publish), created when the worker drops them.

All times are from the engine process's clock, as clocks of two processes are not comparable.
Requests need no key and the counts have no content, so the server listens on loopback only."""

import asyncio
import logging
import time
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Metric, start_http_server
from prometheus_client.registry import Collector

from contract.telemetry.families import counted_families
from contract.telemetry.metrics import BATCH_BOUNDS, BATCHES, Counts, Source
from contract.telemetry.tracing import Tracing, job_attributes, parent_of
from workers.ipc.messages import EngineLoad
from workers.settings import WorkerSettings
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

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing
        self._records: dict[tuple[str, int], _JobRecord] = {}

    def note_claim(self, job: HeldJob, *, is_first: bool) -> None:
        """Starts recording a job; a first claim also ends its queue span."""
        tracer, trace = self._tracing.tracer, job.job.trace
        if tracer is None or trace is None:
            return
        now_ns = time.time_ns()
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
                    record.computed_ns = time.time_ns()

    def note_token(self, job: HeldJob) -> None:
        """Records a token; `note_step` for its step follows."""
        if self._records and (record := self._records.get((job.job.id, job.epoch))) is not None:
            record.has_token = True

    def note_step(self, load: EngineLoad) -> None:
        for record in self._records.values():
            if not record.computed_ns:
                continue
            now_ns = time.time_ns()
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
        _emit(self._tracing.tracer, record, how, time.time_ns())


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


class Meter:
    """Counts since the worker started, over all its engine processes."""

    def __init__(self) -> None:
        self.counts = Counts()
        self._tokens: list[tuple[HeldJob, int]] = []  # choices with a token in the current step

    def note_token(self, job: HeldJob, choice: int) -> None:
        """Records a token; `note_step` for its step follows."""
        self._tokens.append((job, choice))

    def note_step(self, load: EngineLoad) -> None:
        """Counts a step; ignores steps without tokens."""
        self._note_intervals(load.ended_s)
        self.counts.add("tokens_forced_total", value=load.num_forced_tokens)
        if not load.num_step_tokens:
            return
        counts = self.counts
        num_prefill = load.num_step_tokens - load.num_decode_tokens
        kind = "decode" if not num_prefill else "mixed" if load.num_decode_tokens else "prefill"
        counts.observe("step_duration_seconds", kind, value=load.step_s)
        counts.observe("batch_size", value=load.num_step_seqs)
        self._note_prediction(load, kind)
        num_computed = load.num_step_tokens + load.num_padding_tokens
        counts.observe("padding_ratio", value=load.num_padding_tokens / num_computed)
        counts.add("step_tokens_total", "prefill", value=num_prefill)
        counts.add("step_tokens_total", "decode", value=load.num_decode_tokens)
        counts.add("step_tokens_total", "padding", value=load.num_padding_tokens)
        counts.add("spec_decode_num_draft_tokens_total", value=load.num_drafted_tokens)
        counts.add("spec_decode_num_accepted_tokens_total", value=load.num_accepted_tokens)
        counts.add("num_preemptions_total", value=load.num_preemptions)
        counts.add("tokens_recomputed_total", value=load.num_recomputed_tokens)
        counts.add("prefix_cache_queries_total", value=load.num_prefix_queries)
        counts.add("prefix_cache_hits_total", value=load.num_prefix_hits)

    def _note_prediction(self, load: EngineLoad, kind: str) -> None:
        """Counts the model's time by batch size, and the time that was predicted. Leaves out steps
        before an engine's first prediction."""
        if load.predicted_s == 0.0:
            return
        labels = kind, BATCHES[bisect_left(BATCH_BOUNDS, load.num_step_seqs)]
        self.counts.add("steps_total", *labels)
        self.counts.add("step_model_seconds_total", *labels, value=load.model_s)
        self.counts.add("step_predicted_seconds_total", *labels, value=load.predicted_s or 0.0)

    def note_engine_failure(self) -> None:
        self._tokens.clear()
        self.counts.add("engine_failures_total")

    def _note_intervals(self, ended_s: float) -> None:
        """Counts the times between tokens; most are equal, and are counted together."""
        gaps: dict[tuple[str, float], int] = {}
        for job, choice in self._tokens:
            last_s = job.token_times_s.get(choice)
            job.token_times_s[choice] = ended_s
            if last_s is not None:
                gap = (job.job.lane, ended_s - last_s)
                gaps[gap] = gaps.get(gap, 0) + 1
        self._tokens.clear()
        for (lane, gap_s), times in gaps.items():
            self.counts.observe("inter_token_latency_seconds", lane, value=gap_s, times=times)


log = logging.getLogger(__name__)

_HOST = "127.0.0.1"


class MetricsUnservable(Exception):
    """The server cannot listen on its port."""


class _Counted(Collector):
    """Collects this worker's counts for each request."""

    def __init__(self, model: str, meter: Meter) -> None:
        self._model = model
        self._meter = meter

    def collect(self) -> Iterable[Metric]:
        # A copy, because the server runs in another thread.
        fields = {self._model: dict(self._meter.counts.fields)}
        return counted_families(fields, Source.ENGINES)


async def serve_metrics(settings: WorkerSettings, meter: Meter) -> None:
    """Serves until cancelled, if the settings name a port. Raises MetricsUnservable."""
    port = settings.metrics_port
    if port is None:
        await asyncio.Event().wait()
        return
    registry = CollectorRegistry()
    registry.register(_Counted(settings.served_model_name, meter))
    try:
        server, _ = start_http_server(port, _HOST, registry)
    except OSError as exc:
        raise MetricsUnservable(f"no metrics on {_HOST} port {port}: {exc.strerror}") from exc
    log.info("metrics on %s port %d", _HOST, port)
    try:
        await asyncio.Event().wait()
    finally:
        await asyncio.to_thread(server.shutdown)
        server.server_close()
