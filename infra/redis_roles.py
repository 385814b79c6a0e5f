"""Redis permissions of each part of an installation: one user per role, as ACL rules.

A function runs with its caller's permissions, checked for each command and key. So a role also
allows the commands of its functions, and its keys are the real boundary; the list of functions only
guards against mistakes. No role may run scripts, change the server, or list keys. docs/security.md
explains the roles.
"""

import argparse
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from contract.keys import Keys
from contract.library import LIBRARY
from infra import option_values

# For every connection: redis-py's health check, database, client name (RQ), the primary of a
# cluster, transactions. All exist in Redis 7.0; a server rejects a whole rule if it does not know a
# command.
_CONNECTION = "ping select client|setname cluster|slots multi exec discard watch unwatch"
_SUBSCRIBES = "subscribe unsubscribe"

# Commands inside the functions that change jobs, all of them together.
_JOB_COMMANDS = (
    "del exists get hdel hexists hget hgetall hincrby hkeys hlen hmget hrandfield hset hsetnx info "
    "persist pexpire publish sadd scard set smembers srem time unlink xack xadd xclaim xdel "
    "xgroup|create xinfo|groups xlen xrange xtrim zadd zcard zcount zincrby zrange zrank zrem "
    "zremrangebyscore zrevrange zrevrank zscore"
)
_READ_COMMANDS = (
    "exists get hget hgetall hlen hmget scard smembers time xrange zcard zcount zrange "
    "zrangebyscore zrank zrevrange zrevrank zscore"
)

# Key families: what follows the tag in contract/keys.py.
_JOB_KEYS = (
    "ab ab_jobs active alone attended back chats corrections counters deadlines due early idle job "
    "jobs kept later later_tokens leases lengths line orphaned log out outbox own paused poison q "
    "quarantine run runid stored tenant totals warm warmth weights"
)
_FLEET_KEYS = "at offers pool worker workers models model tokenizer"
_FILE_KEYS = "batch batch_parts batches batches_fed batches_open file file_bytes files objects_due"
_API_KEYS = "api_keys api_key key_pepper"

# In partition 0: how many there are, and what earlier releases kept of theirs.
_PARTITION_KEYS = "num_partitions partitions"

_READING_FUNCTIONS = "read list quote outbox_dead snapshot watch"
_GATEWAY_FUNCTIONS = (
    "enter submit cancel delete detach drain reprioritise attend sweep pause resume outbox_replay "
    f"{_READING_FUNCTIONS}"
)
_OPERATION_KEYS = "operation operations operations_open"
_OPERATION_FUNCTIONS = "operation_add operation_step operation_stop operation_take"
_FILE_FUNCTIONS = (
    "file_add file_begin file_drop file_read batch_add batch_cancel batch_move batch_save "
    "batch_take objects_due"
)


@dataclass(frozen=True, slots=True)
class RedisRole:
    """One user. Words are separated by spaces; keys and channels are families under the tag."""

    purpose: str
    functions: str
    commands: str
    keeps: str = ""  # families it reads and writes
    reads: str = ""  # families it only reads
    channels: str = ""
    other_keys: str = ""  # patterns outside the namespace
    may_load: bool = False  # the library


REDIS_ROLES: Mapping[str, RedisRole] = MappingProxyType(
    {
        "gateway": RedisRole(
            purpose="batchway gateway, and the functions in front on AWS",
            functions=f"{_GATEWAY_FUNCTIONS} {_FILE_FUNCTIONS} {_OPERATION_FUNCTIONS} warm",
            commands=f"{_CONNECTION} {_SUBSCRIBES} {_JOB_COMMANDS} getrange ltrim rpush "
            "srandmember",
            keeps=f"{_JOB_KEYS} {_FILE_KEYS} {_OPERATION_KEYS} dead idem memory num_partitions "
            "object_store promised wanted worker",
            reads=f"at clock partitions pool workers models model tokenizer {_API_KEYS} deliveries",
            channels="ev wake ctl",
        ),
        "worker": RedisRole(
            purpose="batchway worker",
            functions="claim mine append heartbeat release blame read sweep warm_take",
            commands=f"{_CONNECTION} {_SUBSCRIBES} {_JOB_COMMANDS} lpop lpush ltrim srandmember "
            "zrangebyscore",
            keeps=f"{_JOB_KEYS} {_FLEET_KEYS} calibration clock object_store owed told turn",
            reads=_PARTITION_KEYS,
            channels="ev wake ctl",
        ),
        "flows": RedisRole(
            purpose="batchway gateway --models, which runs flows: a gateway, and a worker of them",
            functions=f"{_GATEWAY_FUNCTIONS} {_FILE_FUNCTIONS} {_OPERATION_FUNCTIONS} claim mine "
            "append heartbeat release warm",
            commands=f"{_CONNECTION} {_SUBSCRIBES} {_JOB_COMMANDS} getrange lpush ltrim rpush "
            "srandmember zrangebyscore",
            keeps=f"{_JOB_KEYS} {_FLEET_KEYS} {_FILE_KEYS} {_OPERATION_KEYS} calibration clock "
            "dead idem memory num_partitions object_store owed promised told turn wanted",
            reads=f"{_API_KEYS} deliveries partitions",
            channels="ev wake ctl",
        ),
        "callbacks": RedisRole(
            purpose="batchway callbacks: the relay, and RQ with keys of its own",
            functions="outbox_take outbox_start outbox_done read",
            commands=f"{_CONNECTION} blmove blpop brpop del exists expire get getrange hdel "
            "hexists hget hgetall hincrby hincrbyfloat hlen hmget hset hsetnx info llen lmove "
            "lpop lpos lrange lrem persist pexpire rpush sadd scard set smembers srem time ttl "
            "xadd xlen xrange xtrim zadd zcard zcount zrange zrangebyscore zrank zrem "
            "zremrangebyscore zscore",
            keeps="corrections due deliveries flying out outbox dead object_store",
            reads=f"clock active counters early job line log model paused pool run tenant "
            f"weights workers {_PARTITION_KEYS}",
            other_keys="{rq}:*",
        ),
        "pool": RedisRole(
            purpose="the pool on AWS: reads the queue, orders workers to drain",
            functions="drain snapshot",
            commands=f"{_CONNECTION} exists get hdel hget hgetall hmget hset hsetnx pexpire "
            "publish sadd scard time xinfo|groups xrange zrange zrangebyscore",
            keeps="models pool worker",
            reads="active back corrections counters deliveries job line own paused q totals wanted "
            "workers",
            channels="ctl",
        ),
        "housekeeper": RedisRole(
            purpose="the deploy step and the sweeper: the only user that may load functions",
            functions="sweep",
            commands=f"{_CONNECTION} {_JOB_COMMANDS}",
            keeps=f"{_JOB_KEYS} memory",
            reads=f"clock {_PARTITION_KEYS}",
            channels="ev wake ctl",
            may_load=True,
        ),
        "operator": RedisRole(
            purpose="batchway keys, jobs, drain, check, callbacks list and replay",
            functions=f"{_GATEWAY_FUNCTIONS} {_OPERATION_FUNCTIONS}",
            commands=f"{_CONNECTION} {_JOB_COMMANDS} getrange lrange",
            keeps=f"{_JOB_KEYS} {_OPERATION_KEYS} dead idem memory promised worker {_API_KEYS}",
            reads=f"clock calibration {_FLEET_KEYS.replace('worker ', '')} deliveries "
            f"{_PARTITION_KEYS}",
            channels="ev wake ctl",
        ),
        "dashboard": RedisRole(
            purpose="observers: read jobs, queues and workers, change nothing",
            functions=_READING_FUNCTIONS,
            commands=f"{_CONNECTION} {_SUBSCRIBES} {_READ_COMMANDS} info xinfo|groups",
            reads=f"{_JOB_KEYS} {_PARTITION_KEYS} {_FLEET_KEYS} clock dead deliveries memory "
            "promised",
            channels="ev wake",
        ),
    }
)


def acl_rules(role: RedisRole, namespace: str) -> list[str]:
    """A user's rules for ACL SETUSER, without the password. Raises ValueError for an invalid
    namespace."""
    tag = _literal(Keys(namespace).tag).removesuffix("0}") + "*}"  # of every partition
    may_write = bool(role.keeps)
    rules = ["on", f"~{tag}" if may_write else f"%R~{tag}"]  # the key passed to FCALL
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
    """A redis-cli line that replaces a user. `password`: `>text`, or `#` and its SHA-256."""
    rules = acl_rules(REDIS_ROLES[name], namespace)
    quoted = (f'"{rule}"' if re.search(r"[\\*&|>#]", rule) else rule for rule in rules)
    return " ".join(["ACL", "SETUSER", name, "reset", password, *quoted])


# Families with a single key; the others continue after a colon.
_SINGLE = (
    "attended corrections deadlines deliveries kept later leases orphaned poison quarantine runid "
    "outbox memory models api_keys key_pepper object_store paused weights batches_fed batches_open "
    "operations_open file_bytes objects_due num_partitions partitions"
)


def _patterns(families: str) -> list[str]:
    single = _SINGLE.split()
    return [name if name in single else f"{name}:*" for name in families.split()]


def _literal(text: str) -> str:
    """Escapes a text for use in a glob pattern."""
    return re.sub(r"([\[\]?\\^-])", r"\\\1", text) if re.search(r"[\[?\\]", text) else text


_TO_FILL_IN = "'>PASSWORD'"


def add_redis_roles_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--namespace",
        type=option_values.namespace,
        default="default",
        metavar="NAME",
        help="the namespace whose keys the users may access (default: default)",
    )


def run_redis_roles(options: argparse.Namespace) -> int:
    print("# For redis-cli; replace each PASSWORD with a different password.")
    for name, role in REDIS_ROLES.items():
        print(f"# {name}: {role.purpose}")
        print(setuser_line(name, options.namespace, _TO_FILL_IN))
    return 0
