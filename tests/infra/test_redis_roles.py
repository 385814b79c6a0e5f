"""The users of Redis: each part has the permissions that it needs, and no others."""

import contextlib
import itertools
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
import redis.asyncio
from openai import AsyncOpenAI
from redis.exceptions import NoPermissionError, ResponseError

from contract.callbacks import Callback, CallbackKind
from contract.connection import Listener, broker_errors, connect
from contract.errors import CommandDenied
from contract.functions import Functions
from contract.keys import Keys
from contract.library import LIBRARY, library_source
from contract.pauses import PauseLine, Pauses
from contract.starts import ANY_LANE, Starts
from infra.aws.pool_service import PoolWatch
from infra.embedded_redis import EmbeddedRedis
from infra.preconditions import UsageError, check_store
from infra.redis_roles import REDIS_ROLES, acl_rules
from tests.batches.test_batches import ended, jsonl, line, results, start
from tests.callbacks.callbacks_process import callbacks_processes
from tests.callbacks.receiver import SECRET, Answer, Receiver, always
from tests.clock import TEST_CLOCK
from tests.contract.some_calls import make_job, make_submission
from tests.fleet import fleet, until
from tests.gateway.conftest import make_settings, running_gateway
from tests.oracle.other_walks import FilesWalk, OperationsWalk, OutboxWalk
from tests.oracle.walk import Walk, walk
from tests.oracle.world import new_world

PASSWORD = "a-password"
NAMES = sorted(REDIS_ROLES)
FUNCTIONS = sorted({name for role in REDIS_ROLES.values() for name in role.functions.split()})
READING = {"read", "list", "quote", "outbox_dead", "snapshot", "watch"}
FORBIDDEN = """
EVAL 'return 1' 0|EVAL_RO 'return 1' 0|EVALSHA 0 0|EVALSHA_RO 0 0|SCRIPT LOAD x|SCRIPT FLUSH
SCRIPT KILL|SCRIPT EXISTS x|FUNCTION DELETE batchway_v1|FUNCTION FLUSH|FUNCTION DUMP
FUNCTION RESTORE x|FUNCTION KILL|CONFIG GET *|CONFIG SET maxmemory 1|CONFIG RESETSTAT
CONFIG REWRITE|FLUSHALL|FLUSHDB|SWAPDB 0 1|KEYS *|SCAN 0|RANDOMKEY|DBSIZE|MODULE LIST
MODULE LOAD x|ACL LIST|ACL SETUSER x on|ACL WHOAMI|DEBUG SLEEP 0|SHUTDOWN NOSAVE|SAVE|BGSAVE
BGREWRITEAOF|LASTSAVE|REPLICAOF NO ONE|FAILOVER|PSYNC x 0|SYNC|CLUSTER INFO|CLIENT LIST
CLIENT KILL TYPE normal|CLIENT PAUSE 1|CLIENT NO-EVICT on|MONITOR|SLOWLOG GET|LATENCY DOCTOR
MEMORY STATS|MIGRATE h 1 k 0 1|RESTORE k 0 x|DUMP k|SORT k|RENAME a b|COPY a b|MOVE a 1
OBJECT ENCODING k|PSUBSCRIBE *|PUBSUB CHANNELS|WAIT 0 0|SPUBLISH c x
"""
# Commands that parts send but do not need: another role loads the library, and RQ works without
# its address.
DISPENSABLE = {
    ("gateway", "function|list"),
    ("worker", "function|list"),
    ("flows", "function|list"),
    ("flows", "config|get"),
    ("gateway", "config|get"),  # to detect servers that may truncate a write
    ("worker", "config|get"),
    ("callbacks", "client|info"),
    ("callbacks", "client|list"),
}
COMMANDS = [c for line in FORBIDDEN.strip().splitlines() for c in line.split("|")]


def role_url(server_url: str, name: str) -> str:
    return server_url.replace("unix://", f"unix://{name}:{PASSWORD}@")


def run_command(client: redis.Redis, *words: str) -> Any:
    """Runs a command; redis-py does not annotate it."""
    return client.execute_command(*words)  # type: ignore[no-untyped-call]


def make_users(client: redis.Redis, namespace: str) -> None:
    for name, role in REDIS_ROLES.items():
        rules = ["reset", f">{PASSWORD}", *acl_rules(role, namespace)]
        run_command(client, "ACL SETUSER", name, *rules)


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedRedis]:
    """A separate server. The housekeeper has loaded the library."""
    with EmbeddedRedis() as server, redis.Redis.from_url(server.url) as admin:
        make_users(admin, "test")
        with redis.Redis.from_url(role_url(server.url, "housekeeper")) as housekeeper:
            housekeeper.function_load(library_source())
        yield server


@pytest.fixture(params=NAMES)
def user(server: EmbeddedRedis, request: pytest.FixtureRequest) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(role_url(server.url, request.param)) as client:
        yield client


def name_of(user: redis.Redis) -> str:
    name: str = user.connection_pool.connection_kwargs["username"]
    return name


# --- what is refused --------------------------------------------------------------------------


def test_roles_cannot_run_scripts_or_change_the_server(
    server: EmbeddedRedis, user: redis.Redis
) -> None:
    """Sixty commands that no part needs. Redis denies each by the rules and when called. Some
    are disabled in this server for all users, which Redis checks first."""
    assert len(COMMANDS) >= 60
    with redis.Redis.from_url(server.url) as admin:
        for command in COMMANDS:
            words = command.replace("'", "").split(" ")
            verdict = run_command(admin, "ACL DRYRUN", name_of(user), *words)
            assert b"no permissions" in verdict, command
            with pytest.raises(ResponseError, match=r"no permissions|command not allowed"):
                run_command(user, *words)


def test_only_the_housekeeper_loads_functions(user: redis.Redis) -> None:
    """Other roles run them, but cannot replace them."""
    is_housekeeper = name_of(user) == "housekeeper"
    if is_housekeeper:
        user.function_load(library_source(), replace=True)
        return
    with pytest.raises(NoPermissionError):
        user.function_load(library_source(), replace=True)


def test_each_role_calls_only_its_functions(user: redis.Redis) -> None:
    own = REDIS_ROLES[name_of(user)].functions.split()
    for function in sorted(set(FUNCTIONS) - set(own)):
        for call in (user.fcall, user.fcall_ro):
            with pytest.raises(NoPermissionError):
                call(f"{LIBRARY}_{function}", 1, Keys("test").tag)


def test_roles_cannot_touch_other_keys(user: redis.Redis) -> None:
    """Of other namespaces and programs, nor their channels."""
    foreign = (Keys("other").of("job", "x"), "x")
    for key in foreign:
        with pytest.raises(NoPermissionError):
            run_command(user, "HSET", key, "a", "b")
    with pytest.raises(NoPermissionError):
        run_command(user, "PUBLISH", "elsewhere", "x")
    with pytest.raises(NoPermissionError):
        run_command(user, "SUBSCRIBE", Keys("other").of("ev", "x"))


def test_only_operators_may_write_api_keys(user: redis.Redis) -> None:
    """Gateways may read them, other roles may not."""
    keys, name = Keys("test"), name_of(user)
    looks = [("GET", keys.of("key_pepper")), ("HMGET", keys.of("api_key", "x"), "record")]
    changes = [("HSET", keys.of("api_key", "x"), "record", "y"), ("SADD", keys.of("api_keys"), "x")]
    for command in looks if name not in ("gateway", "flows", "operator") else []:
        with pytest.raises(NoPermissionError):
            run_command(user, *command)
    for command in changes if name != "operator" else []:
        with pytest.raises(NoPermissionError):
            run_command(user, *command)


def test_the_dashboards_role_is_read_only(server: EmbeddedRedis) -> None:
    """It has no writable key and no writing command."""
    role = REDIS_ROLES["dashboard"]
    rules = acl_rules(role, "test")
    with redis.Redis.from_url(server.url) as admin:
        writing = set(run_command(admin, "ACL CAT", "write"))
    assert all(rule.startswith("%R~") for rule in rules if "~" in rule)
    assert not {command.encode() for command in role.commands.split()} & writing


# --- what works -------------------------------------------------------------------------------


@dataclass
class RoleClients:
    """A client that makes each call as one of the users whose role has the function, in turns."""

    redis_url: str
    turns: dict[str, Iterator[str]]  # an endless cycle of the roles of each function
    calls: Counter[tuple[str, str]]

    def __post_init__(self) -> None:
        self._clients = {
            name: connect(role_url(self.redis_url, name), Keys("test")) for name in NAMES
        }

    def execute_command(self, verb: str, name: str, *args: Any, **options: int) -> Any:
        call: Any = self._client_for(name).execute_command
        return call(verb, name, *args, **options)

    def fcall(self, name: str, *args: Any) -> Any:
        return self._client_for(name).fcall(name, *args)

    def fcall_ro(self, name: str, *args: Any) -> Any:
        return self._client_for(name).fcall_ro(name, *args)

    def _client_for(self, name: str) -> redis.asyncio.Redis:
        function = name.removeprefix(f"{LIBRARY}_")
        role = next(self.turns[function])
        self.calls[role, function] += 1
        return self._clients[role]

    async def aclose(self) -> None:
        for client in self._clients.values():
            await client.aclose()


@pytest.mark.campaign
def test_every_function_runs_under_every_role_that_has_it(server: EmbeddedRedis) -> None:
    """Random walks, with another user for each call. No permission is missing."""
    owned = {(name, f) for name in NAMES for f in REDIS_ROLES[name].functions.split()}
    owners = {f: sorted(name for name in NAMES if (name, f) in owned) for f in FUNCTIONS}
    turns: dict[str, Iterator[str]] = {f: itertools.cycle(names) for f, names in owners.items()}
    calls: Counter[tuple[str, str]] = Counter()
    with redis.Redis.from_url(server.url) as admin:
        make_users(admin, "world")
        for name in NAMES:
            run_command(admin, "ACL SETUSER", name, f"%R~{TEST_CLOCK}")
        try:
            for seed in range(6):
                for draws in (Walk, OutboxWalk, FilesWalk, OperationsWalk):
                    with new_world(server.url, RoleClients(server.url, turns, calls)) as world:
                        walk(world, draws, seed, 150, check_every=0)
        finally:
            make_users(admin, "test")
    assert set(calls) == owned


@pytest.fixture
def few_denials(server: EmbeddedRedis) -> Iterator[None]:
    """Redis denies only commands that parts can do without."""
    with redis.Redis.from_url(server.url) as admin:
        run_command(admin, "ACL LOG", "RESET")
        yield
        assert {(e["username"], e["object"]) for e in admin.acl_log()} <= DISPENSABLE


@pytest.mark.e2e
@pytest.mark.anyio
@pytest.mark.usefixtures("few_denials")
async def test_a_request_with_a_callback_works_under_the_roles(server: EmbeddedRedis) -> None:
    """Gateway, worker and callbacks, each with its own user."""
    settings = make_settings(role_url(server.url, "gateway"))
    async with (
        Receiver({"/well": always(Answer())}) as receiver,
        fleet(role_url(server.url, "worker"), 1),
        callbacks_processes(role_url(server.url, "callbacks"), 1),
    ):
        with running_gateway(settings) as url:
            async with httpx.AsyncClient(base_url=url, timeout=30) as http:

                async def is_ready() -> bool:
                    workers = (await http.get("/readyz")).json().get("workers", {})
                    return bool(workers.get("m"))

                await until(is_ready)
                body = {"model": "m", "prompt": "ab", "max_tokens": 8}
                whole = await http.post("/v1/completions", json=body)
                streamed = await http.post("/v1/completions", json=body | {"stream": True})
        await submit_with_callback(server, receiver.url("/well"))
        await until(lambda: has_received(receiver))
    assert whole.status_code == 200
    assert "data: [DONE]" in streamed.text


@pytest.mark.e2e
@pytest.mark.anyio
@pytest.mark.usefixtures("few_denials")
async def test_a_batch_runs_under_the_roles(server: EmbeddedRedis, tmp_path: Path) -> None:
    """From its file's upload to the deletion of both files."""
    settings = make_settings(role_url(server.url, "gateway"), object_store=str(tmp_path))
    async with fleet(role_url(server.url, "worker"), 1):
        with running_gateway(settings) as url:
            async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:

                async def is_ready() -> bool:
                    return "m" in [model.id async for model in client.models.list()]

                await until(is_ready)
                lines = [line(f"{number}", model="m") for number in range(3)]
                batch = await ended(client, await start(client, jsonl(lines)))
                assert len(await results(client, batch.output_file_id)) == len(lines)
                assert [found.id async for found in client.batches.list()] == [batch.id]
                for file in [file async for file in client.files.list()]:
                    await client.files.delete(file.id)


@pytest.mark.e2e
@pytest.mark.anyio
@pytest.mark.usefixtures("few_denials")
async def test_flows_run_under_their_role(server: EmbeddedRedis, tmp_path: Path) -> None:
    """A gateway with models.yaml publishes and runs a flow of a worker's model."""
    path = tmp_path / "models.yaml"
    path.write_text("models: [{name: vote, ensemble: {members: [m, m], combine: vote}}]")
    settings = make_settings(role_url(server.url, "flows"), models=str(path))
    async with fleet(role_url(server.url, "worker"), 1):
        with running_gateway(settings) as url:
            async with httpx.AsyncClient(base_url=url, timeout=30) as http:

                async def answers() -> bool:
                    body = {"model": "vote", "prompt": "ab", "max_tokens": 8}
                    return (await http.post("/v1/completions", json=body)).status_code == 200

                await until(answers)


async def has_received(receiver: Receiver) -> bool:
    return bool(receiver.accepted())


async def submit_with_callback(server: EmbeddedRedis, target: str) -> None:
    """Submits a job as the gateway's user."""
    callback = Callback(kind=CallbackKind.URL, target=target, secret=SECRET)
    async with connect(role_url(server.url, "gateway"), Keys("test")) as client:
        functions = Functions(client, Keys("test"))
        await functions.submit(make_job(), make_submission(callback=callback))


def test_the_printed_commands_create_working_users(server: EmbeddedRedis) -> None:
    command = [sys.executable, "-m", "infra", "redis-roles", "--namespace", "shown"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    lines = [line for line in shown.splitlines() if line.startswith("ACL SETUSER")]
    assert [line.split()[2] for line in lines] == list(REDIS_ROLES)
    with redis.Redis.from_url(server.url) as admin:
        for line in lines:
            words = shlex.split(line)[2:]
            run_command(admin, "ACL SETUSER", f"shown-{words[0]}", *words[1:])
            made = admin.acl_getuser(f"shown-{words[0]}")
            assert "on" in made["flags"]
            assert len(made["keys"]) > 5
            assert len(made["passwords"]) == 1


def test_special_characters_of_a_namespace_are_escaped() -> None:
    """In key patterns."""
    rules = acl_rules(REDIS_ROLES["pool"], "a[b]?")
    assert r"~{bw:a\[b\]\?:*}:worker:*" in rules


@pytest.mark.parametrize("name", ["gateway", "worker", "callbacks"])
def test_different_object_stores_are_detected_under_a_role(
    server: EmbeddedRedis, name: str, tmp_path: Path
) -> None:
    """The first part writes the name of its store to Redis; others must have the same."""
    first, second = (str(tmp_path / part) for part in ("first", "second"))
    for folder in (first, second):
        Path(folder).mkdir()
    url = role_url(server.url, name)
    check_store(url, "test", first)
    check_store(url, "test", first)
    with pytest.raises(UsageError, match="keeps its objects in dir:"):
        check_store(url, "test", second)
    with redis.Redis.from_url(server.url) as admin:
        admin.delete(Keys("test").of("object_store"))


def test_rules_of_single_keys_match_those_keys(server: EmbeddedRedis) -> None:
    """A single key written as a family, or the reverse, would give no permission."""
    keys = Keys("test")
    singles = {
        name: getattr(keys, name)
        for name, kind in vars(Keys).items()
        if isinstance(kind, property) and name != "tag"
    }
    families = {name: key.removeprefix(f"{keys.tag}:") for name, key in singles.items()}
    with redis.Redis.from_url(server.url) as admin:
        for role_name, role in REDIS_ROLES.items():
            for name, family in families.items():
                if family in f"{role.keeps} {role.reads}".split():
                    verdict = run_command(admin, "ACL DRYRUN", role_name, "EXISTS", singles[name])
                    assert b"key" not in (verdict or b""), (role_name, name)


@pytest.mark.anyio
@pytest.mark.parametrize("name", ["gateway", "flows"])
async def test_gateways_may_pause_for_a_tenant(server: EmbeddedRedis, name: str) -> None:
    """Which counts the pauses that there are."""
    client = connect(role_url(server.url, name), Keys("test"))
    pauses, line = Pauses(client, Keys("test")), PauseLine(lane="standard", tenant="t")
    assert (await pauses.pause(line, "tenant")).by == "tenant"
    assert await pauses.resume(line, "tenant")
    await client.aclose()


@pytest.mark.anyio
async def test_errors_name_a_denied_command_and_its_user(server: EmbeddedRedis) -> None:
    """For a command, one inside a function, and a channel. The error is not retried and quotes
    no argument."""
    with redis.Redis.from_url(server.url) as admin:
        rules = [rule for rule in acl_rules(REDIS_ROLES["gateway"], "test") if rule != "+zadd"]
        run_command(admin, "ACL SETUSER", "poor", "reset", f">{PASSWORD}", *rules)
    client = connect(role_url(server.url, "poor"), Keys("test"))
    async with contextlib.aclosing(client):
        with pytest.raises(CommandDenied, match="'poor' LPUSH"), broker_errors(client, "LPUSH"):
            await client.lpush("x", "secret")
        with pytest.raises(CommandDenied, match="a key of GET"), broker_errors(client, "GET"):
            await client.get("elsewhere")
        with pytest.raises(CommandDenied, match=r"'poor' FCALL batchway_v1_submit \(a command in"):
            await Functions(client, Keys("test")).submit(make_job(), make_submission())
        with pytest.raises(CommandDenied, match="'poor' a channel of SUBSCRIBE"):
            await follow(client, "elsewhere")


async def follow(client: redis.asyncio.Redis, channel: str) -> None:
    """Reads a channel as a worker does."""
    with broker_errors(client, "SUBSCRIBE"):
        async with client.pubsub() as pubsub:
            await pubsub.subscribe(channel)
            listener = Listener(pubsub, lambda _: None)
            while True:
                await listener.listen()


@pytest.mark.anyio
async def test_the_pool_reports_under_its_role(server: EmbeddedRedis) -> None:
    """What it decides, when a worker is ready, that starts have failed and no longer do; and it
    reads demand."""
    keys = Keys("test")
    async with connect(role_url(server.url, "pool"), Keys("test")) as client:
        starts = Starts(client, keys)
        await starts.decide("pooled", 2)
        await starts.announce("pooled", 60.0)
        await starts.report_failure("pooled", "three in a row", retry_in_s=60.0)
        await starts.forget_failures(["pooled"])
        assert not (await PoolWatch(client, keys, "pooled", ("standard",)).look()).is_wanted
    async with connect(role_url(server.url, "gateway"), Keys("test")) as client:
        starts = Starts(client, keys)
        await starts.want("pooled", ANY_LANE, 60.0)
        assert await starts.num_wanted("pooled") == 2
        assert await starts.failures() == {}
    async with connect(role_url(server.url, "pool"), Keys("test")) as client:
        assert (await PoolWatch(client, keys, "pooled", ("standard",)).look()).is_wanted
