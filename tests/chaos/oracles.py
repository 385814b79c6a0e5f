"""What to ask, and what the right answer is: computed for the hash model, asked for beforehand of
a model with arithmetic."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import httpx

from contract.jobs import SamplingParams
from tests.fakes import HashModelOptions, encode_text, expected_output

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
NEAR_TIE = 1e-3  # difference of log probabilities below which the last bits of a sum decide


@dataclass(frozen=True, slots=True)
class Ask:
    """A request and the tokens of its answer, by choice."""

    endpoint: str
    body: Mapping[str, Any]
    prompt_ids: tuple[int, ...]
    expected: tuple[tuple[int, ...], ...]


class Oracle(Protocol):
    """Draws requests whose answers are known."""

    model: str
    is_exact: bool

    def draw(self, rng: random.Random) -> Ask: ...


class HashOracle:
    """The hash model: any prompts, greedy or sampled, one or two choices of each."""

    model = "m"
    is_exact = True

    def __init__(self, options: HashModelOptions) -> None:
        self._options = options

    def draw(self, rng: random.Random) -> Ask:
        endpoint = rng.choice((CHAT, COMPLETIONS))
        text = f"{rng.randrange(10**6)} " * rng.randint(1, 6)
        n = rng.choice((1, 1, 1, 2))
        sampling: dict[str, Any] = {
            "temperature": 1.0 if n > 1 else rng.choice((0.0, 1.0)),
            "seed": rng.randrange(2**31),
            "max_tokens": rng.randint(10, 90),
            "ignore_eos": rng.random() < 0.7,
            "n": n,
        }
        if endpoint == CHAT:
            asked: dict[str, Any] = {"messages": [{"role": "user", "content": text}]}
            prompts = [encode_text(f"user: {text}\nassistant: ")]
        else:
            texts = [text, *(f"{text}{i}" for i in range(rng.choice((0, 0, 1, 3))))]
            asked, prompts = {"prompt": texts}, [encode_text(text) for text in texts]
        body = {"model": self.model, "return_token_ids": True, **asked, **sampling}
        params = SamplingParams(**sampling)
        expected = tuple(
            tuple(self._output(prompt_ids, params, choice))
            for prompt_ids in prompts
            for choice in range(n)
        )
        return Ask(endpoint, body, prompts[0], expected)

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


class DemoOracle:
    """The demo model: each question was asked once before anything was disturbed."""

    model = "demo"
    is_exact = False

    def __init__(self, asks: Sequence[Ask]) -> None:
        self._asks = asks

    @classmethod
    async def ask_undisturbed(cls, url: str, rng: random.Random, number: int) -> "DemoOracle":
        """Asks so many greedy questions."""
        asks = []
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:
            for _ in range(number):
                first = rng.randint(1, 400)
                question = f"Count from {first} to {first + rng.randint(3, 30)}."
                body = {
                    "model": cls.model,
                    "messages": [{"role": "user", "content": question}],
                    "temperature": 0,
                    "return_token_ids": True,
                }
                answer = (await http.post(CHAT, json=body)).raise_for_status().json()
                ids = tuple(answer["choices"][0]["token_ids"])
                asks.append(Ask(CHAT, body, tuple(answer["prompt_token_ids"]), (ids,)))
        return cls(asks)

    def draw(self, rng: random.Random) -> Ask:
        return rng.choice(self._asks)


async def is_near_tie(
    http: httpx.AsyncClient, model: str, prompt_ids: Sequence[int], output_ids: Sequence[int]
) -> bool:
    """Whether each token of a greedy answer was the likeliest, or nearly so, after those before
    it: the model scores the text with the answer forced upon it."""
    body = {
        "model": model,
        "prompt": [*prompt_ids, *output_ids],
        "max_tokens": 0,
        "echo": True,
        "prompt_logprobs": 1,
    }
    answer = (await http.post(COMPLETIONS, json=body)).raise_for_status().json()
    rows = answer["choices"][0]["prompt_logprobs"][len(prompt_ids) :]
    for token_id, row in zip(output_ids, rows, strict=True):
        best = max(entry["logprob"] for entry in row.values())
        if best - row[str(token_id)]["logprob"] > NEAR_TIE:
            return False
    return True
