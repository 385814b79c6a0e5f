"""Workloads: prompts as token ids with output lengths, at once or at arrival times.

A file is JSON: {"requests": [{"prompt_token_ids": […], "max_tokens": N, "arrival_s"?: S}, …]};
requests are greedy and ignore the end token, so each output has N tokens.
"""

import argparse
import csv
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from infra.preconditions import Failed

ArrivalProcess = Literal["poisson", "gamma", "constant"]


class WorkloadRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One request; `arrival_s` counts from the start of the run."""

    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    arrival_s: float = 0.0


class Workload(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a run serves."""

    requests: tuple[WorkloadRequest, ...]

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(request.prompt_token_ids) for request in self.requests)

    @property
    def num_output_tokens(self) -> int:
        return sum(request.max_tokens for request in self.requests)


class BadWorkload(Failed, ValueError):
    """A workload or trace that cannot be run. The message is one sentence."""


def read_workload(path: Path) -> Workload:
    """Reads a workload. Raises BadWorkload, naming the file and the field."""
    try:
        workload = msgspec.json.decode(path.read_bytes(), type=Workload)
    except OSError as exc:
        raise BadWorkload(f"{path} cannot be read: {exc.strerror}") from exc
    except msgspec.MsgspecError as exc:
        raise BadWorkload(f"{path} is no workload: {exc}") from exc
    if not workload.requests:
        raise BadWorkload(f"{path} has no requests")
    for number, request in enumerate(workload.requests):
        if not request.prompt_token_ids or request.max_tokens < 1 or request.arrival_s < 0:
            raise BadWorkload(
                f"{path}: requests[{number}] must have prompt_token_ids, max_tokens of at least 1 "
                "and an arrival_s of at least 0"
            )
    return workload


def draw_request(
    generator: random.Random,
    vocab_size: int,
    num_prompt: int,
    max_tokens: int,
    arrival_s: float = 0.0,
) -> WorkloadRequest:
    """Draws a prompt of random tokens, without the first four ids, which are often special."""
    ids = tuple(generator.randrange(4, vocab_size) for _ in range(num_prompt))
    return WorkloadRequest(ids, max_tokens, arrival_s)


def log_uniform_workload(
    num_requests: int,
    vocab_size: int,
    *,
    prompt_tokens: tuple[int, int] = (16, 512),
    output_tokens: tuple[int, int] = (8, 256),
    seed: int | str = 0,
) -> Workload:
    """Draws requests that all come at once, with lengths log-uniform within the given bounds."""
    generator = random.Random(seed)

    def length(low: int, high: int) -> int:
        return round(math.exp(generator.uniform(math.log(low), math.log(high))))

    requests = []
    for _ in range(num_requests):
        num_prompt, num_output = length(*prompt_tokens), length(*output_tokens)
        requests.append(draw_request(generator, vocab_size, num_prompt, num_output))
    return Workload(tuple(requests))


def chosen_workload(options: argparse.Namespace, vocab_size: int, seed: int | str) -> Workload:
    """Reads the file that the options name, or draws requests as they say. Raises BadWorkload."""
    if options.workload is not None:
        return read_workload(options.workload)
    return log_uniform_workload(
        options.requests,
        vocab_size,
        prompt_tokens=options.prompt_tokens,
        output_tokens=options.output_tokens,
        seed=seed,
    )


def arriving(workload: Workload, arrivals_s: Sequence[float]) -> Workload:
    """Returns the same requests at these times."""
    pairs = zip(workload.requests, arrivals_s, strict=True)
    return Workload(
        tuple(msgspec.structs.replace(request, arrival_s=at_s) for request, at_s in pairs)
    )


def draw_arrivals(
    num_requests: int, rate_per_s: float, process: ArrivalProcess, burstiness: float, seed: str
) -> list[float]:
    """Draws the arrivals of an open loop; a gap precedes the first.

    `burstiness` is the shape of the gaps' gamma distribution: 1 is Poisson, less is burstier, more
    is smoother.
    """
    rng = random.Random(seed)
    shape = 1.0 if process == "poisson" else burstiness
    arrivals, now_s = [], 0.0
    for _ in range(num_requests):
        is_even = process == "constant"
        now_s += 1 / rate_per_s if is_even else rng.gammavariate(shape, 1 / (rate_per_s * shape))
        arrivals.append(now_s)
    return arrivals


def read_trace(path: Path, vocab_size: int, seed: str) -> Workload:
    """Reads arrivals and lengths from CSV with the heading arrival_s,prompt_tokens,max_tokens, and
    draws prompts. Raises BadWorkload with the line."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as exc:
        raise BadWorkload(f"{path} cannot be read: {exc}") from exc
    if not rows:
        raise BadWorkload(f"{path} has no requests")
    lines = sorted(_trace_line(path, number, row) for number, row in enumerate(rows, 2))
    rng = random.Random(seed)
    return Workload(
        tuple(
            draw_request(rng, vocab_size, num_prompt, max_tokens, arrival_s)
            for arrival_s, num_prompt, max_tokens in lines
        )
    )


def _trace_line(path: Path, line: int, row: dict[str, str]) -> tuple[float, int, int]:
    """Returns the time in seconds, the tokens of the prompt and of the output."""
    try:
        arrival_s = float(row["arrival_s"])
        num_prompt, max_tokens = int(row["prompt_tokens"]), int(row["max_tokens"])
    except (KeyError, TypeError, ValueError) as exc:
        raise BadWorkload(
            f"{path}, line {line}: wants the columns arrival_s, prompt_tokens and max_tokens, "
            "all numbers"
        ) from exc
    if not 0 <= arrival_s < float("inf") or num_prompt < 1 or max_tokens < 1:
        least = "at least 0 seconds, 1 token of prompt, 1 of output"
        raise BadWorkload(f"{path}, line {line}: {least}")
    return arrival_s, num_prompt, max_tokens
