"""POST /v1/embeddings: shapes, instructions, dimensions, encodings."""

from typing import Any

import httpx
import openai
import pytest

from contract.jobs import Endpoint, Pooling, SamplingParams
from tests.fakes import BOS_ID, EOS_ID, encode_text
from tests.gateway.conftest import Serving
from tests.gateway.vector_worker import EMBEDDER, NUM_OUTPUTS, PLAIN, vector_of

pytestmark = pytest.mark.anyio

PATH = "/v1/embeddings"


def ids_of(text: str) -> tuple[int, ...]:
    return (BOS_ID, *encode_text(text), EOS_ID)


def expected(text: str, dimensions: int = 0) -> list[float]:
    return vector_of(ids_of(text), NUM_OUTPUTS, dimensions)


async def embed(http: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    answer = await http.post(PATH, json={"model": PLAIN, **fields})
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def shown(answer: dict[str, Any]) -> list[Any]:
    assert [each["index"] for each in answer["data"]] == list(range(len(answer["data"])))
    return [each["embedding"] for each in answer["data"]]


async def test_a_text_becomes_a_vector(serving: Serving, http: httpx.AsyncClient) -> None:
    """In OpenAI's shape. The job has one prompt, no output, and waits in the lane `scoring`."""
    worker = await serving(PLAIN)
    answer = await embed(http, input="ab", user="ann")
    [job] = worker.seen
    assert answer == {
        "id": "embd-" + job.id.removeprefix("job-"),
        "object": "list",
        "created": job.created_s,
        "model": PLAIN,
        "data": [{"object": "embedding", "index": 0, "embedding": expected("ab")}],
        "usage": {"prompt_tokens": 4, "total_tokens": 4},
    }
    assert (job.lane, job.endpoint) == ("scoring", Endpoint.EMBEDDINGS)
    assert (job.prompt_ids, job.prompt_list) == (ids_of("ab"), ())
    assert (job.params, job.pooling) == (SamplingParams(max_tokens=0, seed=0), Pooling())
    assert job.num_places == 1


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        (["a"], [ids_of("a")]),
        (["a", "bc", "größer", "d", "e"], [*map(ids_of, ("a", "bc", "größer", "d", "e"))]),
        ([1, 2, 3], [(1, 2, 3)]),
        ([[1, 2, 3]], [(1, 2, 3)]),
        ([[1], [2, 2], [3] * 64, [4]], [(1,), (2, 2), (3,) * 64, (4,)]),
    ],
)
async def test_each_input_has_its_own_vector(
    serving: Serving, http: httpx.AsyncClient, given: list[Any], prompts: list[tuple[int, ...]]
) -> None:
    """In one job, in the order of the inputs; token ids are whole prompts."""
    worker = await serving(PLAIN)
    answer = await embed(http, input=given)
    assert shown(answer) == [vector_of(ids, NUM_OUTPUTS) for ids in prompts]
    assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts))
    assert [list(job.prompts) for job in worker.seen] == [prompts]


@pytest.mark.parametrize(
    ("model", "fields", "instruction"),
    [
        (EMBEDDER, {}, "C: "),
        (EMBEDDER, {"input_type": "query"}, "Q: "),
        (EMBEDDER, {"input_type": "document"}, "D: "),
        (EMBEDDER, {"input_type": "clustering"}, "C: "),
        (PLAIN, {"input_type": "query"}, ""),
        (PLAIN, {"input_type": "document"}, ""),
    ],
)
async def test_the_models_instruction_precedes_a_text(
    serving: Serving,
    http: httpx.AsyncClient,
    model: str,
    fields: dict[str, str],
    instruction: str,
) -> None:
    """The default one, or the one that `input_type` names; models without any take queries and
    documents as they are."""
    await serving(model)
    answer = await embed(http, model=model, input=["a", "b"], **fields)
    assert shown(answer) == [expected(f"{instruction}a"), expected(f"{instruction}b")]
    ids = await embed(http, model=model, input=[97])
    assert shown(ids) == [vector_of((97,), NUM_OUTPUTS)]


async def test_dimensions_shorten_the_vectors(serving: Serving, http: httpx.AsyncClient) -> None:
    """To a length that the model declares, or its whole length."""
    await serving(EMBEDDER)
    for dimensions in (2, 4, NUM_OUTPUTS):
        answer = await embed(
            http, model=EMBEDDER, input="a", input_type="query", dimensions=dimensions
        )
        assert shown(answer) == [expected("Q: a", dimensions)]


async def test_the_openai_client_embeds(serving: Serving, gateway_url: str) -> None:
    """In base64 of float32, which it asks for by default, and in numbers; texts and token ids."""
    await serving(EMBEDDER)
    async with openai.AsyncOpenAI(base_url=f"{gateway_url}/v1", api_key="none") as client:
        by_default = await client.embeddings.create(model=EMBEDDER, input=["a", "b"])
        plain = await client.embeddings.create(
            model=EMBEDDER, input=["a", "b"], encoding_format="float", user="ann"
        )
        short = await client.embeddings.create(
            model=EMBEDDER, input=[[67, 58], [67]], dimensions=4, extra_body={"input_type": None}
        )
    assert [each.embedding for each in plain.data] == [expected("C: a"), expected("C: b")]
    assert by_default.data == plain.data
    assert by_default.usage.prompt_tokens == 12
    assert [each.embedding for each in short.data] == [
        vector_of((67, 58), NUM_OUTPUTS, 4),
        vector_of((67,), NUM_OUTPUTS, 4),
    ]
