"""Counts the engine's steps for metrics, and serves the counts at `/metrics`.

All times are from the engine process's clock, as clocks of two processes are not comparable.
Requests need no key and the counts have no content, so the server listens on loopback only."""

import asyncio
import logging
from bisect import bisect_left
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Metric, start_http_server
from prometheus_client.registry import Collector

from contract.telemetry.families import counted_families
from contract.telemetry.metrics import BATCH_BOUNDS, BATCHES, Counts, Source
from workers.ipc.messages import EngineLoad
from workers.settings import WorkerSettings
from workers.supervisor.held_job import HeldJob


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
