"""Counts of one gateway. Jobs are counted in Redis, for all gateways together."""

from collections import Counter
from collections.abc import Mapping

from contract.jobs import Job

MAX_TENANTS = 50  # with a label of their own; further ones share one
OTHER = "other"
_METHODS = frozenset({"GET", "HEAD", "POST", "PATCH", "DELETE", "OPTIONS", "PUT"})
_NO_LABELS = ()

Labels = tuple[str, ...]  # label values, in the order of contract/telemetry/metrics.py


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
