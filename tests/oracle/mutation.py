"""Mutants of the function library, and a run of tests against each of them:

python -m tests.oracle.mutation [--of N] [--only FILE] [TESTS …]     of N mutants it takes one; 1: all

A mutant replaces one operator or constant of contract/lua, or drops one statement. The tests run against
it until one fails. Prints the mutants that none has found; the exit status is 1 where there are any.
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
from tests import clock

LUA = Path(library.__file__).parent / "lua"
# Tests of the functions, which start no server of their own.
_CONTRACT = (
    *("ab", "admission", "batch_price", "calibration", "flow_jobs", "functions", "lane_rates"),
    *("marks", "memory_bounds", "operations", "pages", "pauses", "promises", "reservations"),
    *("running", "snapshot", "steps"),
)
TESTS = ("tests/oracle", *(f"tests/contract/test_{name}.py" for name in _CONTRACT))

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
    source = library.library_source()
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
    """A plugin of pytest that runs the collected tests once, then against each mutant."""

    def __init__(self, wanted: Sequence[Any]) -> None:
        self._wanted = wanted
        self._failed = False
        self._seconds: dict[str, float] = {}
        self._called: dict[str, set[str]] = defaultdict(set)
        self._kills: dict[str, Counter[str]] = defaultdict(Counter)
        self.left: list[Any] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._failed = self._failed or report.failed
        if report.failed and not self._seconds:
            print(report.longreprtext)

    def pytest_report_teststatus(self) -> tuple[str, str, str]:
        return "", "", ""

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = [item for item in session.items if item.get_closest_marker("campaign") is None]
        call = library.Partition._call
        with pytest.MonkeyPatch.context() as patch:
            for item in items:
                names = self._called[item.nodeid]

                async def noted(self: Any, name: str, *args: Any, _n: Any = names, **o: Any) -> Any:
                    _n.add(f"{name}.lua")
                    return await call(self, name, *args, **o)

                patch.setattr(library.Partition, "_call", noted)
                began = time.monotonic()
                assert self._passes(item, items), f"{item.nodeid} fails without a mutant"
                self._seconds[item.nodeid] = time.monotonic() - began
        print(f"{len(items)} tests in {sum(self._seconds.values()):.0f} s", flush=True)
        with pytest.MonkeyPatch.context() as patch:
            for number, mutant in enumerate(self._wanted, 1):
                source = library_with(mutant)
                patch.setattr(clock, "library_source", lambda source=source: source)
                began = time.monotonic()
                found_by = self._find(mutant, items)
                took = time.monotonic() - began
                if found_by is None:
                    self.left.append(mutant)
                print(
                    f"{number}/{len(self._wanted)} {took:.1f} s {'found by ' + found_by if found_by else 'LEFT'}: {mutant}",
                    flush=True,
                )
        return True

    def _find(self, mutant: Any, items: list[pytest.Item]) -> str | None:
        kills = self._kills[mutant.file]

        def place(item: pytest.Item) -> tuple[bool, float]:
            is_near = mutant.file in self._called[item.nodeid] or bool(kills[item.nodeid])
            return not is_near, self._seconds[item.nodeid] / (1 + kills[item.nodeid])

        for item in sorted(items, key=place):
            if not self._passes(item, items):
                kills[item.nodeid] += 1
                return item.nodeid
        return None

    def _passes(self, item: pytest.Item, items: list[pytest.Item]) -> bool:
        self._failed = False
        item.ihook.pytest_runtest_protocol(item=item, nextitem=_Next(item.session))
        return not self._failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--of", type=int, default=1)
    parser.add_argument("--only", default="")
    parser.add_argument("tests", nargs="*", default=TESTS)
    args = parser.parse_args()
    wanted = [m for path in sorted(LUA.glob("*.lua")) for m in mutants(path)]
    wanted = [m for m in wanted if m.is_drawn(args.of) and m.file.startswith(args.only)]
    campaign = Campaign(wanted)
    options = [
        "-qq",
        "--tb=no",
        "--show-capture=no",
        "-p",
        "no:cacheprovider",
        "-m",
        "not campaign",
    ]
    options += ["-s", "--capture=no", "-o", "timeout=20", "-o", "timeout_method=signal"]
    pytest.main([*options, *args.tests], plugins=[campaign])
    print(f"{len(campaign.left)} of {len(wanted)} mutants are left")
    for mutant in campaign.left:
        print(mutant)
    return bool(campaign.left)


if __name__ == "__main__":
    sys.exit(main())
