"""What each part of an installation may do in Redis: one user for each role, as ACL rules.

A function runs under its caller's rules, which are checked for each command and key inside it. So
a role holds the commands of its functions also by themselves, and what bounds it for good is the
list of keys; the list of functions keeps honest code in its place. Nobody may run code of its own,
change the server, or look for keys. docs/security.md explains, tests hold every line.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from contract.keys import Keys
from contract.library import LIBRARY

# Of every connection: redis-py's health check, the database, its name (RQ), transactions. All of
# this is in Redis 7.0; a line with a command that the server lacks is refused as a whole.
_CONNECTION = "ping select client|setname multi exec discard watch unwatch"
_SUBSCRIBES = "subscribe unsubscribe"

# Commands inside the functions that change jobs, all of them together.
_JOB_COMMANDS = (
    "del exists get hdel hexists hget hgetall hincrby hmget hscan hset hsetnx info persist pexpire "
    "publish sadd scard set smembers srem time xack xadd xclaim xdel xgroup|create xinfo|groups "
    "xlen xrange xtrim zadd zcard zcount zincrby zrange zrem zremrangebyscore zrevrange zrevrank "
    "zscan zscore"
)
_READ_COMMANDS = (
    "exists get hget hgetall hmget scard smembers time xrange zcard zcount zrange zrangebyscore "
    "zrevrange zrevrank zscore"
)

# Families of keys: what follows the tag, see contract/keys.py.
_JOB_KEYS = (
    "active alone attended back corrections counters deadlines due idle job jobs kept leases "
    "lengths line litter log out outbox own poison q quarantine recount run runid stored tenant "
    "totals weights"
)
_FLEET_KEYS = "pool worker workers models model tokenizer"
_SIGHT_KEYS = "clock clock_offset"  # read by all; the second is set by tests alone
_API_KEYS = "api_keys api_key key_pepper"

_READING_FUNCTIONS = "read list quote outbox_dead glance"
_GATEWAY_FUNCTIONS = (
    "submit cancel delete detach reprioritise attend sweep outbox_replay " + _READING_FUNCTIONS
)


@dataclass(frozen=True, slots=True)
class RedisRole:
    """One user. Words are separated by spaces; keys and channels are families under the tag."""

    purpose: str
    functions: str
    commands: str
    keeps: str = ""  # families that it reads and writes
    reads: str = ""  # families that it reads alone
    channels: str = ""
    other_keys: str = ""  # whole patterns outside the namespace
    may_load: bool = False  # the library


REDIS_ROLES: Mapping[str, RedisRole] = MappingProxyType(
    {
        "gateway": RedisRole(
            purpose="batchway gateway, and the functions in front on AWS",
            functions=_GATEWAY_FUNCTIONS,
            commands=f"{_CONNECTION} {_SUBSCRIBES} {_JOB_COMMANDS} getrange srandmember",
            keeps=f"{_JOB_KEYS} dead idem memory object_store promised",
            reads=f"{_SIGHT_KEYS} {_FLEET_KEYS} {_API_KEYS} deliveries",
            channels="ev wake ctl",
        ),
        "worker": RedisRole(
            purpose="batchway worker",
            functions="claim mine append heartbeat release blame read sweep",
            commands=f"{_CONNECTION} {_SUBSCRIBES} {_JOB_COMMANDS} lpush ltrim srandmember "
            "zrangebyscore",
            keeps=f"{_JOB_KEYS} {_FLEET_KEYS} calibration clock object_store owed told turn",
            reads="clock_offset",
            channels="ev wake ctl",
        ),
        "callbacks": RedisRole(
            purpose="batchway callbacks: the relay, and RQ with keys of its own",
            functions="outbox_take outbox_start outbox_done read",
            commands=f"{_CONNECTION} blmove blpop brpop del exists expire get hdel hexists hget "
            "hgetall hincrby hincrbyfloat hmget hset hsetnx info llen lmove lpop lpos lrange lrem "
            "persist pexpire rpush sadd scard set smembers srem time ttl xadd xlen xrange xtrim "
            "zadd zcard zcount zrange zrangebyscore zrem zremrangebyscore zscore",
            keeps="corrections due deliveries flying out outbox dead object_store",
            reads=f"{_SIGHT_KEYS} active counters job line log pool run tenant weights workers",
            other_keys="rq:*",
        ),
        "pool": RedisRole(
            purpose="the pool on AWS: looks at the queue, tells workers to drain",
            functions="drain glance",
            commands=f"{_CONNECTION} exists get hget hgetall hmget hset publish scard time "
            "xinfo|groups xrange zrange zrangebyscore",
            keeps="worker",
            reads="active back clock_offset corrections counters deliveries job own pool q totals "
            "workers",
            channels="ctl",
        ),
        "housekeeper": RedisRole(
            purpose="the deploy step and the sweeper: alone may bring code into Redis",
            functions="sweep",
            commands=f"{_CONNECTION} {_JOB_COMMANDS}",
            keeps=f"{_JOB_KEYS} memory",
            reads=_SIGHT_KEYS,
            channels="ev wake ctl",
            may_load=True,
        ),
        "operator": RedisRole(
            purpose="batchway keys, jobs, drain, callbacks list and replay",
            functions=f"{_GATEWAY_FUNCTIONS} drain",
            commands=f"{_CONNECTION} {_JOB_COMMANDS} getrange lrange",
            keeps=f"{_JOB_KEYS} dead idem memory promised worker {_API_KEYS}",
            reads=f"{_SIGHT_KEYS} calibration {_FLEET_KEYS.replace('worker ', '')} deliveries",
            channels="ev wake ctl",
        ),
        "dashboard": RedisRole(
            purpose="whoever looks on: reads jobs, queues and workers, changes nothing",
            functions=_READING_FUNCTIONS,
            commands=f"{_CONNECTION} {_SUBSCRIBES} {_READ_COMMANDS} xinfo|groups",
            reads=f"{_JOB_KEYS} {_FLEET_KEYS} {_SIGHT_KEYS} dead deliveries promised",
            channels="ev wake",
        ),
    }
)


def acl_rules(role: RedisRole, namespace: str) -> list[str]:
    """The rules of a user as ACL SETUSER takes them, without its password.

    Raises ValueError where the namespace is none.
    """
    tag = _literal(Keys(namespace).tag)
    may_write = bool(role.keeps)
    rules = ["on", f"~{tag}" if may_write else f"%R~{tag}"]  # the key that FCALL is given
    for mark, families in (("~", role.keeps), ("%R~", role.reads)):
        rules += [f"{mark}{tag}:{pattern}" for pattern in _patterns(families)]
    rules += [f"~{pattern}" for pattern in role.other_keys.split()]
    rules += ["resetchannels", *(f"&{tag}:{family}:*" for family in role.channels.split())]
    rules += ["-@all", *(f"+{command}" for command in role.commands.split())]
    for function in role.functions.split():
        call = "fcall_ro" if function in _READING_FUNCTIONS.split() else "fcall"
        rules.append(f"+{call}|{LIBRARY}_{function}")
    if role.may_load:
        rules += ["+function|list", "+function|load"]
    return rules


def setuser_line(name: str, namespace: str, password: str) -> str:
    """A line of redis-cli that makes a user anew. `password`: `>text`, or `#` and its SHA-256."""
    rules = acl_rules(REDIS_ROLES[name], namespace)
    quoted = (f'"{rule}"' if re.search(r"[\\*&|>#]", rule) else rule for rule in rules)
    return " ".join(["ACL", "SETUSER", name, "reset", password, *quoted])


# Families that are one key; the others are many, of which each goes on after a colon.
_SINGLE = (
    "attended corrections deadlines deliveries kept leases litter poison quarantine runid outbox "
    "memory models api_keys key_pepper clock_offset object_store weights"
)


def _patterns(families: str) -> list[str]:
    single = _SINGLE.split()
    return [name if name in single else f"{name}:*" for name in families.split()]


def _literal(text: str) -> str:
    """A text as a glob that matches nothing else."""
    return re.sub(r"([\[\]?\\^-])", r"\\\1", text) if re.search(r"[\[?\\]", text) else text
