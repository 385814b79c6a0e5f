"""`batchway cascade fit`: reads or measures answers, and prints cost and quality by threshold."""

import argparse
import asyncio
import itertools
import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec

from contract.flows import Cascade
from contract.jobs import Endpoint
from gateway.http.errors import ApiError
from gateway.prepare.flow_calls import text_of
from gateway.runners.flows.calls import parse_body
from gateway.runners.flows.definitions import FlowError, load_flows
from gateway.runners.flows.kinds import confidence, score_body
from infra.measure.cascade_fit import (
    CannotFit,
    FirstAnswer,
    Fit,
    LastAnswer,
    Measured,
    ThresholdEffect,
    fit_threshold,
)
from infra.measure.load import authorization
from infra.measure.plots import draw_fit
from infra.tables import progress_line, table, write

_TIMEOUT_S = 120.0
_NUM_LINES = 11  # of the printed curve


@dataclass(frozen=True, slots=True)
class Question:
    """A body without a model, and the right answer: a text, or fields of a JSON object."""

    body: Mapping[str, Any]
    answer: str | Mapping[str, Any]

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint.CHAT if "messages" in self.body else Endpoint.COMPLETIONS


def run(options: argparse.Namespace) -> int:
    logging.getLogger("httpx").setLevel("WARNING")  # it would log every request
    try:
        rows = read(options.data)
        if questions := [row for row in rows if isinstance(row, Question)]:
            if len(questions) < len(rows):
                raise CannotFit(f"{options.data}: holds questions and measured answers; give one")
            measured = asyncio.run(_ask(options, questions))
            if options.save is not None:  # again, in the order of the questions
                options.save.write_bytes(b"".join(map(_line_of, measured)))
        else:
            measured = [row for row in rows if isinstance(row, Measured)]
        fit = fit_threshold(measured, options.target_quality, options.seed)
    except (CannotFit, FlowError) as exc:
        print(f"batchway cascade fit: {exc}", file=sys.stderr)
        return 1
    result = {"target_quality": options.target_quality, **asdict(fit)}
    write(result, report(fit, options.target_quality), options.json)
    if options.png is not None:
        draw_fit(fit, options.target_quality, options.png)
    return 0 if fit.chosen is not None else 1


def read(path: Path) -> list[Question | Measured]:
    """Reads the data. Raises CannotFit, which names the line."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as exc:
        raise CannotFit(f"{path}: cannot be read: {exc.strerror}") from exc
    rows = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                rows.append(_row(msgspec.json.decode(line)))
            except ValueError as exc:  # msgspec's too
                raise CannotFit(f"{path}:{number}: {exc}") from exc
    return rows


def _row(raw: Any) -> Question | Measured:
    if not isinstance(raw, dict):
        raise CannotFit("must be an object")
    if "first" in raw:
        return msgspec.convert(raw, Measured)
    if ("prompt" in raw) == ("messages" in raw):
        raise CannotFit("needs either `prompt` or `messages`, or answers that --save wrote")
    if "prompt" in raw and not isinstance(raw["prompt"], str):
        raise CannotFit("`prompt` must be a text")
    answer = raw.pop("answer", None)
    if not isinstance(answer, str | dict) or not answer:
        raise CannotFit("`answer` must be the right text, or an object with the right fields")
    return Question(raw, answer)


async def _ask(options: argparse.Namespace, questions: Sequence[Question]) -> list[Measured]:
    cascade = _cascade(options)
    client = httpx.AsyncClient(
        base_url=options.base_url,
        headers=authorization(),
        timeout=_TIMEOUT_S,
    )
    with options.save.open("wb") if options.save else nullcontext() as saved:

        def keep(measured: Measured) -> None:  # at once: a later call may be refused
            if saved is not None:
                saved.write(_line_of(measured))
                saved.flush()

        async with client:
            asker = Asker(client, cascade, options.token_costs, options.max_concurrency)
            return await asker.measure(questions, keep)


def _line_of(measured: Measured) -> bytes:
    return msgspec.json.encode(measured) + b"\n"


def _cascade(options: argparse.Namespace) -> Cascade:
    """Returns the cascade to fit. Raises CannotFit, FlowError."""
    if options.models is None:
        raise CannotFit("questions need --models, the file with the cascade")
    found = {n: f for n, f in load_flows(options.models).items() if isinstance(f, Cascade)}
    name = next(iter(found)) if options.flow is None and len(found) == 1 else options.flow
    if name not in found:
        names = f"its cascades are {', '.join(found)}" if found else "it has no cascade"
        raise CannotFit(f"{options.models}: give --flow with a cascade's name; {names}")
    if len(found[name].members) != 2:
        raise CannotFit(
            f"{name} has {len(found[name].members)} members: fit one threshold at a time, on "
            "cascades of two"
        )
    return found[name]


def report(fit: Fit, target: float) -> str:
    """Returns the curve, and the chosen threshold with its uncertainty."""
    lines = [["threshold", "first member answers", "quality", "cost"]]
    for point in _shown(fit):
        threshold = f"{point.threshold:.6f}{' *' if point == fit.chosen else ''}"
        shares = (point.first_share, point.quality, point.cost)
        lines.append([threshold, *(f"{share:.1%}" for share in shares)])
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


def _shown(fit: Fit) -> list[ThresholdEffect]:
    """Points at even shares of the first member, and the chosen one."""
    wanted = [i / (_NUM_LINES - 1) for i in range(_NUM_LINES)]
    near = {min(fit.curve, key=lambda p: abs(p.first_share - share)) for share in wanted}
    if fit.chosen is not None:
        near.add(fit.chosen)
    return sorted(near, key=lambda point: point.first_share)


def _percents(interval: Any) -> str:
    return f"{interval.low:.1%} to {interval.high:.1%}"


@dataclass(frozen=True, slots=True)
class _Answer:
    text: str
    logprobs: Sequence[float]
    cost: float


@dataclass(frozen=True, slots=True)
class Asker:
    """Asks the members. `token_costs`: of each member; None: the cost of a call is its seconds."""

    client: httpx.AsyncClient
    cascade: Cascade
    token_costs: Sequence[float] | None
    max_concurrency: int

    async def measure(
        self, questions: Sequence[Question], keep: Callable[[Measured], None]
    ) -> list[Measured]:
        """Measures in the order of the questions; keeps each result. Raises CannotFit."""
        places = asyncio.Semaphore(self.max_concurrency)
        show, numbers = progress_line("questions"), itertools.count(1)

        async def measure(question: Question) -> Measured:
            async with places:
                measured = await self._measure(question)
            keep(measured)
            show(next(numbers), len(questions))
            return measured

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(measure(question)) for question in questions]
        except ExceptionGroup as group_of_faults:
            raise group_of_faults.exceptions[0] from group_of_faults
        return [task.result() for task in tasks]

    async def _measure(self, question: Question) -> Measured:
        first = await self._ask(0, question)
        sure = await self._confidence(question, first)
        last = await self._ask(-1, question)
        return Measured(
            first=FirstAnswer(confidence=sure, quality=_quality(question, first), cost=first.cost),
            last=LastAnswer(quality=_quality(question, last), cost=last.cost),
        )

    async def _ask(self, member: int, question: Question) -> _Answer:
        name = self.cascade.members[member].model
        body = {"temperature": 0, **question.body, "model": name}
        if member == 0 and self.cascade.confidence.by.endswith("logprob"):
            body["logprobs"] = True if question.endpoint is Endpoint.CHAT else 1
        started_s = time.perf_counter()
        data = await self._post(question.endpoint.removeprefix("/v1/"), body)
        seconds = time.perf_counter() - started_s
        try:
            choice, num_tokens = data["choices"][0], data["usage"]["total_tokens"]
            found = choice.get("logprobs") or {}
            if question.endpoint is Endpoint.CHAT:
                text = choice["message"]["content"] or ""
                logprobs = [token["logprob"] for token in found.get("content") or ()]
            else:
                text, logprobs = choice["text"], found.get("token_logprobs") or []
        except (LookupError, TypeError) as exc:
            raise CannotFit(f"{name} answers in an unknown form") from exc
        cost = seconds if self.token_costs is None else num_tokens * self.token_costs[member]
        return _Answer(text, logprobs, cost)

    async def _confidence(self, question: Question, answer: _Answer) -> float:
        kind = self.cascade.confidence
        if kind.by != "scorer":
            return confidence(kind, answer.logprobs, answer.text)
        body = {"model": kind.scorer, **score_body(scorer_prompt(question), answer.text)}
        data = await self._post("score", body)
        try:
            return float(min(max(data["data"][0]["score"], 0.0), 1.0))
        except (LookupError, TypeError) as exc:
            raise CannotFit(f"{kind.scorer} answers in an unknown form") from exc

    async def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        url = self.client.base_url
        try:
            response = await self.client.post(path, json=body)
            data = response.json()
        except httpx.HTTPError as exc:
            raise CannotFit(f"{url} does not answer: {type(exc).__name__}") from exc
        except ValueError as exc:
            raise CannotFit(f"{url} answers something else than JSON") from exc
        if response.status_code != 200:
            error = data.get("error") if isinstance(data, dict) else None
            reason = (error.get("code") or error.get("type")) if isinstance(error, dict) else ""
            raise CannotFit(
                f"{body['model']} refuses a question with {response.status_code} {reason}".rstrip()
            )
        return data


def scorer_prompt(question: Question) -> str:
    """Returns what a scorer compares the answer to. Raises CannotFit."""
    try:
        return text_of(parse_body(question.endpoint, {**question.body, "model": "any"}))
    except ApiError as exc:
        raise CannotFit(f"a question is no body of {question.endpoint}: {exc.message}") from exc


def _quality(question: Question, answer: _Answer) -> float:
    """1 if the answer is right, apart from space around it; else 0."""
    if isinstance(question.answer, str):
        return float(answer.text.strip() == question.answer.strip())
    try:
        found = msgspec.json.decode(answer.text)
    except msgspec.DecodeError:
        return 0.0
    return float(
        isinstance(found, dict)
        and all(name in found and found[name] == value for name, value in question.answer.items())
    )
