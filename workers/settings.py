"""Settings of a worker, from its command line."""

import os
import secrets
import socket
from dataclasses import dataclass, field
from pathlib import Path

from contract.jobs import DEFAULT_LANES
from workers.ipc.messages import EngineOptions
from workers.lanes import Lane, lanes_to_claim

LANES = DEFAULT_LANES
VLLM_ENGINE = "workers.vllm_engine"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """One worker: a supervisor and its engine process. Times are in seconds."""

    redis_url: str
    served_model_name: str
    engine: EngineOptions
    namespace: str = "default"
    partition: int = 0  # whose jobs it takes
    lanes: tuple[str, ...] = LANES
    lease_s: float = 10.0  # a worker that sends nothing for so long loses its jobs
    max_crashes: int = 3  # a job fails as poison when this many engines have died on it
    step_timeout_s: float = 300.0  # an engine with work that sends nothing for so long is killed
    drain_s: float = 30.0  # on SIGTERM, the process ends within so long
    drain_release_s: float = 10.0  # so long before that, running jobs are released
    spot_notice: str = ""  # a path or http:// address (see supervisor/drain.py); '': none
    engine_module: str = "workers.engine_process.engine_loop"  # run as `python -m`
    engine_python: str = ""  # the engine's interpreter; '': the supervisor's
    object_store: str = ""  # a directory or s3://…; '': none
    object_min_bytes: int = 16 * 1024  # results below this stay in Redis
    batching_path: Path | None = None  # None: batching.yaml beside the model, if it exists
    candidate_path: Path | None = None  # this worker runs it in an A/B with the file above
    candidate_share: float = 0.5  # of the jobs, for the workers of the candidate
    metrics_port: int | None = None  # serves metrics on loopback; None: not served
    auto_truncate: bool = False  # gateways cut prompts that are too long for the model
    notice: str = ""  # what operators should know of it; '': nothing
    # Of LoadProgress; '': none. Set where a container's entry reads it for its health check.
    progress_path: str = field(default_factory=lambda: os.environ.get("BATCHWAY_PROGRESS", ""))

    def engine_options(self) -> EngineOptions:
        """The engine's options with its file as it is now. Raises ConfigurationError."""
        from workers import configuration  # needs PyYAML, which a gateway does not have

        return configuration.configured(self.engine, self.batching_path, self.candidate_path)

    def lane_terms(self, options: EngineOptions) -> dict[str, Lane]:
        """Priorities and minimum shares of the lanes to claim from, in the order of claims.

        Includes the lanes that batching.yaml adds, unless the command line names lanes.
        """
        return lanes_to_claim(self.lanes, options.lanes, adds_given=self.lanes == LANES)

    @property
    def heartbeat_s(self) -> float:
        return self.lease_s / 4

    @property
    def self_fence_s(self) -> float:
        """The seconds without a renewal of its leases after which a worker drops its jobs."""
        return 0.8 * self.lease_s


def new_incarnation() -> str:
    """A new id for one run of a worker, unique over all hosts. Begins with BATCHWAY_HOST, by
    default the host's name."""
    host = os.environ.get("BATCHWAY_HOST") or socket.gethostname().split(".")[0]
    return f"{host}-{os.getpid()}-{secrets.token_hex(4)}"
