"""Settings of callback delivery, read once at start."""

from dataclasses import dataclass, field

from contract.addresses import AllowList
from contract.callback_secrets import Secrets
from workers.callbacks.ladder import RUNGS_S

MIN_KEY_CHARS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class CallbackSettings:
    """One process with relay and RQ worker. Seconds. Raises ValueError for invalid values."""

    redis_url: str = field(repr=False)
    key: str = field(repr=False)  # signs RQ jobs; the same in all processes of a namespace
    namespace: str = "default"
    secrets: Secrets = field(default_factory=Secrets, repr=False)  # for other jobs
    allow: AllowList = field(default_factory=AllowList)  # for development only
    aws_targets: tuple[str, ...] = ()  # patterns of AWS targets that callbacks may reach
    public_url: str = ""  # prefix of result paths; "": paths only
    object_store: str = ""
    max_concurrent: int = 32  # attempts at a time in this process
    max_per_target: int = 8  # attempts at a time to one destination, over all processes
    timeout_s: float = 15.0  # of an attempt, from name lookup to the end of the answer
    lease_s: float = 5.0  # an attempt without renewal for so long is made again
    poll_s: float = 0.2  # interval of polling the outbox
    rungs_s: tuple[float, ...] = RUNGS_S
    drain_s: float = 20.0

    def __post_init__(self) -> None:
        if len(self.key) < MIN_KEY_CHARS:
            raise ValueError(f"BATCHWAY_CALLBACK_KEY must have at least {MIN_KEY_CHARS} characters")
