"""Counts of one gateway, and their log lines in CloudWatch's embedded metric format. Jobs are
counted in Redis, for all gateways together."""

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from contract.errors import ErrorCode
from contract.jobs import Job
from contract.telemetry.metrics import embedded_line

MAX_TENANTS = 50  # with a label of their own; further ones share one
OTHER = "other"
_METHODS = frozenset({"GET", "HEAD", "POST", "PATCH", "DELETE", "OPTIONS", "PUT"})
_NO_LABELS = ()
_FUNCTION_VARIABLE = "AWS_LAMBDA_FUNCTION_NAME"  # set by Lambda
_COLD = (b"x-dropped-reason", ErrorCode.NO_WORKERS.encode())

Labels = tuple[str, ...]  # label values, in the order of contract/telemetry/metrics.py

# by model, lane and name; model and lane are '' for requests without a job
_Figures = Counter[tuple[str, str, str]]


class GatewayMetrics:
    """The counts of one app, as plain numbers: only the metrics page imports prometheus_client."""

    def __init__(self) -> None:
        self._admission: Counter[Labels] = Counter()
        self._tenant_admission: Counter[Labels] = Counter()
        self._requests: Counter[Labels] = Counter()
        self._num_resumed = 0
        self._num_streams = 0
        self._tenants: set[str] = set()

    def note_acceptance(self, job: Job, *, is_new: bool) -> None:
        """Counts a submitted job; `is_new` is False if an Idempotency-Key found an earlier one."""
        self._note(job, "accepted" if is_new else "known", "")

    def note_refusal(self, job: Job, reason: str) -> None:
        self._note(job, "refused", reason)

    def note_resumed(self) -> None:
        """Counts a stream that continues an earlier one."""
        self._num_resumed += 1

    def note_request(self, route: str, method: str, status: int) -> None:
        """Counts by route, not by path, because a path may contain an id."""
        self._requests[route, method if method in _METHODS else OTHER, str(status)] += 1

    def note_stream(self, sign: int) -> None:
        """Counts open streams: `sign` is 1 when a stream begins and -1 when it ends."""
        self._num_streams += sign

    def counts(self) -> Mapping[str, Mapping[Labels, int]]:
        """A copy of the current values, by name and labels."""
        return {
            "admission_total": dict(self._admission),
            "tenant_admission_total": dict(self._tenant_admission),
            "http_requests_total": dict(self._requests),
            "resumed_streams_total": {_NO_LABELS: self._num_resumed},
            "open_streams": {_NO_LABELS: self._num_streams},
        }

    def _note(self, job: Job, outcome: str, reason: str) -> None:
        self._admission[job.model, job.lane, outcome, reason] += 1
        if len(self._tenants) < MAX_TENANTS:
            self._tenants.add(job.tenant)
        tenant = job.tenant if job.tenant in self._tenants else OTHER
        self._tenant_admission[tenant, outcome] += 1


class EmbeddedMetrics:
    """ASGI middleware for Lambda. A function is frozen between requests and cannot be scraped, so
    it writes one line after each request with what the request has added. `write_line` writes a
    line; `clock_s` returns Unix time."""

    def __init__(
        self,
        app: ASGIApp,
        metrics: GatewayMetrics,
        write_line: Callable[[str], object] = lambda line: print(line, flush=True),
        clock_s: Callable[[], float] = time.time,
        function: str = os.environ.get(_FUNCTION_VARIABLE, ""),
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._write_line = write_line
        self._clock_s = clock_s
        self._written: _Figures = Counter()
        self._function = function
        self._num_cold = 0  # since the last line

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def observed(message: Message) -> None:
            if message["type"] == "http.response.start" and _COLD in message["headers"]:
                self._num_cold += 1
            await send(message)

        try:
            await self._app(scope, receive, observed)
        finally:
            if scope["type"] == "http":
                for line in self.lines():
                    self._write_line(line)

    def lines(self) -> Iterator[str]:
        """Lines with what was counted since the last call: one for each lane, one for requests,
        and one for calls that were refused because no worker was ready. Alarms of one stack watch
        the last, so it has the function's name."""
        now = _figures(self._metrics)
        gained = now - self._written
        self._written = now
        for model, lane in sorted({(model, lane) for model, lane, _ in gained}):
            values = {name: n for (m, at, name), n in gained.items() if (m, at) == (model, lane)}
            labels = {"Model": model, "Lane": lane} if model else {}
            yield embedded_line(labels, values, dict.fromkeys(values, "Count"), self._clock_s())
        if self._num_cold:
            counted, self._num_cold = {"RefusedNoWorkers": self._num_cold}, 0
            labels = {"Function": self._function} if self._function else {}
            yield embedded_line(labels, counted, {"RefusedNoWorkers": "Count"}, self._clock_s())


def _figures(metrics: GatewayMetrics) -> _Figures:
    figures: _Figures = Counter()
    counts = metrics.counts()
    for (model, lane, outcome, _), num in counts["admission_total"].items():
        name = "JobsRefused" if outcome == "refused" else "JobsAccepted"
        figures[model, lane, name] += num
    for (_, _, status), num in counts["http_requests_total"].items():
        figures["", "", "Requests"] += num
        if status >= "500":
            figures["", "", "ServerErrors"] += num
    figures["", "", "ResumedStreams"] = sum(counts["resumed_streams_total"].values())
    return figures
