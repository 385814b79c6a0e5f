"""Requests by their lengths and times: read from traces, of which no text is kept, or drawn.

Formats: Azure's CSV (TIMESTAMP, ContextTokens, GeneratedTokens), `bench load`'s CSV (arrival_s,
prompt_tokens, max_tokens), Mooncake's lines of JSON (timestamp in ms, input_length, output_length,
hash_ids), and the lines that `batchway record` writes. Each may be compressed with gzip.
"""

import csv
import gzip
import heapq
import itertools
import json
import random
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import msgspec

from infra.measure.workloads import BadWorkload, draw_arrivals

_SPREAD_S = 60.0  # the copies of a request come within so long of it
_HASHED_TOKENS = 512  # of Mooncake's blocks


class Arrival(msgspec.Struct, frozen=True, gc=False):
    """A request. It generates `output_tokens`, and its caller allows `max_tokens` (0: as many)."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    max_tokens: int = 0
    lane: str = "standard"
    tenant: str = "default"
    blocks: tuple[int, ...] = ()  # equal ones at the start are an equal prefix of 512 tokens each
    session: str = ""
    history: tuple[int, ...] = ()  # token ids of the turns before, with their answers
    # The session's next turn. Its time counts from this one's end, and its prompt follows on both.
    then: "Arrival | None" = None

    @property
    def cap(self) -> int:
        return max(self.max_tokens, self.output_tokens)


class Recorded(msgspec.Struct, frozen=True, omit_defaults=True):
    """A job as the queue saw it. Seconds from the first arrival; None: it did not come so far."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    lane: str
    tenant: str
    state: Literal["succeeded", "failed", "cancelled", "expired", "running", "queued"]
    worker: str = ""
    claimed_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    attempts: int = 1
    recomputed_tokens: int = 0  # of its prompt and its output, in later attempts


class RecordedFleet(msgspec.Struct, frozen=True):
    """The workers of a recording; 0: unknown. `models`: those that its jobs are of."""

    models: tuple[str, ...] = ()
    workers: int = 0
    max_num_seqs: int = 0
    num_blocks: int = 0
    block_size: int = 0
    step_tokens: int = 0
    load_s: float = 0.0  # what the last start of a worker took


class _Head(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    fleet: RecordedFleet


def read_recording(path: Path) -> tuple[RecordedFleet, list[Recorded]]:
    """Reads what `batchway record` wrote. Raises BadWorkload with the line."""
    lines = _lines(path)
    first = next(lines, (1, ""))
    try:
        fleet = msgspec.json.decode(first[1], type=_Head).fleet
    except msgspec.MsgspecError as exc:
        raise BadWorkload(f"{path} is nothing that `batchway record` wrote: {exc}") from exc
    return fleet, [_decoded(path, number, line) for number, line in lines]


def read_arrivals(path: Path) -> Iterator[Arrival]:
    """Reads a trace in order of arrival; times count from the first. Raises BadWorkload with the
    line."""
    first_s, last_s = None, 0.0
    for number, arrival in _read(path):
        if min(arrival.prompt_tokens, arrival.output_tokens) < 1:
            raise BadWorkload(f"{path}, line {number}: a request has at least 1 token of each")
        first_s = arrival.arrival_s if first_s is None else first_s
        at_s = arrival.arrival_s - first_s
        if not last_s <= at_s < float("inf"):
            raise BadWorkload(f"{path}, line {number}: arrives before the line above")
        last_s = at_s
        yield msgspec.structs.replace(arrival, arrival_s=at_s)
    if first_s is None:
        raise BadWorkload(f"{path} has no requests")


def scaled(arrivals: Iterable[Arrival], copies: float, seed: int) -> Iterator[Arrival]:
    """Yields each request so many times, within a minute of its time: with the same pattern of
    arrivals, so many times the load. A fraction is the probability of another one."""
    rng, coming, counter = (
        random.Random(seed),
        list[tuple[float, int, Arrival]](),
        itertools.count(),
    )
    for arrival in arrivals:
        while coming and coming[0][0] <= arrival.arrival_s:
            yield _at(coming)
        for copy in range(int(copies) + (rng.random() < copies % 1)):
            at_s = arrival.arrival_s + (rng.uniform(0, _SPREAD_S) if copy else 0.0)
            heapq.heappush(coming, (at_s, next(counter), arrival))
    while coming:
        yield _at(coming)


def faster(arrivals: Iterable[Arrival], speed: float) -> Iterator[Arrival]:
    """Yields the same requests at so many times the rate."""
    for arrival in arrivals:
        yield msgspec.structs.replace(arrival, arrival_s=arrival.arrival_s / speed)


def _at(coming: list[tuple[float, int, Arrival]]) -> Arrival:
    at_s, _, arrival = heapq.heappop(coming)
    return msgspec.structs.replace(arrival, arrival_s=at_s)


def drawn(
    num_requests: int, rate_per_s: float, isl: int, osl: int, spread: float, seed: int
) -> Iterator[Arrival]:
    """Draws Poisson arrivals; outputs differ by up to this share of `osl`."""
    rng = random.Random(seed)
    for at_s in draw_arrivals(num_requests, rate_per_s, "poisson", 1.0, f"{seed}"):
        yield Arrival(at_s, isl, max(1, round(osl * rng.uniform(1 - spread, 1 + spread))))


def conversing(
    arrivals: Iterable[Arrival],
    num_turns: tuple[int, int],
    num_added: int,
    pause_s: float,
    seed: int,
) -> Iterator[Arrival]:
    """Lets each request begin a session of so many turns, the fewest and the most. After a pause,
    which is exponentially distributed, a later one adds `num_added` tokens; its answer is as long
    as the first."""
    rng = random.Random(f"{seed} turns")
    for number, first in enumerate(arrivals):
        session, then = f"session-{number}", None
        for _ in range(rng.randint(*num_turns) - 1):
            then = msgspec.structs.replace(
                first, arrival_s=rng.expovariate(1 / pause_s), prompt_tokens=num_added, blocks=(),
                session=session, then=then,
            )  # fmt: skip
        yield msgspec.structs.replace(first, session=session, then=then)


def prompt_of(arrival: Arrival, number: int) -> tuple[int, ...]:
    """Token ids of its prompt: its history, and those of its blocks. Without any its own are like
    those of no other prompt."""
    if not arrival.blocks:
        return (*arrival.history, number, *(2,) * (arrival.prompt_tokens - 1))
    ids = [2 + block for block in arrival.blocks for _ in range(_HASHED_TOKENS)]
    return (*arrival.history, *ids[: arrival.prompt_tokens])


def next_turn(arrival: Arrival, prompt_ids: tuple[int, ...], output_id: int) -> Arrival | None:
    """The session's next turn, whose history ends with an answer of equal tokens; None: it has
    none."""
    history = (*prompt_ids, *(output_id,) * arrival.output_tokens)
    return arrival.then and msgspec.structs.replace(arrival.then, history=history)


def _read(path: Path) -> Iterator[tuple[int, Arrival]]:
    lines = _lines(path)
    first = next(lines, None)
    if first is None:
        return
    lines = itertools.chain([first], lines)
    if first[1].startswith("{"):
        for number, line in lines:
            if not line.startswith('{"fleet"'):
                yield number, _of_json(path, number, line)
        return
    heading = first[1].rstrip("\n").split(",")
    next(lines)
    for number, line in lines:
        row = dict(zip(heading, next(csv.reader([line])), strict=False))
        yield number, _of_row(path, number, row)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
            yield from ((number, line) for number, line in enumerate(file, 1) if line.strip())
    except (OSError, EOFError, UnicodeDecodeError) as exc:
        raise BadWorkload(f"{path} cannot be read: {exc}") from exc


def _of_row(path: Path, number: int, row: dict[str, str]) -> Arrival:
    try:
        if "TIMESTAMP" in row:
            # Seven digits of a second are more than Python reads.
            at_s = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
            return Arrival(at_s, int(row["ContextTokens"]), int(row["GeneratedTokens"]))
        sizes = int(row["prompt_tokens"]), int(row["max_tokens"])
        return Arrival(float(row["arrival_s"]), *sizes)
    except (KeyError, ValueError) as exc:
        raise BadWorkload(
            f"{path}, line {number}: wants the columns TIMESTAMP, ContextTokens and "
            "GeneratedTokens, or arrival_s, prompt_tokens and max_tokens"
        ) from exc


def _of_json(path: Path, number: int, line: str) -> Arrival:
    if '"hash_ids"' not in line:
        job = _decoded(path, number, line)
        num_output = max(1, job.output_tokens)
        return Arrival(
            job.arrival_s, job.prompt_tokens, num_output, job.max_tokens, job.lane, job.tenant
        )
    try:
        found: dict[str, Any] = json.loads(line)
        blocks = tuple(map(int, found["hash_ids"]))
        sizes = int(found["input_length"]), int(found["output_length"])
        return Arrival(found["timestamp"] / 1000, *sizes, blocks=blocks)
    except (KeyError, TypeError, ValueError) as exc:
        raise BadWorkload(
            f"{path}, line {number}: wants timestamp, input_length, output_length, hash_ids"
        ) from exc


def _decoded(path: Path, number: int, line: str) -> Recorded:
    try:
        return msgspec.json.decode(line, type=Recorded)
    except msgspec.MsgspecError as exc:
        raise BadWorkload(
            f"{path}, line {number}: no job as `batchway record` writes it: {exc}"
        ) from exc
