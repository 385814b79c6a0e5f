"""What processes keep in memory is listed in docs/reliability.md, and stays within its bounds."""

import ast
import asyncio
import contextlib
import re
import subprocess
import sys
import tracemalloc
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import redis.asyncio

from contract.api_keys import ApiKey, KeyTerms
from contract.catalogue import Catalogue
from contract.codec import encode_tokenizer
from contract.consumer import MAX_CONTROL
from contract.events import ChoiceDelta, LogEntry, Tokens
from contract.flows import Pipeline, Step
from contract.jobs import Endpoint
from contract.keys import Keys
from gateway.child_process import ChildLimits, ChildPool
from gateway.models import step_bodies
from gateway.prepare import conditions
from gateway.redis.broker import Broker
from gateway.redis.hints import Mailbox
from gateway.runners.flows.service import FlowService
from gateway.settings import GatewaySettings
from infra.embedded_redis import EmbeddedRedis
from tests.fakes import hash_tokenizer
from tests.gateway.conftest import make_settings
from tests.gateway.flows.model_files import card
from tests.test_architecture import modules_of
from workers.engine import admission_check
from workers.ipc.messages import EngineOptions
from workers.supervisor.holding import EngineLink, Holding

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (
    *("gateway", "contract", "batchway_client", "workers/supervisor", "workers/engine"),
    *("workers/engine_process", "workers/vllm_engine", "workers/ipc", "workers/callbacks"),
    "workers/output",
)
KINDS = {
    *("LRUCache", "TTLCache", "ByteCache", "OrderedDict", "deque", "Queue", "LifoQueue"),
    *("PriorityQueue", "lru_cache", "cache"),
}
_UNITS = {"KiB": 2**10, "MiB": 2**20}


def rows() -> list[tuple[list[str], str]]:
    """The modules of each row of the page's table, and the bound."""
    section = (ROOT / "docs/reliability.md").read_text().partition("## What is kept in memory")[2]
    lines = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| ")]
    return [(re.findall(r"`([\w/]+\.py)`", where), bound) for _, where, bound in lines[1:]]


def caches_in(source: str) -> set[str]:
    """The kinds of caches and queues that a module makes."""
    nodes = [*ast.walk(ast.parse(source))]
    called = [node.func for node in nodes if isinstance(node, ast.Call)]
    decorators = [
        each
        for node in nodes
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for each in node.decorator_list
    ]
    plain = [each.value if isinstance(each, ast.Subscript) else each for each in called]
    names = {ast.unparse(each).rpartition(".")[2] for each in (*plain, *decorators)}
    return names & KINDS


def test_the_page_lists_every_module_with_a_cache_or_a_queue() -> None:
    """And no module that is not there."""
    modules = {path for package in PACKAGES for path in modules_of(package)}
    found = {str(p.relative_to(ROOT)) for p in modules if caches_in(p.read_text())}
    listed = {module for where, _ in rows() for module in where}
    assert found - listed == {"contract/byte_cache.py"}, "not listed"
    assert all((ROOT / module).exists() for module in listed)


@pytest.mark.parametrize(
    "source",
    [
        "x = LRUCache(8)",
        "x = cachetools.TTLCache(1, 2)",
        "x: LRUCache[str, int] = LRUCache[str, int](8)",
        "@functools.lru_cache(maxsize=8)\ndef f(): ...",
        "@cache\ndef f(): ...",
        "x = asyncio.Queue()",
    ],
)
def test_a_cache_is_found_however_it_is_written(source: str) -> None:
    assert len(caches_in(source)) == 1
    assert not caches_in("x = cached(1)\ny: LRUCache")


def bound_of(module: str) -> int:
    """The bytes that the page states first for a module."""
    bound = next(bound for where, bound in rows() if module in where)
    number, unit = re.findall(r"(\d+) (KiB|MiB)", bound)[0]
    return int(number) * _UNITS[unit]


def number_of(module: str) -> int:
    """How many the page states last for a module, where it states no bytes first."""
    found = [re.match(r" (\d+) (?!KiB|MiB)", bound) for where, bound in rows() if module in where]
    return [int(match[1]) for match in found if match][-1]


def _fill_deaths(parts: Any) -> None:
    for number in range(3_000):
        parts._deaths[number.to_bytes(32)] = (2, f"its process ended {number}")


def _fill_keys(broker: Any) -> None:
    terms = [KeyTerms(tenant=f"{n:064}", lanes=("interactive", f"{n}")) for n in range(20_000)]
    for number, each in enumerate(terms):
        key = ApiKey(
            digest=f"{number:064x}",
            pepper_id=f"{number:08}",
            terms=each,
            created_ms=number,
            prefix=f"{number:08}",
            expires_ms=number + 10**12,
            revoked_ms=None,
            now_ms=number,
        )
        broker.key_ring._found[f"{number:08}"] = key, float(number)


def _fill_counts(broker: Any) -> None:
    for number in range(3_000):
        broker.known._num_workers[number % 16, f"{number:064}"] = number


def _fill_control(queue: Any) -> None:
    for number in range(2 * MAX_CONTROL):
        if not queue.full():
            queue.put_nowait(f"cancel job-{number:040} {number}")


def _fill_holding(holding: Any) -> None:
    for number in range(30_000):
        holding._epochs[f"job-0-{number:032}"] = number
        holding._cancelled[f"job-0-{number:032}", number] = True


SETTINGS = GatewaySettings(redis_url="redis://127.0.0.1:1")
FILLED: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "gateway/child_process.py": (lambda: ChildPool("none", {}, ChildLimits()), _fill_deaths),
    "gateway/redis/key_ring.py": (lambda: Broker(SETTINGS), _fill_keys),
    "gateway/redis/known_models.py": (lambda: Broker(SETTINGS), _fill_counts),
    "contract/consumer.py": (lambda: asyncio.Queue(MAX_CONTROL), _fill_control),
    "workers/supervisor/holding.py": (
        lambda: Holding(EngineLink(cast(EngineOptions, None))),
        _fill_holding,
    ),
}


@pytest.mark.parametrize("module", FILLED)
def test_what_is_filled_beyond_its_bound_stays_within_it(module: str) -> None:
    """With the longest names that there may be. The bound is at most ten times what is kept."""
    make, fill = FILLED[module]
    kept = make()
    tracemalloc.start()
    try:
        fill(kept)
        num_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert bound_of(module) / 10 < num_bytes < bound_of(module)


async def _num_stages(number: int) -> int:
    service: Any = SimpleNamespace(
        _workers={}, _stage_queues={}, _broker=SimpleNamespace(clock=lambda: 0.0)
    )
    for each in range(number):
        step = Step(name=f"s{each}", model="m", endpoint=Endpoint.CHAT, body={})
        flow = SimpleNamespace(definition=Pipeline(steps=(step,), batching="staged"))
        job: Any = SimpleNamespace(model="m", flow=SimpleNamespace(flow=flow))
        assert FlowService._stages_of(service, job) is not None
    return len(service._stage_queues)


async def _num_patterns(number: int) -> int:
    for each in range(number):
        conditions._pattern(f"a{each}")
    return conditions._pattern.cache_info().currsize


async def _num_templates(number: int) -> int:
    for each in range(number):
        step_bodies._compiled(f"a {{{{ input.b{each} }}}}")
    return step_bodies._compiled.cache_info().currsize


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("module", "kept"),
    [
        ("gateway/runners/flows/service.py", _num_stages),
        ("gateway/prepare/conditions.py", _num_patterns),
        ("gateway/models/step_bodies.py", _num_templates),
    ],
)
async def test_what_is_counted_stays_within_its_number(
    module: str, kept: Callable[[int], Awaitable[int]]
) -> None:
    """What an operator's file makes."""
    most = number_of(module)
    assert await kept(2 * most + 3) == most


@pytest.mark.anyio
async def test_few_tokenizers_are_kept(
    redis_server: EmbeddedRedis, redis_client: redis.asyncio.Redis, keys: Keys
) -> None:
    """Of a dozen models, each with another."""
    broker = Broker(make_settings(redis_server.url, namespace=keys.namespace))
    known = broker.known
    async with contextlib.aclosing(broker):
        for number in range(12):
            files = msgspec.structs.replace(hash_tokenizer(), chat_template=f"{number}")
            sha256, _ = encode_tokenizer(files)
            model = msgspec.structs.replace(card(f"m{number}"), tokenizer_sha256=sha256)
            await Catalogue(redis_client, keys).publish(model, files)
            await known.tokenizer(model)
        assert len(known._tokenizers) == number_of("gateway/redis/known_models.py") == 8


def test_hints_wait_up_to_their_bound() -> None:
    """Then the follower is told that it misses some."""
    bound = bound_of("gateway/redis/hints.py")
    assert bound == SETTINGS.max_buffer_bytes
    mailbox = Mailbox(bound)
    for number in range(3_000):
        entry = LogEntry(number, "", Tokens((ChoiceDelta(0, number, (1,), "word", None, None),)))
        mailbox.put(entry, 1_000)
        assert mailbox._num_bytes <= bound
    assert asyncio.run(mailbox.take(0.0)) == []


def test_lengths_of_many_tenants_stay_within_their_bound() -> None:
    """As many histories as there may be, each with as many lengths."""
    tracemalloc.start()
    try:
        history = admission_check._History(512)
        for number in range(2_000):
            history.add(number * 977 % 32_768)
        num_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    bound = bound_of("workers/engine/admission_check.py")
    assert bound / 10 < num_bytes * admission_check._MAX_NUM_HISTORIES < bound


GATEWAY = """
import asyncio, resource, sys
from pathlib import Path
from gateway.child import Refused
from gateway.grammars.compiler import Constraint, GrammarCompiler
from gateway.http.errors import ApiError
from gateway.turns import Owner, work_for

def now_mb():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6

async def main():
    compiler = GrammarCompiler()
    pad = "x" * 1_000_000
    async def ask(number, is_strict):
        work_for(Owner(f"tenant {number % 3}"))
        schema = {"description": pad + str(number), "type": "string", "maxLength": number + 5}
        if is_strict:
            schema |= {"not": {}}
        try:
            await compiler.compile(Constraint("x", "json_schema", schema, is_strict))
        except ApiError as error:
            return error.message
    assert await ask(0, False) is None and "not" in await ask(0, True)
    before = now_mb()
    for number in range(1, 60):
        await ask(number, False)
        assert "not" in await ask(number, True)
    print(compiler._outcomes.num_bytes, round(now_mb() - before))
    await compiler.aclose()

asyncio.run(main())
"""


def run(script: str) -> list[int]:
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return [int(word) for word in ended.stdout.split()]


@pytest.mark.campaign
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_schemas_of_megabytes_leave_a_gateway_as_large_as_it_was() -> None:
    """118 of them, accepted and refused, of three tenants; with whole schemas as keys, 120 MB more
    were kept."""
    num_bytes, grown_mb = run(GATEWAY)
    assert num_bytes <= bound_of("gateway/grammars/compiler.py")
    assert grown_mb < 40


ENGINE = """
import random
from pathlib import Path
from gateway.grammars.compiled import Kind, compile_grammar
from tests.fakes import EOS_ID, INLINE, VOCAB_SIZE, hash_tokenizer
from workers.engine import grammar

def now_mb():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6

def classes(number):
    names = [f"T{i}" for i in range(400)]
    terminals = [f"{name}: /(\\\\pL|{number}{i})/" for i, name in enumerate(names)]
    return compile_grammar(Kind.GRAMMAR, "\\n".join(["start: " + " ".join(names), *terminals]))

def states(number):
    return compile_grammar(Kind.REGEX, "(.*a.{18})|(.*b.{18})|x{%d}" % (number + 1))

grammar._MAX_KEPT_BYTES = 64 * 2**20
grammars = grammar.Grammars(hash_tokenizer().tokenizer_json, VOCAB_SIZE, {EOS_ID}, *INLINE)
draw = random.Random(0)
grammars.matcher(classes(99))
before, found = now_mb(), []
for number in range(25):
    grammars.matcher(classes(number), (), f"tenant {number % 3}")
found.append(now_mb() - before)
for number in range(20):
    matcher = grammars.matcher(states(number), (), f"tenant {number % 3}")
    for _ in range(2_000):
        grammars.start_masks({matcher: ()})
        matcher.consume(draw.choice(b"abc"))
del matcher
found.append(now_mb() - before)
print(grammars._compiled.num_bytes, *map(round, found))
"""


@pytest.mark.campaign
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_grammars_leave_an_engine_within_its_bound() -> None:
    """Of an eighth of the bound: 25 grammars of 12 MB each, then 20 that grow by 6 MB while they
    are used. Without a bound the engine grew by 460 MB."""
    eighth = bound_of("workers/engine/grammar.py") // 8
    num_bytes, *grown_mb = run(ENGINE)
    assert num_bytes <= eighth == 64 * 2**20
    assert max(grown_mb) < 1.25 * eighth / 1e6 + 15, grown_mb
