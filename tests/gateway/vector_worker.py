"""Fake prefill-only models: their cards, and a worker that answers with vectors."""

import hashlib
import json
import math
import struct
from collections.abc import Sequence

import msgspec
import redis.asyncio

from contract.events import ChoiceDelta, Tokens
from contract.functions import Functions
from contract.jobs import Job
from contract.keys import Keys
from contract.model_cards import PoolingCard, TokenizerFiles
from tests.fakes import hash_tokenizer
from tests.gateway.fake_worker import FakeWorker, publish_model

VECTOR_LANES = ("interactive", "standard", "batch", "scoring")
EMBEDDER, PLAIN, RERANKER, TEMPLATED, CLASSIFIER, OF_PAIRS, GRADER = (
    "embedder", "plain-embedder", "reranker", "templated-reranker", "classifier", "of-pairs",
    "grader",
)  # fmt: skip
NUM_OUTPUTS = 8
LABELS = ("bad", "fair", "good")
CONTEXT_LENGTH = 64
CARDS = {
    EMBEDDER: PoolingCard(
        kind="embedding",
        num_outputs=NUM_OUTPUTS,
        dimensions=(2, 4),
        prompts={"query": "Q: ", "document": "D: ", "clustering": "C: "},
        default_prompt="clustering",
    ),
    PLAIN: PoolingCard(kind="embedding", num_outputs=NUM_OUTPUTS),
    RERANKER: PoolingCard(
        kind="reranker",
        num_outputs=1,
        activation="sigmoid",
        prompts={"rank": "I: "},
        default_prompt="rank",
    ),
    TEMPLATED: PoolingCard(
        kind="reranker",
        num_outputs=1,
        prompts={"rank": "judge"},
        default_prompt="rank",
        renders_pairs=True,
    ),
    CLASSIFIER: PoolingCard(
        kind="classifier", num_outputs=len(LABELS), labels=LABELS, activation="softmax"
    ),
    OF_PAIRS: PoolingCard(
        kind="classifier",
        num_outputs=len(LABELS),
        labels=LABELS,
        activation="softmax",
        needs_pairs=True,
    ),
    GRADER: PoolingCard(kind="reranker", num_outputs=1, labels=("grade",)),
}


def vector_files() -> TokenizerFiles:
    """A byte-level tokenizer with BERT's form of texts and pairs: <bos> A <eos>, <bos> A <eos> B
    <eos>."""
    files = hash_tokenizer()
    tokenizer = json.loads(files.tokenizer_json)

    def special(name: str, type_id: int) -> dict[str, object]:
        return {"SpecialToken": {"id": name, "type_id": type_id}}

    def text(name: str, type_id: int) -> dict[str, object]:
        return {"Sequence": {"id": name, "type_id": type_id}}

    single = [special("<bos>", 0), text("A", 0), special("<eos>", 0)]
    ids = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, text("B", 1), special("<eos>", 1)],
        "special_tokens": {
            name: {"id": name, "ids": [ids[name]], "tokens": [name]} for name in ("<bos>", "<eos>")
        },
    }
    template = (
        "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
        "{% if add_generation_prompt %}<answer>{% endif %}"
    )
    return msgspec.structs.replace(
        files, tokenizer_json=json.dumps(tokenizer), chat_template=template
    )


async def publish_vector_model(client: redis.asyncio.Redis, keys: Keys, name: str) -> None:
    await publish_model(
        client,
        keys,
        name,
        files=vector_files(),
        context_length=CONTEXT_LENGTH,
        lanes=VECTOR_LANES,
        pooling=CARDS[name],
    )


def vector_worker(functions: Functions, model: str) -> FakeWorker:
    return FakeWorker(functions, model=model, incarnation=model, lanes=VECTOR_LANES, script=vectors)


def vector_of(prompt_ids: Sequence[int], num_numbers: int, dimensions: int = 0) -> list[float]:
    """The float32 numbers that the fake computes: those of the prompt alone, of length 1 where
    there are several."""
    digest = hashlib.sha256(struct.pack(f"<{len(prompt_ids)}q", *prompt_ids)).digest()
    numbers = [byte / 255 for byte in digest[:num_numbers]][: dimensions or num_numbers]
    length = math.hypot(*numbers) if len(numbers) > 1 else 1.0
    packed = struct.pack(f"<{len(numbers)}f", *(number / length for number in numbers))
    return list(struct.unpack(f"<{len(numbers)}f", packed))


def vectors(job: Job) -> list[Tokens]:
    """A script: the vector of each prompt, three of them in an event, the last first."""
    assert job.pooling is not None
    num_numbers = CARDS[job.model].num_outputs
    deltas = []
    for number, prompt_ids in enumerate(job.prompts):
        numbers = vector_of(prompt_ids, num_numbers, job.pooling.dimensions)
        packed = struct.pack(f"<{len(numbers)}f", *numbers)
        deltas.append(ChoiceDelta(number, 0, (), "", vector=packed))
    deltas.reverse()
    return [Tokens(tuple(deltas[at : at + 3])) for at in range(0, len(deltas), 3)]
