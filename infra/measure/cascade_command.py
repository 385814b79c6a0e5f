"""`batchway cascade fit`: reads or measures answers, and prints cost and quality by threshold."""

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import msgspec

from contract.flows import Cascade
from gateway.runners.flows.definitions import FlowError, load_flows
from infra.measure.cascade_calls import Asker, CallRefused, Question
from infra.measure.cascade_fit import CannotFit, Fit, Measured, Point, fit_threshold
from infra.measure.serve_command import KEY_VARIABLES
from infra.tables import progress_line, table, write

_TIMEOUT_S = 120.0
_NUM_LINES = 11  # of the printed curve


class BadData(ValueError):
    """The data or the cascade cannot be used. The message is one sentence."""


def run(options: argparse.Namespace) -> int:
    logging.getLogger("httpx").setLevel("WARNING")  # it would log every request
    try:
        rows = read(options.data)
        if questions := [row for row in rows if isinstance(row, Question)]:
            if len(questions) < len(rows):
                raise BadData(f"{options.data}: holds questions and measured answers; give one")
            measured = asyncio.run(_ask(options, questions))
            if options.save is not None:  # again, in the order of the questions
                options.save.write_bytes(b"".join(map(_line_of, measured)))
        else:
            measured = [row for row in rows if isinstance(row, Measured)]
        fit = fit_threshold(measured, options.target_quality, options.seed)
    except (BadData, CannotFit, CallRefused, FlowError) as exc:
        print(f"batchway cascade fit: {exc}", file=sys.stderr)
        return 1
    result = {"target_quality": options.target_quality, **asdict(fit)}
    write(result, report(fit, options.target_quality), options.json)
    if options.png is not None:
        from infra.measure.cascade_plot import draw_fit

        draw_fit(fit, options.target_quality, options.png)
    return 0 if fit.chosen is not None else 1


def read(path: Path) -> list[Question | Measured]:
    """Reads the data. Raises BadData, which names the line."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as exc:
        raise BadData(f"{path}: cannot be read: {exc.strerror}") from exc
    rows = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                rows.append(_row(msgspec.json.decode(line)))
            except ValueError as exc:  # msgspec's too
                raise BadData(f"{path}:{number}: {exc}") from exc
    return rows


def _row(raw: Any) -> Question | Measured:
    if not isinstance(raw, dict):
        raise BadData("must be an object")
    if "first" in raw:
        return msgspec.convert(raw, Measured)
    if ("prompt" in raw) == ("messages" in raw):
        raise BadData("needs either `prompt` or `messages`, or answers that --save wrote")
    if "prompt" in raw and not isinstance(raw["prompt"], str):
        raise BadData("`prompt` must be a text")
    answer = raw.pop("answer", None)
    if not isinstance(answer, str | dict) or not answer:
        raise BadData("`answer` must be the right text, or an object with the right fields")
    return Question(raw, answer)


async def _ask(options: argparse.Namespace, questions: Sequence[Question]) -> list[Measured]:
    cascade = _cascade(options)
    key = next((os.environ[name] for name in KEY_VARIABLES if os.environ.get(name)), None)
    client = httpx.AsyncClient(
        base_url=options.base_url,
        headers={"authorization": f"Bearer {key}"} if key else {},
        timeout=_TIMEOUT_S,
    )
    with options.save.open("wb") if options.save else nullcontext() as saved:

        def keep(measured: Measured) -> None:  # at once: a later call may be refused
            if saved is not None:
                saved.write(_line_of(measured))
                saved.flush()

        async with client:
            asker = Asker(client, cascade, options.token_costs, options.max_concurrency)
            return await asker.measure(questions, progress_line("questions"), keep)


def _line_of(measured: Measured) -> bytes:
    return msgspec.json.encode(measured) + b"\n"


def _cascade(options: argparse.Namespace) -> Cascade:
    """Returns the cascade to fit. Raises BadData, FlowError."""
    if options.models is None:
        raise BadData("questions need --models, the file with the cascade")
    found = {n: f for n, f in load_flows(options.models).items() if isinstance(f, Cascade)}
    name = next(iter(found)) if options.flow is None and len(found) == 1 else options.flow
    if name not in found:
        names = f"its cascades are {', '.join(found)}" if found else "it has no cascade"
        raise BadData(f"{options.models}: give --flow with a cascade's name; {names}")
    if len(found[name].members) != 2:
        raise BadData(
            f"{name} has {len(found[name].members)} members: fit one threshold at a time, on "
            "cascades of two"
        )
    return found[name]


def report(fit: Fit, target: float) -> str:
    """Returns the curve, and the chosen threshold with its uncertainty."""
    lines = [["threshold", "first member answers", "quality", "cost"]]
    lines += [_line(point, "" if point != fit.chosen else " *") for point in _shown(fit)]
    text = (
        f"{fit.num_questions} questions. Quality and cost: of the last member alone, which answers "
        f"{fit.last_quality:.1%} right for {fit.last_cost:.4g} a question.\n\n{table(lines)}\n\n"
    )
    if fit.chosen is None:
        return f"{text}No threshold keeps {target:.1%} of its quality: call the last member alone."
    assert fit.quality_interval is not None
    assert fit.cost_interval is not None
    advice = "" if fit.chosen.cost < 1 else "\nThat costs no less than the last member alone."
    return (
        f"{text}* threshold {fit.chosen.threshold:.6f}: {fit.chosen.quality:.2%} of the quality "
        f"(95 % interval {_percents(fit.quality_interval)}) for {fit.chosen.cost:.1%} of the cost "
        f"({_percents(fit.cost_interval)}).\nOn questions that a choice did not see: "
        f"{_percents(fit.unseen_quality)} of the quality.{advice}"
    )


def _shown(fit: Fit) -> list[Point]:
    """Points at even shares of the first member, and the chosen one."""
    wanted = [i / (_NUM_LINES - 1) for i in range(_NUM_LINES)]
    near = {min(fit.curve, key=lambda p: abs(p.first_share - share)) for share in wanted}
    if fit.chosen is not None:
        near.add(fit.chosen)
    return sorted(near, key=lambda point: point.first_share)


def _line(point: Point, mark: str) -> list[str]:
    return [
        f"{point.threshold:.6f}{mark}",
        f"{point.first_share:.1%}",
        f"{point.quality:.1%}",
        f"{point.cost:.1%}",
    ]


def _percents(interval: Any) -> str:
    return f"{interval.low:.1%} to {interval.high:.1%}"
