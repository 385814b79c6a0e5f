"""How a worker runs: read once at the edge, frozen."""

import os
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path

from contract.jobs import DEFAULT_LANES
from workers.ipc.messages import EngineOptions
from workers.supervisor.lane_shares import LaneTerms, lane_terms

LANES = DEFAULT_LANES
VLLM_ENGINE = "workers.vllm_engine"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """One worker: a supervisor and its engine process. Seconds, tokens."""

    redis_url: str
    served_model_name: str
    engine: EngineOptions
    namespace: str = "default"
    lanes: tuple[str, ...] = LANES
    lease_s: float = 10.0  # a worker unheard of for so long loses its jobs
    max_crashes: int = 3  # engines that a job may take down before it is poison
    step_timeout_s: float = 300.0  # an engine with work that says nothing for so long is killed
    drain_s: float = 30.0  # on SIGTERM, how long until this process has ended
    drain_release_s: float = 10.0  # before that, what still runs is given back
    spot_notice: str = ""  # a path or http:// address that tells when to drain; '': none
    engine_module: str = "workers.engine_process.engine_loop"  # run as `python -m`
    engine_python: str = ""  # the interpreter that runs it; '': the supervisor's
    object_store: str = ""  # a directory or s3://…; '': none
    object_min_bytes: int = 16 * 1024  # results below this stay in Redis
    batching_path: Path | None = None  # None: batching.yaml beside the model, if it is there
    metrics_port: int | None = None  # of its page of metrics, on loopback; None: none

    def engine_options(self) -> EngineOptions:
        """The engine's options with what batching.yaml says now. Raises ConfigurationError."""
        from workers import configuration  # needs YAML, which a gateway does not have

        path = self.batching_path or configuration.find(self.engine.model_path)
        return self.engine if path is None else configuration.load(path).apply(self.engine)

    def lane_terms(self, options: EngineOptions) -> dict[str, LaneTerms]:
        """Priorities and minimum shares of the lanes that it takes jobs from, in claims' order.

        With the lanes that batching.yaml adds, unless the command line names some.
        """
        return lane_terms(self.lanes, options.lanes, adds_given=self.lanes == LANES)

    @property
    def heartbeat_s(self) -> float:
        return self.lease_s / 4

    @property
    def self_fence_s(self) -> float:
        """Without an answer from Redis for so long, a worker drops its jobs itself."""
        return 0.8 * self.lease_s


def new_incarnation() -> str:
    """Names one life of a worker: no two share it, not even on one host."""
    return f"{socket.gethostname().split('.')[0]}-{os.getpid()}-{secrets.token_hex(4)}"
