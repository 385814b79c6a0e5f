"""How callbacks are delivered: read once at the edge, frozen."""

from dataclasses import dataclass, field

from contract.addresses import AllowList
from contract.callback_secrets import Secrets
from workers.callbacks.ladder import RUNGS_S

MIN_KEY_CHARS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class CallbackSettings:
    """One process of relay and RQ worker. Seconds. Raises ValueError for what cannot work."""

    redis_url: str = field(repr=False)
    key: str = field(repr=False)  # signs RQ jobs; the same in all processes of a namespace
    namespace: str = "default"
    secrets: Secrets = field(default_factory=Secrets, repr=False)  # of jobs that bring none
    allow: AllowList = field(default_factory=AllowList)  # development only
    aws_targets: tuple[str, ...] = ()  # patterns of what callbacks may reach in AWS
    public_url: str = ""  # before the paths of results; "": paths alone
    object_store: str = ""
    max_concurrent: int = 32  # attempts at a time, of this process
    max_per_target: int = 8  # of all processes together, to one destination
    timeout_s: float = 15.0  # of an attempt, from name lookup to the end of the answer
    lease_s: float = 5.0  # an attempt unheard of for so long is made again
    poll_s: float = 0.2  # how often the outbox is looked at
    rungs_s: tuple[float, ...] = RUNGS_S
    drain_s: float = 20.0

    def __post_init__(self) -> None:
        if len(self.key) < MIN_KEY_CHARS:
            raise ValueError(f"BATCHWAY_CALLBACK_KEY must have at least {MIN_KEY_CHARS} characters")
