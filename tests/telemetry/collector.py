"""A small receiver of OTLP over HTTP that keeps every span."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.loopback import Handler, running_server


@dataclass(frozen=True)
class SpanSeen:
    """One received span."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    num_events: int


@dataclass
class Collector:
    """All received spans. `url` is for OTEL_EXPORTER_OTLP_ENDPOINT."""

    url: str = ""
    spans: list[SpanSeen] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)

    def take(self, body: bytes) -> None:
        self.bodies.append(body)
        request = ExportTraceServiceRequest()
        request.ParseFromString(body)
        for resource in request.resource_spans:
            service = _values(resource.resource.attributes)["service.name"]
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self.spans.append(
                        SpanSeen(
                            service,
                            span.name,
                            span.trace_id.hex(),
                            span.span_id.hex(),
                            span.parent_span_id.hex(),
                            span.start_time_unix_nano,
                            span.end_time_unix_nano,
                            _values(span.attributes),
                            len(span.events),
                        )
                    )

    def named(self, name: str) -> list[SpanSeen]:
        return [span for span in self.spans if span.name == name]


def _values(attributes: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in attributes}


@contextmanager
def running_collector() -> Iterator[Collector]:
    collector = Collector()

    class Taking(Handler):
        def do_POST(self) -> None:  # named by http.server
            collector.take(self.body())
            self.answer(200)

    with running_server(Taking) as collector.url:
        yield collector
