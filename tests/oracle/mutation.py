"""Mutants of the function library, and a run of tests against each of them:

python -m tests.oracle.mutation [--of N] [--only FILE] [TESTS …]     takes one of N mutants

A mutant replaces one operator or constant of contract/lua, or drops one statement. The tests run
against it until one fails. Prints those that none has found; then the exit status is 1.
"""

import argparse
import hashlib
import re
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from contract import library
from contract.library import library_source
from tests import clock

LUA = Path(library.__file__).parent / "lua"
TESTS = ("tests/oracle",)

# Files that the tables leave to tests/contract/test_ab.py.
LEFT_OUT = {"_ab.lua"}

# What an operator becomes.
_SWAPS = {
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "~=", "~=": "==", "+": "-", "-": "+",
    "and": "or", "or": "and", "true": "false", "false": "true", "not": "",
    "math.min": "math.max", "math.max": "math.min", "0": "1", "1": "0",
}  # fmt: skip
# Binary operators have spaces around them. An index is not changed: a wrong one is always found.
_TOKEN = re.compile(
    r"(?<= )(?:<=?|>=?|==|~=|\+|-)(?= )|\b(?:and|or|true|false|not|math\.min|math\.max)\b"
    r"|(?<![\w.\[:])[01](?![\w.\]:])"
)
# File, text of the line and change of mutants that the tests may not find, and why.
KNOWN = {
    (
        "_admission.lua",
        "return limit > 0 and tenant.requests + 1 > limit"
        " and meter_ms(tenant.requests, 1, limit) or 0",
        "> 6",
    ): "at the limit the time to wait is 0, too",
    (
        "_ledger.lua",
        "return price and price >= 0 and price <= 1 and price or 1",
        "<=",
    ): "in place of a price of 1 comes 1",
    (
        "_memory.lua",
        "for _, bytes in pairs(values_of(tag .. ':stored:lanes')) do held = held + bytes end",
        "+",
    ): "tests/contract/test_memory_bounds.py finds it: here Redis has no maxmemory",
    (
        "_memory.lua",
        "job.fixed = RECORD_BYTES + allocated(job.num_sent"
        " + 8 * (#job.tenant + #job.model + #job.lane))",
        "+ 2",
    ): "tests/contract/test_memory_bounds.py finds it: a few bytes",
    (
        "_memory.lua",
        "if free < 0 then return 'lane_memory', is_alone end",
        "0",
    ): "it is less than a byte",
    (
        "_memory.lua",
        "local num_trusted = 0  -- jobs to accept before the next INFO,"
        " over all tags of the server",
        "0",
    ): "one job more than it should is accepted after the functions are loaded",
    (
        "_queue.lua",
        "local num_read, num_paused, num_taken = 0, 0, 0",
        "0 1",
    ): "it reads once more, behind the last",
    (
        "_queue.lua",
        "num_read, last = num_read + 1, entry[1]",
        "+",
    ): "tests/contract/test_pages.py finds it: many paused jobs in front",
    (
        "_shared.lua",
        "local text = type(result) == 'table' and result.err or tostring(result)",
        "and",
    ): "errors of records that other programs wrote are in tests/hostile",
    (
        "_queue.lua",
        "local tenants = redis.call('ZRANGE', active, first, first + MAX_TENANTS - 1)",
        "1",
    ): "it looks at one tenant twice",
    (
        "_queue.lua",
        "if found == nil then nothing = nil end",
        "==",
    ): "it bounds a search among many tenants otherwise",
    (
        "snapshot.lua",
        "table.insert(counts, i % 2 == 1 and 'corrections_total:' .. part or part)",
        "or",
    ): "corrections of what other programs wrote are in tests/hostile",
    (
        "snapshot.lua",
        "counted[5] = oldest_wait(tag, model, argv[i], #argv - 1, now)",
        "1",
    ): "of more than thirteen tenants one less is looked at",
    ("_shared.lua", "return nil, false", "false"): "so are they here",
    (
        "blame.lua",
        "for _, old in ipairs(redis.call('ZRANGE', tag .. ':quarantine', 0,"
        " -QUARANTINE_MAX - 1)) do",
        "1",
    ): "it takes a thousand poisonous jobs",
    (
        "heartbeat.lua",
        "redis.call('HSET', pool, 'measured_at', now)",
        "dropped",
    ): "it saves time alone: tests/contract/test_function_costs.py",
}
_QUIET = re.compile(r"'(?:[^'\\]|\\.)*'|--.*")
_STATEMENT = re.compile(r" +[a-z_]+(?:\.[a-z_]+)*\(")


_TICK = """
local ticks = 0
local function tick()
  ticks = ticks + 1
  if ticks > 2000000 then error('an endless loop') end
end
"""


@dataclass(frozen=True)
class Mutant:
    """One change of one line of a file."""

    file: str
    line: int
    text: str  # of the line
    change: str
    source: str  # of the file, changed

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.change}: {self.text}"

    @property
    def is_known(self) -> bool:
        """Whether the tests may not find it."""
        return (self.file, self.text, self.change) in KNOWN

    def is_drawn(self, of: int) -> bool:
        """Whether it is in the sample of one of so many; a change elsewhere draws no other."""
        name = f"{self.file} {self.text} {self.change}"
        return int(hashlib.sha1(name.encode(), usedforsecurity=False).hexdigest(), 16) % of == 0


def mutants(path: Path) -> Iterator[Mutant]:
    """All of a file."""
    source = path.read_text("utf-8")
    start = 0
    for number, line in enumerate(source.splitlines(keepends=True), 1):
        text = line.strip()
        code = _QUIET.sub(lambda quiet: "_" * len(quiet[0]), line)
        for count, token in enumerate(_TOKEN.finditer(code), 1):
            first, last = start + token.start(), start + token.end()
            changed = source[:first] + _SWAPS[token[0]] + source[last:]
            change = f"{token[0]} {count}" if code.count(token[0]) > 1 else token[0]
            yield Mutant(path.name, number, text, change, changed)
        if _STATEMENT.match(code) and (end := _end_of_call(source, start + code.index("("))):
            yield Mutant(path.name, number, text, "dropped", source[:start] + source[end:])
        start += len(line)


def _end_of_call(source: str, first: int) -> int:
    """Behind the line of a call that is a whole statement; 0 where more follows in its line."""
    code = _QUIET.sub(lambda quiet: "_" * len(quiet[0]), source)
    depth = 0
    for place in range(first, len(code)):
        depth += {"(": 1, ")": -1}.get(code[place], 0)
        if depth == 0:
            rest = code[place + 1 :].partition("\n")[0]
            return place + 2 + len(rest) if rest.strip("_ ") == "" else 0
    return 0


def library_with(mutant: Mutant) -> str:
    """The library with one mutant. An endless loop raises."""
    whole = (LUA / mutant.file).read_text("utf-8")
    source = library_source()
    assert source.count(whole) == 1, mutant.file
    head, _, rest = source.replace(whole, mutant.source).partition("\n")
    rest = re.sub(r"^( *)(repeat|while .* do)$", r"\1\2 tick()", rest, flags=re.M)
    return f"{head}\n{_TICK}{rest}"


class _Next:
    """In place of the next test: of what tests share, it needs what belongs to the session."""

    def __init__(self, session: pytest.Session) -> None:
        self._session = session

    def listchain(self) -> list[pytest.Session]:
        return [self._session]


class Campaign:
    """A plugin of pytest that runs the collected tests against each mutant until one fails: short
    ones first, and those that found others in the file, or that call its function."""

    def __init__(self, wanted: Sequence[Mutant]) -> None:
        self._wanted = wanted
        self._failed = False
        self._seconds: dict[str, float] = {}
        self._called: dict[str, set[str]] = defaultdict(set)  # files of functions, by test
        self._found: dict[str, Counter[str]] = defaultdict(Counter)  # how often, by file and test
        self.left: list[Mutant] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._failed = self._failed or report.failed

    def pytest_report_teststatus(self) -> tuple[str, str, str]:
        return "", "", ""

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        call, running = library.Partition._call, self

        async def noted(self: library.Partition, name: str, *args: Any, **options: Any) -> Any:
            running._called[running._item].add(f"{name}.lua")
            return await call(self, name, *args, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(library.Partition, "_call", noted)
            for number, mutant in enumerate(self._wanted, 1):
                source = library_with(mutant)
                patch.setattr(clock, "library_source", lambda source=source: source)
                found_by = self._find(mutant, session.items)
                print(f"{number} {mutant}\n    {found_by or 'NOT FOUND'}", flush=True)
                if found_by is None:
                    self.left.append(mutant)
        return True

    def _find(self, mutant: Mutant, items: list[pytest.Item]) -> str | None:
        found = self._found[mutant.file]

        def place(item: pytest.Item) -> float:
            test = item.nodeid
            worth = 1 + 20 * (found[test] + (mutant.file in self._called[test]))
            return self._seconds.get(test, 0.05) / worth

        for item in sorted(items, key=place):
            if not self._passes(item):
                found[item.nodeid] += 1
                return item.nodeid
        return None

    def _passes(self, item: pytest.Item) -> bool:
        self._failed, self._item, began = False, item.nodeid, time.monotonic()
        item.ihook.pytest_runtest_protocol(item=item, nextitem=_Next(item.session))
        self._seconds[item.nodeid] = time.monotonic() - began
        return not self._failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--of", type=int, default=1)
    parser.add_argument("--only", default="", metavar="FILE")
    parser.add_argument("tests", nargs="*", default=TESTS)
    args = parser.parse_args()
    paths = [path for path in sorted(LUA.glob("*.lua")) if path.name not in LEFT_OUT]
    drawn = [m for path in paths for m in mutants(path) if m.is_drawn(args.of)]
    campaign = Campaign([m for m in drawn if m.file.startswith(args.only) and not m.is_known])
    options = "-qq -s --tb=no --show-capture=no -p no:cacheprovider -o timeout=20"
    words = [*options.split(), "-o", "timeout_method=signal", "-m", "not campaign", *args.tests]
    status = pytest.main(words, plugins=[campaign])
    assert status in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED), status
    print("Not found:", *campaign.left, sep="\n")
    return bool(campaign.left)


if __name__ == "__main__":
    sys.exit(main())
