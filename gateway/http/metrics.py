"""What one gateway counts of itself. What happens to jobs is counted in Redis, for all gateways."""

from collections import Counter
from collections.abc import Mapping

from contract.jobs import Job

MAX_TENANTS = 50  # that have a label of their own; all later ones share one
OTHER = "other"
_METHODS = frozenset({"GET", "HEAD", "POST", "PATCH", "DELETE", "OPTIONS", "PUT"})
_NO_LABELS = ()

Labels = tuple[str, ...]  # values, in the order in which contract/telemetry/metrics.py names them


class GatewayMetrics:
    """One for each app. Plain numbers: only a page that is asked for needs Prometheus' client."""

    def __init__(self) -> None:
        self._admission: Counter[Labels] = Counter()
        self._tenant_admission: Counter[Labels] = Counter()
        self._requests: Counter[Labels] = Counter()
        self._num_resumed = 0
        self._num_streams = 0
        self._tenants: set[str] = set()

    def note_acceptance(self, job: Job, *, is_new: bool) -> None:
        """A job was queued, or found: the same call was accepted before."""
        self._note(job, "accepted" if is_new else "known", "")

    def note_refusal(self, job: Job, reason: str) -> None:
        self._note(job, "refused", reason)

    def note_resumed(self) -> None:
        """A stream goes on from where an earlier one broke off."""
        self._num_resumed += 1

    def note_request(self, route: str, method: str, status: int) -> None:
        """By route, never by path: a path may hold an id."""
        self._requests[route, method if method in _METHODS else OTHER, str(status)] += 1

    def note_stream(self, sign: int) -> None:
        """A stream has begun (1), or ended (-1)."""
        self._num_streams += sign

    def counts(self) -> Mapping[str, Mapping[Labels, int]]:
        """By name and labels, as they are now: none of it changes afterwards."""
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
