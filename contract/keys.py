"""The names of keys and channels in Redis. The Lua functions derive the same names from `tag`.

All keys of a partition share one hash tag: they live in one slot of a cluster, so that one function
may use all of them. docs/protocol.md lists all keys and what each holds.
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

    def of(self, *parts: str) -> str:
        """The key whose name behind the tag consists of these parts."""
        return ":".join((self.tag, *parts))

    def job(self, job_id: str) -> str:
        return self.of("job", job_id)

    def workers(self, model: str) -> str:
        return self.of("workers", model)

    def worker(self, incarnation: str) -> str:
        return self.of("worker", incarnation)

    def model(self, name: str) -> str:
        return self.of("model", name)

    @property
    def api_keys(self) -> str:
        return self.of("api_keys")

    def api_key(self, prefix: str) -> str:
        return self.of("api_key", prefix)

    def events_channel(self, job_id: str) -> str:
        return self.of("ev", job_id)

    def wake_channel(self, model: str) -> str:
        return self.of("wake", model)

    def control_channel(self, incarnation: str) -> str:
        return self.of("ctl", incarnation)
