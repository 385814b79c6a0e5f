"""The names of keys and channels in Redis. The Lua functions derive the same names from `tag`.

All keys of a partition share one hash tag: they live in one slot of a cluster, so that one function
may use all of them. docs/protocol.md lists all keys and what each holds.
"""

import msgspec


class Keys(msgspec.Struct, frozen=True):
    """Names under `{bw:<namespace>:<partition>}`."""

    namespace: str = "default"
    partition: int = 0
    tag: str = ""  # follows from them

    def __post_init__(self) -> None:
        if not self.namespace or set(self.namespace) & set("{}:* \n"):
            raise ValueError(
                f"namespace {self.namespace!r} may not be empty or hold any of '{{}}:* '"
            )
        tag = f"{{bw:{self.namespace}:{self.partition}}}"
        msgspec.structs.force_setattr(self, "tag", tag)

    def of(self, *parts: str) -> str:
        """The key whose name behind the tag consists of these parts."""
        return ":".join((self.tag, *parts))
