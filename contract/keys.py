"""Every key and channel in Redis. The Lua functions derive the same names from `tag`.

All keys of a partition share one hash tag, so that they live in one slot of a cluster and one
function may touch them all. docs/protocol.md says what each holds.
"""

import msgspec


class Keys(msgspec.Struct, frozen=True):
    """Names under `{bw:<namespace>:<partition>}`."""

    namespace: str = "default"
    partition: int = 0

    def __post_init__(self) -> None:
        if not self.namespace or set(self.namespace) & set("{}:* \n"):
            raise ValueError(
                f"namespace {self.namespace!r} may not be empty or hold any of '{{}}:* '"
            )

    @property
    def tag(self) -> str:
        return f"{{bw:{self.namespace}:{self.partition}}}"

    def job(self, job_id: str) -> str:
        return f"{self.tag}:job:{job_id}"

    def jobs(self, tenant: str) -> str:
        return f"{self.tag}:jobs:{tenant}"

    def log(self, job_id: str) -> str:
        return f"{self.tag}:log:{job_id}"

    def queue(self, model: str, lane: str, tenant: str) -> str:
        return f"{self.tag}:q:{model}:{lane}:{tenant}"

    def back(self, model: str, lane: str) -> str:
        return f"{self.tag}:back:{model}:{lane}"

    def active(self, model: str, lane: str) -> str:
        return f"{self.tag}:active:{model}:{lane}"

    def calibration(self, model: str, lane: str) -> str:
        return f"{self.tag}:calibration:{model}:{lane}"

    def counters(self, model: str, lane: str) -> str:
        return f"{self.tag}:counters:{model}:{lane}"

    def line(self, model: str, lane: str, tenant: str) -> str:
        return f"{self.tag}:line:{model}:{lane}:{tenant}"

    def tenant(self, tenant: str) -> str:
        return f"{self.tag}:tenant:{tenant}"

    def lengths(self, model: str, lane: str, tenant: str = "") -> str:
        """Of a tenant's outputs in a lane, or of all of the lane."""
        return f"{self.tag}:lengths:{model}:{lane}:{tenant}"

    def totals(self, model: str) -> str:
        return f"{self.tag}:totals:{model}"

    def told(self, incarnation: str) -> str:
        """What a worker has counted, as far as it is in the totals."""
        return f"{self.tag}:told:{incarnation}"

    @property
    def deliveries(self) -> str:
        """Attempts to deliver callbacks, by outcome."""
        return f"{self.tag}:deliveries"

    @property
    def corrections(self) -> str:
        """Counters and lists that a sweep has set right, by kind."""
        return f"{self.tag}:corrections"

    def recount(self, part: str) -> str:
        """`place`, `sums`, `lists`: how far sweeps are that hold counters against records."""
        return f"{self.tag}:recount:{part}"

    def stored(self, what: str) -> str:
        """`jobs`, `tenants`: the bytes that are stored of each until it is forgotten."""
        return f"{self.tag}:stored:{what}"

    def pool(self, model: str) -> str:
        return f"{self.tag}:pool:{model}"

    def idempotency(self, tenant: str, key: str) -> str:
        return f"{self.tag}:idem:{tenant}:{key}"

    def owned(self, incarnation: str) -> str:
        return f"{self.tag}:own:{incarnation}"

    def running(self, incarnation: str) -> str:
        return f"{self.tag}:run:{incarnation}"

    def workers(self, model: str) -> str:
        return f"{self.tag}:workers:{model}"

    def worker(self, incarnation: str) -> str:
        return f"{self.tag}:worker:{incarnation}"

    def model(self, name: str) -> str:
        return f"{self.tag}:model:{name}"

    def tokenizer(self, sha256: str) -> str:
        return f"{self.tag}:tokenizer:{sha256}"

    @property
    def models(self) -> str:
        return f"{self.tag}:models"

    @property
    def api_keys(self) -> str:
        return f"{self.tag}:api_keys"

    def api_key(self, prefix: str) -> str:
        return f"{self.tag}:api_key:{prefix}"

    @property
    def key_pepper(self) -> str:
        return f"{self.tag}:key_pepper"

    @property
    def leases(self) -> str:
        return f"{self.tag}:leases"

    @property
    def deadlines(self) -> str:
        return f"{self.tag}:deadlines"

    def suspects(self, model: str) -> str:
        return f"{self.tag}:q:{model}:suspect"

    def turn(self, model: str) -> str:
        return f"{self.tag}:turn:{model}"

    def alone(self, model: str) -> str:
        return f"{self.tag}:alone:{model}"

    @property
    def attended(self) -> str:
        return f"{self.tag}:attended"

    @property
    def kept(self) -> str:
        return f"{self.tag}:kept"

    @property
    def orphaned(self) -> str:
        return f"{self.tag}:orphaned"

    @property
    def object_store(self) -> str:
        return f"{self.tag}:object_store"

    @property
    def quarantine(self) -> str:
        return f"{self.tag}:quarantine"

    @property
    def poison(self) -> str:
        return f"{self.tag}:poison"

    @property
    def memory(self) -> str:
        """`full` or `free`, for a moment: whether there is memory for more jobs."""
        return f"{self.tag}:memory"

    @property
    def outbox(self) -> str:
        return f"{self.tag}:outbox"

    def outbox_record(self, job_id: str) -> str:
        return f"{self.tag}:out:{job_id}"

    def due(self, destination: str) -> str:
        return f"{self.tag}:due:{destination}"

    def flying(self, destination: str) -> str:
        return f"{self.tag}:flying:{destination}"

    def dead_letters(self, tenant: str) -> str:
        return f"{self.tag}:dead:{tenant}"

    @property
    def run_id(self) -> str:
        return f"{self.tag}:runid"

    def events_channel(self, job_id: str) -> str:
        return f"{self.tag}:ev:{job_id}"

    def wake_channel(self, model: str) -> str:
        return f"{self.tag}:wake:{model}"

    def control_channel(self, incarnation: str) -> str:
        return f"{self.tag}:ctl:{incarnation}"
