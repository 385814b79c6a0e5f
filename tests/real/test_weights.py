"""Published weights through a gateway and workers: SmolLM2 gives transformers' tokens and log
probabilities, also where its worker is killed, drained or short of memory; MiniLM gives the vectors
of sentence-transformers."""

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import jsonschema  # type: ignore[import-untyped]
import numpy as np
import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.questions import PROMPTS, QUESTIONS
from contract.telemetry.metrics_reader import MetricsSamples
from tests.fleet import Program
from tests.real.parts import MINILM, SMOLLM2, needs_parts
from tests.real.server import until_true
from tests.tiny_encoders import bi_encoder
from tests.vllm_environment import vllm_arguments

pytestmark = [pytest.mark.campaign, pytest.mark.e2e, pytest.mark.timeout(600), needs_parts]

CHAT = "/chat/completions"
NUM_CHATS = 32
NUM_GENERATED = 4  # also by `generate`, which takes seconds for each
MAX_TOKENS = 40
TOLERANCE = 1e-4  # of a log probability; tokens so close are a tie that rounding may break
LEAST_COSINE = 0.9999
SCHEMAS: tuple[dict[str, Any], ...] = (
    {"city": {"enum": ["Paris", "Rome", "Oslo"]}, "is_large": {"type": "boolean"}},
    {"answer": {"type": "string", "maxLength": 20}, "sure": {"type": "integer", "maximum": 100}},
    {"words": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 3}},
    {"colour": {"enum": ["red", "green"]}, "shade": {"type": "string", "pattern": "^[a-z]{1,9}$"}},
    {"place": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}},
)


@dataclass(frozen=True, slots=True)
class Chat:
    """A prompt, its greedy output and the log probability of each token of it."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str


@dataclass
class Reference:
    """transformers on the same weights. `num_ties` counts tokens within TOLERANCE of its own."""

    decoder: Any
    tokenizer: Any
    num_ties: int = 0
    _checked: set[Chat] = field(default_factory=set)

    @torch.inference_mode()
    def logprobs(self, token_ids: Sequence[int]) -> torch.Tensor:
        """(num_tokens - 1, vocab_size): of each token after the first."""
        logits = self.decoder(torch.tensor([token_ids]), use_cache=False).logits[0, :-1]
        found: torch.Tensor = logits.double().log_softmax(-1)
        return found

    def prompt_ids(self, text: str) -> tuple[int, ...]:
        messages = [{"role": "user", "content": text}]
        ids = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        return tuple(ids["input_ids"])

    @torch.inference_mode()
    def generate(self, prompt_ids: Sequence[int]) -> tuple[int, ...]:
        """The greedy output."""
        ids = torch.tensor([prompt_ids])
        mask = torch.ones_like(ids)
        out = self.decoder.generate(
            ids, attention_mask=mask, do_sample=False, max_new_tokens=MAX_TOKENS
        )
        return tuple(out[0, len(prompt_ids) :].tolist())

    def check(self, chat: Chat) -> None:
        """Each token is the likeliest after those before it, or within TOLERANCE of that, and has
        the same log probability."""
        if chat in self._checked:
            return
        self._checked.add(chat)
        num_tokens = len(chat.token_ids)
        expected = self.logprobs([*chat.prompt_ids, *chat.token_ids])[-num_tokens:]
        own = expected[range(num_tokens), chat.token_ids]
        gaps = expected.max(-1).values - own
        assert gaps.max() < TOLERANCE, f"token {int(gaps.argmax())} is not the likeliest: {gaps}"
        self.num_ties += int((gaps > 0).sum())
        assert list(chat.logprobs) == pytest.approx(own.tolist(), abs=TOLERANCE)
        has_ended = chat.token_ids[-1] == self.tokenizer.eos_token_id
        assert has_ended or num_tokens == MAX_TOKENS
        assert chat.finish_reason == ("stop" if has_ended else "length")


@dataclass
class Served:
    """SmolLM2 behind a gateway, on workers that the tests start and end."""

    url: str
    redis_url: str
    reference: Reference
    client: openai.OpenAI
    _kv_gib: float = 0.0
    workers: list[Program] = field(default_factory=list)

    def have(self, num_workers: int, kv_gib: float = 0.5) -> None:
        """Starts workers until so many live, all with this much KV cache; waits for them."""
        if kv_gib != self._kv_gib:
            self.end_all()
            until_ready(self.url, "r", [])
        self._kv_gib = kv_gib
        self.workers = [worker for worker in self.workers if worker.is_alive]
        while len(self.workers) < num_workers:
            self.workers.append(worker_of(SMOLLM2, "r", self.redis_url, kv_gib))
        until_ready(self.url, "r", self.workers)

    def end_all(self) -> None:
        """kill -9 of all workers and engines."""
        for worker in self.workers:
            worker.kill_group()
        self.workers.clear()

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        """Sent again where the gateway is busy."""
        found: Any = self.client.post(path, cast_to=object, body={"model": "r", **body})
        return found  # type: ignore[no-any-return]

    def chat(self, text: str) -> Chat:
        found = self.post(CHAT, return_token_ids=True, **_body(text))
        return _chat(found["prompt_token_ids"], found["choices"])

    def stream(self, text: str, on_chunk: Callable[[], object] = lambda: None) -> Chat:
        extra = {"return_token_ids": True}
        parts, prompt_ids = list[dict[str, Any]](), list[int]()
        with self.client.chat.completions.create(
            model="r", stream=True, extra_body=extra, **_body(text)
        ) as stream:
            for chunk in stream:
                data: dict[str, Any] = chunk.to_dict()
                prompt_ids += data.get("prompt_token_ids") or ()
                parts += data["choices"]
                on_chunk()
        return _chat(prompt_ids, parts)

    def counted(self, name: str) -> float:
        page = MetricsSamples.parse(httpx.get(f"{self.url}/metrics").text)
        return page.value(name, model_name="r")


def _body(text: str) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "logprobs": True,
    }


def _chat(prompt_ids: Sequence[int], parts: Sequence[dict[str, Any]]) -> Chat:
    """From the one choice of a whole answer, or those of the chunks of a stream."""
    token_ids = [token_id for part in parts for token_id in part.get("token_ids") or ()]
    shown = [one for part in parts for one in (part.get("logprobs") or {}).get("content") or ()]
    return Chat(
        tuple(prompt_ids),
        tuple(token_ids),
        tuple(one["logprob"] for one in shown),
        parts[-1]["finish_reason"],
    )


def worker_of(model: Path, name: str, redis_url: str, kv_gib: float, *more: str) -> Program:
    """Takes a lapsed worker's jobs within two seconds, and ends within three of a SIGTERM."""
    words = ("--namespace=test", f"--model={model}", f"--served-model-name={name}")
    times = ("--lease-s=2", "--drain-s=3")
    options = (*words, *times, f"--kv-cache-gib={kv_gib}", *more)
    return Program("infra", "worker", *options, environ={"REDIS_URL": redis_url})


def until_ready(url: str, name: str, workers: Sequence[Program]) -> None:
    def is_so() -> bool:
        assert all(worker.is_alive for worker in workers), "no worker could start"
        ready = httpx.get(f"{url}/readyz").json().get("workers", {})
        return bool(ready.get(name, 0) == len(workers))

    until_true(is_so)


@pytest.fixture(scope="module")
def reference() -> Reference:
    decoder: Any = AutoModelForCausalLM.from_pretrained(SMOLLM2, dtype=torch.float32)
    return Reference(decoder.eval(), AutoTokenizer.from_pretrained(SMOLLM2))


@pytest.fixture(scope="module")
def served(real_gateway: str, real_redis: str, reference: Reference) -> Iterator[Served]:
    with openai.OpenAI(base_url=f"{real_gateway}/v1", api_key="none", max_retries=20) as client:
        served = Served(real_gateway, real_redis, reference, client)
        try:
            yield served
        finally:
            served.end_all()
        print(f"SmolLM2: {reference.num_ties} tokens were ties that fell otherwise")


def check_at_once(served: Served, act: Callable[[], object] = lambda: None) -> None:
    """Streams 32 chats at once and checks them; `act` is called once they have 200 tokens."""
    counted = itertools.count(1)

    def count() -> None:
        if next(counted) == 200:
            act()

    with ThreadPoolExecutor(NUM_CHATS) as pool:
        chats = list(pool.map(lambda text: served.stream(text, count), PROMPTS[-NUM_CHATS:]))
    assert next(counted) > 400, "it acted in the middle"
    for chat in chats:
        served.reference.check(chat)


def test_a_chat_is_that_of_generate(served: Served) -> None:
    """Whole and streamed, with the log probability of each token."""
    served.have(1)
    for text in PROMPTS[:NUM_GENERATED]:
        chat = served.chat(text)
        assert chat.prompt_ids == served.reference.prompt_ids(text)
        served.reference.check(chat)
        expected = served.reference.generate(chat.prompt_ids)
        assert chat.token_ids == expected or served.reference.num_ties
        streamed = served.stream(text)
        served.reference.check(streamed)
        assert streamed.token_ids == chat.token_ids


def test_chats_at_once_are_those_of_transformers(served: Served) -> None:
    served.have(1)
    check_at_once(served)


def test_a_prompt_from_the_prefix_cache_changes_no_answer(served: Served) -> None:
    """A long beginning that all chats share, asked twice."""
    served.have(1)
    shared = "Answer the last question. " + " ".join(PROMPTS[:16])
    before = served.counted("prefix_cache_hits_total")
    for text in (PROMPTS[0], PROMPTS[1], PROMPTS[0]):
        served.reference.check(served.chat(f"{shared} {text}"))
    until_true(lambda: served.counted("prefix_cache_hits_total") >= before + 300)


def test_a_killed_worker_changes_no_answer(served: Served) -> None:
    """kill -9 of one of two workers and its engine, in the middle of their answers."""
    served.have(2)
    check_at_once(served, served.workers[0].kill_group)
    assert not served.workers[0].is_alive


def test_a_drained_worker_changes_no_answer(served: Served) -> None:
    """SIGTERM to one of two workers, which has less time than its answers take."""
    served.have(2)
    check_at_once(served, served.workers[0].terminate)
    assert served.workers[0].wait(60) == 0


def test_answers_to_fifty_prompts_fit_their_schemas(served: Served) -> None:
    served.have(1)

    def ask(number: int) -> None:
        schema = {
            "type": "object",
            "properties": SCHEMAS[number % len(SCHEMAS)],
            "required": list(SCHEMAS[number % len(SCHEMAS)]),
            "additionalProperties": False,
        }
        shape = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
        messages = [{"role": "user", "content": f"Answer in JSON. {PROMPTS[number]}"}]
        found = served.post(CHAT, messages=messages, response_format=shape, max_tokens=200, seed=1)
        [choice] = found["choices"]
        assert choice["finish_reason"] == "stop", choice
        jsonschema.validate(json.loads(choice["message"]["content"]), schema)

    with ThreadPoolExecutor(NUM_CHATS) as pool:
        list(pool.map(ask, range(len(PROMPTS))))


def test_log_likelihoods_of_choices_are_those_of_transformers(served: Served) -> None:
    """As lm-eval asks for them: the sum over a choice's tokens after its question, and whether
    each is the likeliest; so both choose the same answers."""
    served.have(1)
    tokenizer = served.reference.tokenizer
    pairs = [(f"Question: {q.text}\nAnswer:", f" {c}") for q in QUESTIONS for c in q.choices]
    contexts = [len(tokenizer.encode(context)) for context, _ in pairs]
    wholes = [tokenizer.encode(context + choice) for context, choice in pairs]
    terms = {"max_tokens": 0, "echo": True, "logprobs": 1, "temperature": 0}
    echoed = [
        choice
        for n in range(0, len(wholes), 64)
        for choice in served.post("/completions", prompt=wholes[n : n + 64], **terms)["choices"]
    ]
    found, expected = [], []
    for start, ids, choice in zip(contexts, wholes, echoed, strict=True):
        shown = choice["logprobs"]
        own = shown["token_logprobs"][start : len(ids)]
        likeliest = [max(top.values()) for top in shown["top_logprobs"][start : len(ids)]]
        found.append((sum(own), own == likeliest))
        rows = served.reference.logprobs(ids)[start - 1 :]
        theirs = rows[range(len(rows)), ids[start:]]
        assert own == pytest.approx(theirs.tolist(), abs=TOLERANCE)
        expected.append((float(theirs.sum()), bool((theirs == rows.max(-1).values).all())))
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    chosen, right = (
        [int(np.argmax([p for p, _ in sums[n : n + 4]])) for n in range(0, len(sums), 4)]
        for sums in (found, expected)
    )
    assert chosen == right
    assert chosen.count(0) > len(QUESTIONS) / 2, "the model knows more than chance"


def test_preempted_chats_are_those_of_transformers(served: Served) -> None:
    """A KV cache of 1,400 tokens for chats of up to 2,500."""
    served.have(1, kv_gib=0.06)
    before = served.counted("num_preemptions_total")
    check_at_once(served)
    assert served.counted("num_preemptions_total") > before


@pytest.mark.parametrize("engine", ["own", "vllm"])
def test_embeddings_of_minilm_are_those_of_sentence_transformers(
    engine: str, real_gateway: str, real_redis: str
) -> None:
    options = vllm_arguments() if engine == "vllm" else ()
    worker = worker_of(MINILM, "minilm", real_redis, 0.1, *options)
    try:
        until_ready(real_gateway, "minilm", [worker])
        with openai.OpenAI(base_url=f"{real_gateway}/v1", api_key="none") as client:
            data = client.embeddings.create(model="minilm", input=list(PROMPTS)).data
    finally:
        worker.kill_group()
    found = np.array([each.embedding for each in data])
    expected = bi_encoder(MINILM).encode(list(PROMPTS))
    norms = np.linalg.norm(found, axis=1) * np.linalg.norm(expected, axis=1)
    assert ((found * expected).sum(1) / norms).min() >= LEAST_COSINE
