"""Real parts for tests: a Redis per process, the function library, a client for each test."""

import functools
import gc
import itertools
import os
import re
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any, cast

import pytest
import redis.asyncio
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from contract import library
from contract.connection import connect
from contract.functions import Functions
from contract.keys import Keys
from contract.library import ensure_library
from infra.embedded_redis import EmbeddedRedis
from tests.clock import TEST_CLOCK, library_with_test_clock
from tests.cluster import Node, RedisCluster
from tests.marks import LONG
from workers import callbacks  # noqa: F401  # sets RQ's variable before a test imports rq

# Cores may be busy: how long an example takes says nothing.
settings.register_profile("random", deadline=None, suppress_health_check=[HealthCheck.too_slow])
# The same examples in each run: what a change did not break does not fail it.
settings.register_profile("batchway", settings.get_profile("random"), derandomize=True)
settings.load_profile("batchway")

# BATCHWAY_CPU_ISA=avx2 or avx512 limits the instruction set of the tests. torch and oneDNN have
# their own variables, which they read when they are imported.
_LIMITS = {"avx2": ("avx2", "AVX2"), "avx512": ("avx512", "AVX512_CORE")}
if (_isa := os.environ.get("BATCHWAY_CPU_ISA", "")) in _LIMITS:
    os.environ["ATEN_CPU_CAPABILITY"], os.environ["ONEDNN_MAX_CPU_ISA"] = _LIMITS[_isa]


# httpx reads the trusted certificates for each client, in 20 ms: clients in tests share them. They
# are certifi's, or those that SSL_CERT_FILE names.
_make_context = ssl.create_default_context
_trusted = functools.cache(lambda cafile: _make_context(cafile=cafile))


def _context(*args: Any, **options: Any) -> ssl.SSLContext:
    shares = not args and options.keys() == {"cafile"}
    return _trusted(options["cafile"]) if shares else _make_context(*args, **options)


ssl.create_default_context = _context


def pytest_collection() -> None:
    """Imported modules are never freed, so garbage collection during collection is useless."""
    gc.disable()


# Files whose tests share slow fixtures: `batchway up` on the demo model, and tiny models of all
# families with the results of transformers.
_SHARING = (
    re.compile(r"tests/e2e/"),
    re.compile(r"tests/workers/model/test_(engine_parity|families|prompt_logprobs|runner|seq)"),
)


# A server for each family, which takes twenty seconds to read its tokenizer.
_REAL_FAMILY = re.compile(r"tests/real/test_families\.py::\w+\[([\w.-]+)")


def _group(nodeid: str) -> str:
    """What one process runs: a shared group of files, a real family, or one file."""
    if family := _REAL_FAMILY.match(nodeid):
        return family[1]
    return next((g.pattern for g in _SHARING if g.match(nodeid)), nodeid.split("::")[0])


_SAMPLED = {"each_value": 1, "each_pair": 2}


def leave_a_sample(items: list[pytest.Item]) -> None:
    """Marks the cases of tests with `each_value` or `each_pair` as long, except those which
    together have each value, or each pair of values, of their parameters ("each choice" and
    "pairwise" testing: Grindal, Offutt, Andler, "Combination testing strategies", 2005)."""
    of_tests: dict[tuple[Any, ...], list[tuple[pytest.Item, set[Any]]]] = {}
    for item in items:
        marker = next((m for m in item.iter_markers() if m.name in _SAMPLED), None)
        if marker is None or item.get_closest_marker("long") is not None:
            continue
        size = _SAMPLED[marker.name]
        values = sorted((name, repr(v)) for name, v in cast(Any, item).callspec.params.items())
        test = item.nodeid.partition("[")[0], item.get_closest_marker("campaign") is not None
        of_tests.setdefault(test, []).append((item, {*itertools.combinations(values, size)}))
    for cases in of_tests.values():
        uses: Counter[Any] = Counter()
        while cases:
            # The case with most that is new; of several, the one whose values are rarest so far.
            item, choices = max(
                cases, key=lambda case: (len(case[1] - uses.keys()), -sum(uses[c] for c in case[1]))
            )
            if choices <= uses.keys():
                break
            uses.update(choices)
            cases.remove((item, choices))
        for item, _ in cases:
            for mark in LONG:
                item.add_marker(mark)


@pytest.hookimpl(tryfirst=True)  # before cases are left out by their markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of whole processes come first, because they wait most and others use that time, then
    the long walks over the protocol, then files that take one process long. Those of overload come
    last: they measure how fast the machine is."""

    def place(item: pytest.Item) -> int:
        if item.nodeid.startswith("tests/overload/"):
            return 3
        if item.get_closest_marker("e2e") is not None or "test_walks" in item.nodeid:
            return 0
        return 1 if _SHARING[1].match(item.nodeid) else 2

    leave_a_sample(items)
    items.sort(key=place)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling | None:
    """`--dist=loadfile`, with groups of files that share a process."""
    if config.getvalue("dist") != "loadfile":
        return None
    scheduler = LoadScopeScheduling(config, log)
    scheduler._split_scope = _group
    return scheduler


def pytest_collection_finish() -> None:
    """Freezes all objects: to search torch and three thousand tests takes half a second."""
    gc.freeze()
    gc.enable()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints how many tests were skipped, one line for each reason."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(str(report.longrepr[2]).removeprefix("Skipped: ") for report in skipped)
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count} skipped: {reason}")


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def redis_server() -> Iterator[EmbeddedRedis]:
    """With BATCHWAY_TEST_CLUSTER, which `scripts/with-redis cluster` sets, a cluster of three
    shards, each with a replica; its URL names a replica."""
    with RedisCluster() if os.environ.get("BATCHWAY_TEST_CLUSTER") else EmbeddedRedis() as server:
        yield cast("EmbeddedRedis", server)


@pytest.fixture
def redis_node(redis_server: EmbeddedRedis, keys: Keys) -> EmbeddedRedis | Node:
    """The one server that holds `keys`; its URL is that of a socket."""
    if isinstance(redis_server, RedisCluster):
        return redis_server.owner(keys.tag)
    return redis_server


@pytest.fixture(scope="session", autouse=True)
def test_clock() -> Iterator[None]:
    """Makes this process load the library with the test clock, which it reads once."""
    source = library_with_test_clock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "library_source", lambda: source)
        yield


@pytest.fixture
async def redis_client(
    redis_server: EmbeddedRedis, keys: Keys
) -> AsyncIterator[redis.asyncio.Redis]:
    """A client of an empty server with the library loaded."""
    client = connect(redis_server.url, keys)
    if isinstance(redis_server, RedisCluster):
        redis_server.flush()
    else:
        await client.flushall()
    await ensure_library(client)
    yield client
    if not isinstance(redis_server, RedisCluster):
        await client.delete(TEST_CLOCK)
    await client.aclose()


@pytest.fixture
def keys() -> Keys:
    return Keys("test")


@pytest.fixture
def functions(redis_client: redis.asyncio.Redis, keys: Keys) -> Functions:
    return Functions(redis_client, keys)
