"""Requests and their right answers: computed for the hash model; for a real model, recorded
beforehand and judged by the same weights in this process."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

import httpx

from contract.jobs import Job, SamplingParams
from gateway.grammars.compiled import Kind, compile_grammar
from infra.demo_model import demo_model_path
from tests.chaos.ledger import Output
from tests.fakes import HashModelOptions, encode_text, expected_output
from tests.resume.logged_job import new_job
from workers.ipc.messages import EngineOptions

if TYPE_CHECKING:
    from tests.resume.near_ties import Judge

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MESSAGES = "/v1/messages"
# Counting, the demo model is sure of every digit at any temperature, unless repeats are penalised.
DOUBT = {"presence_penalty": 1.5, "frequency_penalty": 2.0, "repetition_penalty": 1.5}


@dataclass(frozen=True, slots=True)
class Ask:
    """A request and the tokens of its answer, by choice."""

    endpoint: str
    body: Mapping[str, Any]
    expected: tuple[tuple[int, ...], ...]
    asked: Job | None = None  # for a model with arithmetic


class Oracle(Protocol):
    """Draws requests whose answers are known."""

    model: str
    is_exact: bool

    def draw(self, rng: random.Random) -> Ask: ...

    def is_right(self, asked: Job | None, output: Output, *, is_whole: bool) -> bool:
        """Whether an answer that is not the expected one is right all the same."""
        ...


_CONSTRAINED_SHARE = 0.3
# Of prompts: some worker holds those that are long.
OPENINGS = ("", "", *(f"as said in part {part}, " * 8 for part in "xyz"))
_CONSTRAINTS: Mapping[str, Mapping[str, Any]] = {
    "json": {
        "guided_json": {
            "type": "object",
            "properties": {"id": {"type": "integer"}, "text": {"type": "string", "maxLength": 20}},
            "required": ["id", "text"],
            "additionalProperties": False,
        }
    },
    "regex": {"guided_regex": "([a-f]{3}-){4,12}[0-9]+x"},
}


@cache
def _compiled(name: str) -> str:
    [(parameter, value)] = _CONSTRAINTS[name].items()
    kind = {"guided_json": Kind.JSON_SCHEMA, "guided_regex": Kind.REGEX}[parameter]
    return compile_grammar(kind, value)


class HashOracle:
    """The hash model: any prompts, greedy or sampled, constrained or not, one or two choices."""

    model = "m"
    is_exact = True

    def __init__(self, options: HashModelOptions) -> None:
        self._options = options

    def draw(self, rng: random.Random) -> Ask:
        endpoint = rng.choice((CHAT, COMPLETIONS))
        text = rng.choice(OPENINGS) + f"{rng.randrange(10**6)} " * rng.randint(1, 6)
        session = rng.choice(({}, {}, {"prompt_cache_key": rng.choice("abc")}))
        n = rng.choice((1, 1, 1, 2))
        sampling: dict[str, Any] = {
            "temperature": 1.0 if n > 1 else rng.choice((0.0, 1.0)),
            "seed": rng.randrange(2**31),
            "max_tokens": rng.randint(10, 90),
            "ignore_eos": rng.random() < 0.7,
            "n": n,
        }
        constraint: Mapping[str, Any] = {}
        grammar = ""
        if rng.random() < _CONSTRAINED_SHARE:
            name = rng.choice(sorted(_CONSTRAINTS))
            grammar, constraint = _compiled(name), _CONSTRAINTS[name]
            sampling["ignore_eos"] = False
        if endpoint == CHAT:
            asked: dict[str, Any] = {"messages": [{"role": "user", "content": text}]}
            prompts = [encode_text(f"user: {text}\nassistant: ")]
        else:
            texts = [text, *(f"{text}{i}" for i in range(rng.choice((0, 0, 1, 3))))]
            asked, prompts = {"prompt": texts}, [encode_text(text) for text in texts]
        body = {"model": self.model, "return_token_ids": True, **asked, **sampling}
        body |= {**constraint, **session}
        params = SamplingParams(**sampling, grammar=grammar)
        expected = tuple(
            tuple(self._output(prompt_ids, params, choice))
            for prompt_ids in prompts
            for choice in range(n)
        )
        return Ask(endpoint, body, expected)

    def draw_message(self, rng: random.Random) -> Ask:
        """In Anthropic's form, whose answers show no token ids: each token of these is a letter."""
        text = f"{rng.randrange(10**6)} " * rng.randint(1, 6)
        sampling: dict[str, Any] = {"temperature": 0.0, "top_k": 26}
        sampling["max_tokens"] = rng.randint(10, 90)
        body = {"model": self.model, "messages": [{"role": "user", "content": text}], **sampling}
        prompt_ids = encode_text(f"user: {text}\nassistant: ")
        expected = self._output(prompt_ids, SamplingParams(**sampling, seed=0), 0)
        return Ask(MESSAGES, body, (tuple(expected),))

    def is_right(self, asked: Job | None, output: Output, *, is_whole: bool) -> bool:
        return False

    def _output(
        self, prompt_ids: tuple[int, ...], params: SamplingParams, choice: int
    ) -> list[int]:
        token_ids, _ = expected_output(
            prompt_ids,
            params,
            choice=choice,
            max_model_len=self._options.max_model_len,
            eos_rate=self._options.eos_rate,
        )
        return token_ids


def demo_judge() -> "Judge":
    """The demo model in this process, loaded by batchway's own code."""
    from tests.resume.near_ties import Judge
    from workers.model.loader import load_model
    from workers.model.runner import ModelRunner

    path = str(demo_model_path())
    options = EngineOptions(
        model_path=path, device="cpu", dtype="float32", num_threads=1, kv_memory_bytes=2**24
    )
    runner = load_model(options, lambda text: None).model
    assert isinstance(runner, ModelRunner)
    return Judge(runner)


class DemoOracle:
    """The demo model: each question was answered once before any fault.

    Half of the questions are sampled at a high temperature with penalties, so that the model is
    sure of nothing: a token at another position, or after another history, would differ.
    """

    model = "demo"
    is_exact = False

    def __init__(self, asks: Sequence[Ask], judge: "Judge") -> None:
        self._asks = asks
        self._judge = judge

    @classmethod
    async def ask_undisturbed(cls, url: str, rng: random.Random, number: int) -> "DemoOracle":
        """Asks this many questions. Raises AssertionError if an answer is not the model's."""
        asks = []
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:
            for i in range(number):
                first = rng.randint(1, 400)
                question = f"Count from {first} to {first + rng.randint(3, 30)}."
                sampling: dict[str, Any] = {"temperature": 0.0, "max_tokens": 150}
                if i % 2:
                    sampling = {
                        "temperature": 2.0,
                        "seed": rng.randrange(2**31),
                        "max_tokens": rng.randint(20, 150),
                        "ignore_eos": True,
                        "n": rng.choice((1, 2)),
                        **DOUBT,
                    }
                body = {
                    "model": cls.model,
                    "messages": [{"role": "user", "content": question}],
                    "return_token_ids": True,
                    **sampling,
                }
                answer = (await http.post(CHAT, json=body)).raise_for_status().json()
                asked = new_job(f"question-{i}", answer["prompt_token_ids"], **sampling)
                expected = tuple(tuple(choice["token_ids"]) for choice in answer["choices"])
                asks.append(Ask(CHAT, body, expected, asked))
        oracle = cls(asks, demo_judge())
        for ask in asks:
            output = dict(enumerate(ask.expected))
            assert oracle.is_right(ask.asked, output, is_whole=True), "wrong before any fault"
        return oracle

    def draw(self, rng: random.Random) -> Ask:
        return rng.choice(self._asks)

    def is_right(self, asked: Job | None, output: Output, *, is_whole: bool) -> bool:
        """Teacher-forced scoring: each token was chosen, or nearly so, after those before it; a
        whole answer ends where it must."""
        from tests.resume.near_ties import NEAR_TIE

        assert asked is not None
        params, eos_token_ids = asked.params, self._judge.runner.eos_token_ids
        for choice, token_ids in output.items():
            for position, token_id in enumerate(token_ids):
                scores = self._judge.scores(asked, choice, token_ids[:position])
                if scores.max() - scores[token_id] > NEAR_TIE:
                    return False
            has_ended = not params.ignore_eos and token_ids and token_ids[-1] in eos_token_ids
            if is_whole and not has_ended and len(token_ids) != params.max_tokens:
                return False
        return True
