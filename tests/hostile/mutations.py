"""Draws writes to Redis that a role permits, from a seed.

Each is one or two commands. Denied commands do not count.
"""

import contextlib
import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import redis
from redis.exceptions import NoPermissionError, ResponseError

_NUMBERS = (b"nan", b"inf", b"-inf", b"-1", b"0", b"1.5", b"9" * 30, b"-0", b"1e300")
_BYTES = (b"", b"x", b"\xff\xfe", b"\x00" * 40, b"{" * 5000, b"\x91" * 5000, b"a b c")
_VALUES: tuple[Any, ...] = (
    None,
    -1,
    2**62,
    1e308,
    "",
    "x",
    [],
    {},
    [[]] * 3,
    b"\xff",
    True,
)


class Mutator:
    """One hostile user of Redis. `admin` only reads, to choose keys."""

    def __init__(self, user: redis.Redis, admin: redis.Redis, tag: str, seed: int) -> None:
        self._user = user
        self._admin = admin
        self._tag = tag.encode()
        self._rng = random.Random(seed)
        self.num_written = 0

    def write(self, number: int) -> None:
        """Makes `number` writes. Draws again if the role denies one, if its key has another type by
        now, or if Redis rejects a number."""
        until = self.num_written + number
        while self.num_written < until:
            keys = sorted(self._admin.scan_iter(match=self._tag + b":*", count=1000))
            with contextlib.suppress(NoPermissionError, ResponseError):
                if keys and self._rng.random() < 0.85:
                    self.damage(self._rng.choice(keys))
                else:
                    self._publish(keys)
                self.num_written += 1

    def damage(self, key: bytes) -> None:
        """Damages a key, of any type. Raises NoPermissionError, ResponseError."""
        if self._rng.random() < 0.2:
            self._retype(key)
            return
        kind: Any = self._admin.type(key)
        damage: dict[bytes, Callable[[bytes], Any]] = {
            b"hash": self._damage_hash,
            b"string": self._damage_string,
            b"zset": self._damage_zset,
            b"set": lambda key: self._user.sadd(key, self._garbage(b"")),
            b"list": lambda key: self._user.lpush(key, self._garbage(b"")),
            b"stream": self._damage_stream,
        }
        if kind in damage:
            damage[kind](key)

    def _retype(self, key: bytes) -> None:
        """Replaces a key by one of another type."""
        make: Callable[[], Any] = self._rng.choice(
            [
                lambda: self._user.set(key, self._garbage(b"")),
                lambda: self._user.hset(key, "a", self._garbage(b"")),
                lambda: self._user.sadd(key, self._garbage(b"")),
                lambda: self._user.zadd(key, {self._garbage(b""): 1}),
                lambda: self._user.xadd(key, {"a": self._garbage(b"")}),
            ]
        )
        self._user.delete(key)
        make()

    def _damage_hash(self, key: bytes) -> None:
        fields: Any = self._admin.hkeys(key)
        field = self._rng.choice(sorted(fields) or [b"a"])
        if self._rng.random() < 0.3:
            self._user.hdel(key, field)
        else:
            original: Any = self._admin.hget(key, field)
            self._user.hset(key, field, self._garbage(original or b""))

    def _damage_string(self, key: bytes) -> None:
        original: Any = self._admin.get(key)
        self._user.set(key, self._garbage(original or b""))

    def _damage_zset(self, key: bytes) -> None:
        members: Any = self._admin.zrange(key, 0, -1)
        score = self._rng.choice([float("-inf"), -1.0, 0.0, 1e300, float("inf"), 1.5])
        self._user.zadd(key, {self._rng.choice([*members, self._garbage(b"")]): score})

    def _damage_stream(self, key: bytes) -> None:
        """Adds an entry with missing or wrong fields."""
        number = self._rng.choice(["*", "*", "99999-0"])
        fields = self._rng.choice([b"s", b"c", b"e", b"id"])
        entry: dict[Any, Any] = {
            fields: self._garbage(b"1 00000000 x"),
            b"cost": self._garbage(b""),
        }
        self._user.xadd(key, entry, id=number)

    def _publish(self, keys: Sequence[bytes]) -> None:
        """Publishes to the channel of a job, a worker or a model."""
        ids = [key.rsplit(b":", 1)[1] for key in keys if b":job:" in key]
        workers = [key.rsplit(b":", 1)[1] for key in keys if b":worker:" in key]
        job = self._rng.choice(ids or [b"x"])
        words = [
            b"moved %s %s %s" % (job, self._garbage(b"standard"), self._garbage(b"1")),
            b"ended %s %s" % (job, self._garbage(b"failed")),
            self._garbage(b"dry"),  # not `drain`, which workers obey
        ]
        channel, message = self._rng.choice(
            [
                (b":ev:%s" % job, self._garbage(b"1 00000000 \x92\xa6tokens\x90")),
                (b":ctl:%s" % self._rng.choice(workers or [b"x"]), self._rng.choice(words)),
                (b":wake:m", self._garbage(b"standard")),
            ]
        )
        self._user.publish(self._tag + channel, message)

    def _garbage(self, original: bytes) -> bytes:
        """A value other than the original, often similar."""
        draw = self._rng.random()
        if draw < 0.25:
            return self._rng.choice(_NUMBERS)
        if draw < 0.5:
            return self._rng.choice(_BYTES)
        if draw < 0.6:
            return original[: self._rng.randrange(len(original) + 1)]
        if draw < 0.75 and original:
            place = self._rng.randrange(len(original))
            return original[:place] + self._rng.randbytes(1) + original[place + 1 :]
        try:
            return msgspec.msgpack.encode(self._changed(msgspec.msgpack.decode(original)))
        except (msgspec.MsgspecError, UnicodeDecodeError, TypeError, RecursionError):
            return self._rng.randbytes(self._rng.randrange(60))

    def _changed(self, value: Any) -> Any:
        """A decoded record with one leaf changed."""
        if isinstance(value, dict) and value and self._rng.random() < 0.9:
            name = self._rng.choice(sorted(value, key=str))
            return value | {name: self._changed(value[name])}
        if isinstance(value, list) and value and self._rng.random() < 0.7:
            place = self._rng.randrange(len(value))
            return [*value[:place], self._changed(value[place]), *value[place + 1 :]]
        return self._rng.choice(_VALUES)
