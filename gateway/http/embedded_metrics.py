"""Metrics as log lines in CloudWatch's embedded metric format, for Lambda.

A function is frozen between requests and cannot be scraped, so it writes one line after each
request with what the request has added.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator

from starlette.types import ASGIApp, Receive, Scope, Send

from contract.telemetry.metrics import embedded_line
from gateway.http.metrics import GatewayMetrics

# by model, lane and name; model and lane are '' for requests without a job
_Figures = Counter[tuple[str, str, str]]


class EmbeddedMetrics:
    """ASGI middleware. `write_line` writes a line; `clock_s` returns Unix time."""

    def __init__(
        self,
        app: ASGIApp,
        metrics: GatewayMetrics,
        write_line: Callable[[str], object] = lambda line: print(line, flush=True),
        clock_s: Callable[[], float] = time.time,
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._write_line = write_line
        self._clock_s = clock_s
        self._written: _Figures = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        finally:
            if scope["type"] == "http":
                for line in self.lines():
                    self._write_line(line)

    def lines(self) -> Iterator[str]:
        """Lines with what was counted since the last call: one for each lane, and one
        for requests."""
        now = _figures(self._metrics)
        gained = now - self._written
        self._written = now
        for model, lane in sorted({(model, lane) for model, lane, _ in gained}):
            values = {name: n for (m, at, name), n in gained.items() if (m, at) == (model, lane)}
            labels = {"Model": model, "Lane": lane} if model else {}
            yield embedded_line(labels, values, dict.fromkeys(values, "Count"), self._clock_s())


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
