"""What conversations find in caches: python -m bench.conversations real|uniform|simulated

`real`: agents on two workers with one thread each and SmolLM2. Each call repeats all that was said
before; a tool takes its time between. Another tenant makes single calls beside them. Each variant
has a `batchway up` of its own, in turns, with equal conversations in each round.

`uniform`: the same with single calls alone, whose prompts begin like no other; the columns of later
turns are of all calls.

`simulated`: sixteen simulated workers, with step times of a GPU; a turn but the last calls a tool,
and each round has another seed.

`ideal` is what one worker would find that keeps all prompts and answers of a tenant, in whole
blocks. Tables have the median over the rounds, and the least and the most.
"""

import argparse
import asyncio
import heapq
import itertools
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import msgspec

from batchway_client.events import Parser
from bench.processes import UP_IS_READY, running_server
from bench.questions import PROMPTS
from bench.tables import markdown_table
from contract.api_keys import ApiKeys, KeyTerms, Scope
from contract.connection import connect
from contract.keys import Keys
from contract.library import ensure_library
from infra.embedded_redis import EmbeddedRedis
from infra.planning.calibration import fleet_with
from infra.planning.costs import Fitted
from infra.planning.outcome import SimulationOutcome
from infra.planning.simulation import Part, Simulation
from infra.planning.traces import Arrival, conversing, drawn
from infra.tables import percentile, write
from workers.ipc.messages import EngineOptions

_BLOCK = 16
_TURNS, _OUTPUT = (4, 8), (8, 16)
_PAUSE_S = 0.2, 1.0
_OTHER_S = 2.0  # between calls of the other tenant
_SYSTEMS = 4  # agents, each with its instructions


class Variant(NamedTuple):
    """Settings of gateways, whether calls name their session, and what a simulation leaves out."""

    environment: Mapping[str, str]
    names_sessions: bool
    without: tuple[Part, ...]


VARIANTS = {
    "claims do not look": Variant(
        {"BATCHWAY_PREFERS_CACHED": "false"}, False, ("residence", "retention")
    ),
    "prefixes": Variant({}, False, ("sessions", "retention")),
    "prefixes, sessions": Variant({}, True, ("retention",)),
}
REAL = VARIANTS | {"all, warmed": Variant({"BATCHWAY_WARMS_NEXT_TURN": "true"}, True, ())}
SIMULATED = VARIANTS | {"prefixes, sessions, retention": Variant({}, True, ())}


# --- the ideal --------------------------------------------------------------------------------


class Blocks:
    """The prefixes of all that was said, in whole blocks."""

    def __init__(self) -> None:
        self._known = set[int]()

    def add(self, token_ids: Seq[int]) -> None:
        """The last token of an answer is not computed."""
        self._known.update(_keys(token_ids[:-1]))

    def num_found(self, prompt_ids: Seq[int]) -> int:
        """The last token of a prompt is computed always."""
        keys = _keys(prompt_ids[:-1])
        return _BLOCK * sum(1 for _ in itertools.takewhile(self._known.__contains__, keys))


def _keys(token_ids: Seq[int]) -> Iterator[int]:
    key = 0
    for start in range(0, len(token_ids) - _BLOCK + 1, _BLOCK):
        key = hash((key, *token_ids[start : start + _BLOCK]))
        yield key


@dataclass(slots=True)
class Turn:
    """One call. Times are those of a clock; `num_cached`: of its prompt, as the answer tells."""

    sent_s: float
    is_later: bool
    first_s: float = 0.0
    ended_s: float = 0.0
    prompt_ids: tuple[int, ...] = ()
    output_ids: tuple[int, ...] = ()
    text: str = ""
    num_cached: int = 0

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.sent_s


def ideal_tokens(turns: Seq[Turn]) -> int:
    """Tokens of prompts that were said before: in earlier calls, and in answers that had ended."""
    blocks, num_found = Blocks(), 0
    ended = sorted((turn.ended_s, (*turn.prompt_ids, *turn.output_ids)) for turn in turns)
    for turn in sorted(turns, key=lambda turn: turn.sent_s):
        while ended[0][0] <= turn.sent_s:
            blocks.add(ended.pop(0)[1])
        num_found += blocks.num_found(turn.prompt_ids)
        blocks.add(turn.prompt_ids)
    return num_found


# --- real workers -----------------------------------------------------------------------------


class Conversation(NamedTuple):
    """What an agent and its tools say: `pauses_s` follow on answers."""

    name: str
    system: str
    messages: tuple[str, ...]
    outputs: tuple[int, ...]
    pauses_s: tuple[float, ...]


def conversations_of(num: int, seed: str, turns: tuple[int, int] = _TURNS) -> list[Conversation]:
    rng, found = random.Random(seed), list[Conversation]()

    def text(num_questions: int) -> str:
        return " ".join(rng.sample(PROMPTS, num_questions))

    systems = [f"You are an agent. Your rules: {text(6)}" for _ in range(_SYSTEMS)]
    for number in range(num):
        num_turns = rng.randint(*turns)
        messages = (
            f"Task {number} of {seed}: {text(20)}",
            *(text(2) for _ in range(num_turns - 1)),
        )
        outputs = tuple(rng.randint(*_OUTPUT) for _ in messages)
        pauses = tuple(rng.uniform(*_PAUSE_S) for _ in messages)
        system = rng.choice(systems) if num_turns > 1 else f"{number} of {seed}"
        found.append(Conversation(f"{seed}-{number}", system, tuple(messages), outputs, pauses))
    return found


async def say(http: httpx.AsyncClient, body: Mapping[str, Any], *, is_later: bool) -> Turn:
    """One greedy chat."""
    turn, parser = Turn(time.monotonic(), is_later), Parser()
    body = {"model": "smollm2", "temperature": 0, "stream": True, "return_token_ids": True, **body}
    body["stream_options"] = {"include_usage": True}
    async with http.stream("POST", "chat/completions", json=body) as answer:
        if answer.status_code != 200:
            raise RuntimeError(f"{answer.status_code}: {(await answer.aread()).decode()}")
        async for part in answer.aiter_bytes():
            for event in parser.feed(part):
                _note(turn, event.data)
    turn.ended_s = time.monotonic()
    return turn


def _note(turn: Turn, chunk: Mapping[str, Any]) -> None:
    turn.prompt_ids = tuple(chunk.get("prompt_token_ids") or turn.prompt_ids)
    if usage := chunk.get("usage"):
        turn.num_cached = usage["prompt_tokens_details"]["cached_tokens"]
    for choice in chunk.get("choices") or ():
        if token_ids := choice.get("token_ids"):
            turn.first_s = turn.first_s or time.monotonic()
            turn.output_ids += tuple(token_ids)
        turn.text += choice["delta"].get("content") or ""


async def hold(http: httpx.AsyncClient, about: Conversation, *, names_session: bool) -> list[Turn]:
    turns = list[Turn]()
    history = [{"role": "system", "content": about.system}]
    session = {"prompt_cache_key": about.name} if names_session else {}
    for message, num, pause_s in zip(about.messages, about.outputs, about.pauses_s, strict=True):
        history.append({"role": "user", "content": message})
        body = {"messages": history, "max_tokens": num, **session}
        turns.append(await say(http, body, is_later=bool(turns)))
        history.append({"role": "assistant", "content": turns[-1].text})
        await asyncio.sleep(pause_s)
    return turns


@dataclass(frozen=True, slots=True)
class Round:
    """What a round shows. Shares are of the tokens of prompts; seconds."""

    found: float
    ideal: float
    num_computed: float
    later_p50_s: float
    later_p99_s: float
    tokens_per_s: float
    other_first_p50_s: float
    other_token_s: float
    answers: int = 0  # a hash of all that agents were told

    @property
    def of_ideal(self) -> float:
        return self.found / self.ideal if self.ideal else 1.0


class Callers:
    """The callers of one server: agents of one tenant, and another tenant beside them."""

    def __init__(self, agents: httpx.AsyncClient, other: httpx.AsyncClient) -> None:
        self._agents = agents
        self._other = other

    async def run(
        self, conversations: Seq[Conversation], at_a_time: int, *, names_sessions: bool
    ) -> tuple[list[Turn], list[Turn]]:
        """Returns the turns of the agents, and the calls of the other tenant."""
        coming, turns, calls = iter(conversations), list[Turn](), list[Turn]()

        async def agent() -> None:
            for about in coming:
                turns.extend(await hold(self._agents, about, names_session=names_sessions))

        beside = asyncio.create_task(self._single_calls(f"beside {conversations[0].name}", calls))
        await asyncio.gather(*(agent() for _ in range(at_a_time)))
        beside.cancel()
        await asyncio.wait((beside,))
        return turns, calls

    async def _single_calls(self, seed: str, calls: list[Turn]) -> None:
        for about in conversations_of(1000, seed, (1, 1)):
            calls += await hold(self._other, about, names_session=False)
            await asyncio.sleep(_OTHER_S)


@asynccontextmanager
async def callers_of(variant: Variant, workers: int) -> AsyncIterator[Callers]:
    """Callers of a new `batchway up`, each with a key of its tenant."""
    command = [sys.executable, "-m", "infra", "up", "--port=0", "--model=smollm2"]
    command += [f"--workers={workers}", "--threads=1", "--kv-cache-gib=1"]
    with EmbeddedRedis() as redis, tempfile.TemporaryDirectory() as folder:
        async with connect(redis.url, Keys()) as client:
            await ensure_library(client)
            api_keys = ApiKeys(client, Keys())
            made = [
                (await api_keys.create(KeyTerms(tenant=name, scopes=tuple(Scope))))[0]
                for name in ("agents", "other")
            ]
        command, log = [*command, f"--redis-url={redis.url}"], Path(folder) / "log"
        with running_server(command, log, UP_IS_READY, 120.0, variant.environment) as server:
            async with server.client() as agents, server.client() as other:
                for http, key in zip((agents, other), made, strict=True):
                    http.headers["authorization"] = f"Bearer {key}"
                yield Callers(agents, other)


async def run_real(
    variant: Variant, conversations: Seq[Conversation], workers: int, at_a_time: int
) -> Round:
    async with callers_of(variant, workers) as callers:
        begun = conversations_of(2 * workers, "warm up")
        await callers.run(begun, 2 * workers, names_sessions=False)
        start_s = time.monotonic()
        turns, others = await callers.run(
            conversations, at_a_time, names_sessions=variant.names_sessions
        )
        wall_s = time.monotonic() - start_s
    num_all = sum(len(turn.prompt_ids) for turn in turns)
    num_found = sum(turn.num_cached for turn in turns)
    laters = [turn.ttft_s for turn in [turn for turn in turns if turn.is_later] or turns]
    others_s = [(t.ended_s - t.first_s) / max(1, len(t.output_ids) - 1) for t in others]
    return Round(
        found=num_found / num_all,
        ideal=ideal_tokens(turns) / num_all,
        num_computed=num_all - num_found,
        later_p50_s=percentile(laters, 0.5) or 0.0,
        later_p99_s=percentile(laters, 0.99) or 0.0,
        tokens_per_s=sum(len(t.output_ids) for t in (*turns, *others)) / wall_s,
        other_first_p50_s=percentile([t.ttft_s for t in others], 0.5) or 0.0,
        other_token_s=percentile(others_s, 0.5) or 0.0,
        answers=sum(hash((turn.prompt_ids, turn.output_ids)) for turn in turns),
    )


# --- simulated workers ------------------------------------------------------------------------

_COSTS = Fitted(0.01, 1e-4, 2e-8, 1e-10, max_num_seqs=64)
_SIMULATED = 16  # workers
_FIRST, _ADDED, _SAID, _PAUSED_S = 2000, 200, 100, 2.0  # tokens of prompts, turns and answers


def run_simulated(
    variant: Variant, num: int, rate_per_s: float, num_blocks: int, seed: int
) -> Round:
    firsts = drawn(num, rate_per_s, _FIRST, _SAID, 0.5, seed)
    agents = list(conversing(firsts, _TURNS, _ADDED, _PAUSED_S, seed))
    until_s = agents[-1].arrival_s
    others = [Arrival(5.0 + i / 5, 500, 64, tenant="other") for i in range(int(5 * until_s))]
    arrivals = heapq.merge(agents, others, key=lambda arrival: arrival.arrival_s)
    costs = msgspec.structs.replace(_COSTS, num_blocks=num_blocks)
    fleet = fleet_with(costs, EngineOptions(model_path="", max_num_seqs=64), _SIMULATED)
    with EmbeddedRedis() as server:
        outcome, without = SimulationOutcome(), variant.without
        Simulation(fleet, server.url, outcome, seed=seed, without=without).run(arrivals)
    assert outcome.states.keys() == {"succeeded"}, outcome.states
    num_others = sum(arrival.prompt_tokens for arrival in others)
    num_all = outcome.num_looked_up - num_others
    other, found = outcome.calls["standard", "other"], outcome.as_dict()
    return Round(
        found=outcome.num_found / num_all,
        ideal=sum(map(_in_histories, agents)) / num_all,
        num_computed=num_all - outcome.num_found,
        later_p50_s=found["later_turns_ttft_s"]["p50"],
        later_p99_s=found["later_turns_ttft_s"]["p99"],
        tokens_per_s=found["output_tokens_per_s"],
        other_first_p50_s=percentile(other.ttft_s, 0.5) or 0.0,
        other_token_s=percentile(other.itl_s, 0.5) or 0.0,
    )


def _in_histories(first: Arrival) -> int:
    """Tokens of a session's prompts that its turns before have computed, in whole blocks."""
    num_found, num_before, turn = 0, 0, first
    while turn.then is not None:
        num_before += turn.prompt_tokens + turn.output_tokens
        num_found += (num_before - 1) // _BLOCK * _BLOCK
        turn = turn.then
    return num_found


# --- tables -----------------------------------------------------------------------------------

_COLUMNS: Mapping[str, tuple[str, float, str]] = {  # of a Round: its heading, unit and format
    "found": ("found", 100, ".1f %"),
    "ideal": ("ideal", 100, ".1f %"),
    "of_ideal": ("found of ideal", 1, ".3f"),
    "num_computed": ("computed", 1, ",.0f"),
    "later_p50_s": ("later turns p50, ms", 1000, ",.0f"),
    "later_p99_s": ("p99, ms", 1000, ",.0f"),
    "tokens_per_s": ("tokens/s", 1, ",.1f"),
    "other_first_p50_s": ("other tenant, ms", 1000, ",.0f"),
    "other_token_s": ("its tokens, ms", 1000, ",.1f"),
}


def rounds_table(rounds: Mapping[str, Seq[Round]]) -> str:
    """Figures of each variant, and below the ratios to the first one in the same round."""
    first = next(iter(rounds.values()))
    rows = [["variant", *(heading for heading, _, _ in _COLUMNS.values())]]
    for name, of_variant in rounds.items():
        values = {key: [getattr(each, key) for each in of_variant] for key in _COLUMNS}
        rows.append(
            [
                name,
                *(
                    _cell([unit * x for x in values[key]], form)
                    for key, (_, unit, form) in _COLUMNS.items()
                ),
            ]
        )
        if of_variant is not first:
            ratios = {
                key: [
                    x / getattr(base, key)
                    for x, base in zip(values[key], first, strict=True)
                    if getattr(base, key)
                ]
                for key in _COLUMNS
            }
            rows.append([f"{name}: ratio", *(_cell(each, ".2f") for each in ratios.values())])
    return markdown_table(rows)


def _cell(values: Seq[float], form: str) -> str:
    if not values:
        return "-"
    form, _, unit = form.partition(" ")
    low, middle, high = (format(f(values), form) for f in (min, statistics.median, max))
    return middle + unit if low == high else f"{middle}{unit} ({low} to {high})"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.conversations", description=__doc__)
    parser.add_argument("measurement", choices=("real", "uniform", "simulated"))
    parser.add_argument("--conversations", type=int, default=200)
    parser.add_argument("--at-a-time", type=int, default=6, help="of real conversations")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rate", type=float, default=4.0, help="of simulated ones, in a second")
    parser.add_argument("--blocks", type=int, default=8192, help="of a simulated worker's cache")
    parser.add_argument("--variant", action="append", choices=REAL | SIMULATED, help="default: all")
    parser.add_argument("--json", metavar="OUT")
    given = parser.parse_args()
    is_simulated = given.measurement == "simulated"
    variants = SIMULATED if is_simulated else REAL
    rounds = {name: list[Round]() for name in given.variant or variants}
    turns = (1, 1) if given.measurement == "uniform" else _TURNS
    for number in range(given.rounds):
        for name, found in rounds.items():
            if is_simulated:
                sizes = given.conversations, given.rate, given.blocks
                found.append(run_simulated(variants[name], *sizes, number))
            else:
                spoken = conversations_of(given.conversations, f"{number}", turns)
                found.append(asyncio.run(run_real(variants[name], spoken, 2, given.at_a_time)))
            print(name, found[-1], file=sys.stderr, flush=True)
    result = {name: [asdict(each) for each in of] for name, of in rounds.items()}
    are_equal = all(len({r.answers for r in at}) == 1 for at in zip(*rounds.values(), strict=True))
    write(result, f"{rounds_table(rounds)}\n\nanswers equal: {are_equal}", given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
