"""Sends traces with OpenTelemetry, where it is installed and configured.

`OTEL_EXPORTER_OTLP_ENDPOINT` turns it on; the SDK's other variables apply. Attributes follow the
GenAI semantic conventions and never contain a prompt or an output. Times are wall clock times of
different machines, so no metric is computed from them.
"""

import logging
import os
from collections.abc import Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import msgspec

from contract.jobs import Endpoint, Job, TraceContext

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, Tracer

log = logging.getLogger("batchway.telemetry")

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_FLUSH_MS = 2000  # at the end of a process; later spans are lost
PROVIDER = "batchway"
_OPERATIONS = {
    Endpoint.CHAT: "chat",
    Endpoint.COMPLETIONS: "text_completion",
    Endpoint.RESPONSES: "chat",
    Endpoint.EMBEDDINGS: "embeddings",
    # The conventions have no names for these.
    Endpoint.RERANK: "rerank",
    Endpoint.SCORE: "score",
    Endpoint.CLASSIFY: "classify",
}

# The span of the request that the current task answers.
current: ContextVar["Span | None"] = ContextVar("batchway_span", default=None)


class Tracing:
    """A process's tracer. Off until `open` succeeds; tests pass a `provider`."""

    def __init__(self, service: str, provider: "TracerProvider | None" = None) -> None:
        self._service = service
        self._provider = provider
        self.tracer: Tracer | None = provider.get_tracer(PROVIDER) if provider else None

    def open(self, environ: Mapping[str, str] = os.environ) -> None:
        """Starts tracing, where an endpoint is set and the extra `tracing` is installed."""
        if self.tracer is not None or not any(environ.get(name) for name in _ENDPOINTS):
            return
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError:
            log.warning("no traces: run `pip install 'batchway[tracing]'`")
            return
        resource = Resource.create({"service.name": self._service})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self.tracer = self._provider.get_tracer(PROVIDER)

    def close(self) -> None:
        """Sends the remaining spans, for at most 2 s. Blocks."""
        if self._provider is not None:
            self._provider.force_flush(_FLUSH_MS)


def traced(job: Job, now_ns: int) -> Job:
    """The job with its request's trace context; adds the job's attributes to the current span."""
    span = current.get()
    if span is None:
        return job
    span.set_attributes(job_attributes(job))
    return msgspec.structs.replace(job, trace=TraceContext(traceparent_of(span), now_ns))


def traceparent_of(span: "Span") -> str:
    """A span's `traceparent` (W3C Trace Context)."""
    context = span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def parent_of(traceparent: str) -> Any:
    """The context for a child of that span; a new trace where `traceparent` is invalid."""
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract({"traceparent": traceparent}, Context())


def job_attributes(job: Job) -> dict[str, str | int | float]:
    """A job's attributes by the GenAI semantic conventions."""
    attributes: dict[str, str | int | float] = {
        "gen_ai.operation.name": _OPERATIONS[job.endpoint],
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": job.model,
        "batchway.job_id": job.id,
        "batchway.lane": job.lane,
    }
    if job.pooling is None:
        attributes |= {
            "gen_ai.request.max_tokens": job.params.max_tokens,
            "gen_ai.request.temperature": job.params.temperature,
            "gen_ai.request.top_p": job.params.top_p,
            "gen_ai.request.choice.count": job.num_choices,
        }
    return attributes
