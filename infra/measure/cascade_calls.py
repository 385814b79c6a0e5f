"""Asks both members of a cascade each question, and measures their answers."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec

from contract.flows import Cascade
from contract.jobs import Endpoint
from gateway.http.errors import ApiError
from gateway.prepare.calls import text_of
from gateway.runners.flows.calls import parse_body
from gateway.runners.flows.kinds import confidence, score_body
from infra.measure.cascade_fit import FirstAnswer, LastAnswer, Measured

CHAT, COMPLETIONS = "chat/completions", "completions"


class CallRefused(Exception):
    """A member gave no answer. The message is one sentence, without the prompt."""


@dataclass(frozen=True, slots=True)
class Question:
    """A body without a model, and the right answer: a text, or fields of a JSON object."""

    body: Mapping[str, Any]
    answer: str | Mapping[str, Any]

    @property
    def path(self) -> str:
        return CHAT if "messages" in self.body else COMPLETIONS


@dataclass(frozen=True, slots=True)
class _Answer:
    text: str
    logprobs: Sequence[float]
    num_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Asker:
    """Asks the members. `token_costs`: of each member; None: the cost of a call is its seconds."""

    client: httpx.AsyncClient
    cascade: Cascade
    token_costs: Sequence[float] | None
    max_concurrency: int

    async def measure(
        self,
        questions: Sequence[Question],
        progress: Callable[[int, int], None],
        keep: Callable[[Measured], None],
    ) -> list[Measured]:
        """Measures in the order of the questions; keeps each result. Raises CallRefused."""
        places = asyncio.Semaphore(self.max_concurrency)
        num_done = 0

        async def measure(question: Question) -> Measured:
            nonlocal num_done
            async with places:
                measured = await self._measure(question)
            keep(measured)
            num_done += 1
            progress(num_done, len(questions))
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
            first=FirstAnswer(
                confidence=sure, quality=_quality(question, first), cost=self._cost(0, first)
            ),
            last=LastAnswer(quality=_quality(question, last), cost=self._cost(-1, last)),
        )

    async def _ask(self, member: int, question: Question) -> _Answer:
        name = self.cascade.members[member].model
        body = {"temperature": 0, **question.body, "model": name}
        if member == 0 and self.cascade.confidence.by.endswith("logprob"):
            body["logprobs"] = True if question.path == CHAT else 1
        started_s = time.perf_counter()
        data = await self._post(question.path, body)
        seconds = time.perf_counter() - started_s
        try:
            choice, num_tokens = data["choices"][0], data["usage"]["total_tokens"]
            found = choice.get("logprobs") or {}
            if question.path == CHAT:
                text = choice["message"]["content"] or ""
                logprobs = [token["logprob"] for token in found.get("content") or ()]
            else:
                text, logprobs = choice["text"], found.get("token_logprobs") or []
        except (LookupError, TypeError) as exc:
            raise CallRefused(f"{name} answers in an unknown form") from exc
        return _Answer(text, logprobs, num_tokens, seconds)

    async def _confidence(self, question: Question, answer: _Answer) -> float:
        kind = self.cascade.confidence
        if kind.by != "scorer":
            return confidence(kind, answer.logprobs, answer.text)
        body = {"model": kind.scorer, **score_body(scorer_prompt(question), answer.text)}
        data = await self._post("score", body)
        try:
            return float(min(max(data["data"][0]["score"], 0.0), 1.0))
        except (LookupError, TypeError) as exc:
            raise CallRefused(f"{kind.scorer} answers in an unknown form") from exc

    def _cost(self, member: int, answer: _Answer) -> float:
        costs = self.token_costs
        return answer.seconds if costs is None else answer.num_tokens * costs[member]

    async def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        try:
            response = await self.client.post(path, json=body)
            data = response.json()
        except httpx.HTTPError as exc:
            raise CallRefused(
                f"{self.client.base_url} does not answer: {type(exc).__name__}"
            ) from exc
        except ValueError as exc:
            raise CallRefused(f"{self.client.base_url} answers something else than JSON") from exc
        if response.status_code != 200:
            error = data.get("error") if isinstance(data, dict) else None
            reason = (error.get("code") or error.get("type")) if isinstance(error, dict) else ""
            raise CallRefused(
                f"{body['model']} refuses a question with {response.status_code} {reason}".rstrip()
            )
        return data


def scorer_prompt(question: Question) -> str:
    """Returns what a scorer compares the answer to, as in a cascade. Raises CallRefused."""
    endpoint = Endpoint.CHAT if question.path == CHAT else Endpoint.COMPLETIONS
    try:
        return text_of(parse_body(endpoint, {**question.body, "model": "any"}))
    except ApiError as exc:
        raise CallRefused(f"a question is no body of {endpoint}: {exc.message}") from exc


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
