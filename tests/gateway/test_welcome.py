"""The call that `batchway up` prints: one that its first model answers. tests/e2e/test_vectors.py
has what it prints itself."""

import asyncio
import subprocess
import sys

import httpx
import pytest
import redis.asyncio

from contract.catalogue import Catalogue
from contract.keys import Keys
from contract.model_cards import ModelCard
from infra.readiness import welcome
from tests.gateway.conftest import Serving
from tests.gateway.fake_worker import MODEL, FakeWorker, says
from tests.gateway.vector_worker import CARDS, CLASSIFIER, EMBEDDER, GRADER, OF_PAIRS, RERANKER


async def card_named(client: redis.asyncio.Redis, keys: Keys, name: str) -> ModelCard:
    card = await Catalogue(client, keys).model(name)
    assert card is not None
    return card


async def printed(command: str) -> str:
    """What a line of the welcome prints in a shell."""
    done = await asyncio.to_thread(
        subprocess.run, command, shell=True, capture_output=True, text=True, check=True
    )
    return done.stdout


def curl_of(text: str) -> str:
    [line] = [line for line in text.splitlines() if line.startswith("  curl ")]
    return line.replace("curl ", "curl -sSf ")


def python_of(text: str) -> str:
    """The two lines for Python, as a command; '' without them."""
    lines = [line.strip() for line in text.splitlines() if line.startswith(("  import", "  print"))]
    program = "\n".join(lines)
    return f"{sys.executable} -c '{program}'" if lines else ""


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("model", "expected", "in_python"),
    [
        (EMBEDDER, '"embedding"', "[0."),
        (RERANKER, '"relevance_score"', None),
        (GRADER, '"relevance_score"', None),
        (CLASSIFIER, '"probs"', None),
        (OF_PAIRS, '"probs"', None),
    ],
)
async def test_a_model_for_vectors_gets_a_call_of_its_kind(
    *,
    serving: Serving,
    http: httpx.AsyncClient,
    redis_client: redis.asyncio.Redis,
    keys: Keys,
    model: str,
    expected: str,
    in_python: str | None,
) -> None:
    """The printed commands are answered; Python's only where the official client has the call."""
    assert model in CARDS
    await serving(model)
    url = str(http.base_url).rstrip("/")
    card = await card_named(redis_client, keys, model)
    text = welcome(url, [model], card, has_key=False)
    assert expected in await printed(curl_of(text))
    if in_python is None:
        assert not python_of(text)
    else:
        assert in_python in await printed(python_of(text))


@pytest.mark.anyio
async def test_a_model_for_text_gets_a_chat(
    worker: FakeWorker, http: httpx.AsyncClient, redis_client: redis.asyncio.Redis, keys: Keys
) -> None:
    """Also where its card cannot be read. A key is named by its variable."""
    worker.script = says("one, two")
    url = str(http.base_url).rstrip("/")
    card = await card_named(redis_client, keys, MODEL)
    text = welcome(url, [MODEL, "other"], card, has_key=False)
    assert "one, two" in await printed(curl_of(text))
    assert await printed(python_of(text)) == "one, two\n"
    assert welcome(url, [MODEL, "other"], None, has_key=False) == text
    with_key = welcome(url, [MODEL], card, has_key=True)
    assert 'bearer $batchway_api_key"' in curl_of(with_key).lower()
    assert 'os.environ["BATCHWAY_API_KEY"]' in python_of(with_key)
