"""Damaged or malicious data of a model in Redis affects that model alone."""

import hashlib
import logging
import subprocess
import sys
import zlib
from typing import Any

import httpx
import msgspec
import pytest
import redis.asyncio
from msgspec.structs import replace

from contract.catalogue import MAX_CARD_BYTES, Catalogue
from contract.codec import encode, encode_tokenizer
from contract.errors import WireError
from contract.keys import Keys
from contract.model_cards import MAX_TOKENIZER_BYTES, TokenizerFiles
from tests.fakes import hash_tokenizer
from tests.gateway.conftest import Gateways, until_listed
from tests.gateway.fake_worker import MODEL, FakeWorker, publish_model
from tests.telemetry.test_exactness import page_of, summed

pytestmark = pytest.mark.anyio

SPOILED = "spoiled"
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}


def packed_card(**changes: object) -> bytes:
    """A card as msgpack that no worker of ours would write."""
    fields: dict[str, object] = {
        "name": SPOILED,
        "context_length": 512,
        "vocab_size": 256,
        "eos_token_ids": [0],
        "tokenizer_sha256": "0" * 64,
        "created_s": 0,
        "lanes": ["standard"],
    }
    return msgspec.msgpack.encode(fields | changes)


CARDS = {
    "no msgpack": b"\xc1",
    "cut short": packed_card()[:-3],
    "no UTF-8": packed_card().replace(SPOILED.encode(), b"\xff" * len(SPOILED)),
    "nested deeply": packed_card()[:-1] + b"\x91" * 50_000,
    "too long": packed_card(more="x" * MAX_CARD_BYTES),
    "another's name": packed_card(name=MODEL),
    "a negative context": packed_card(context_length=-1),
    "an absurd vocabulary": packed_card(vocab_size=2**63),
    "a hash and more": packed_card(tokenizer_sha256="0" * 64 + "\n"),
    "a lane with a blank": packed_card(lanes=["a b"]),
    "no hash": packed_card(tokenizer_sha256="../../job"),
    "no lanes": packed_card(lanes=[]),
}


async def spoil(client: redis.asyncio.Redis, keys: Keys, card: bytes) -> None:
    await client.set(keys.of("model", SPOILED), card)
    await client.sadd(keys.of("models"), SPOILED)


@pytest.mark.parametrize("name", CARDS)
async def test_a_card_that_cannot_be_read_is_left_out_until_it_is_repaired(
    redis_client: redis.asyncio.Redis, keys: Keys, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """It is logged once."""
    card = await publish_model(redis_client, keys)
    await spoil(redis_client, keys, CARDS[name])
    catalogue = Catalogue(redis_client, keys)

    with caplog.at_level(logging.ERROR):
        found = [await catalogue.models() for _ in range(3)]

    assert found == [[card]] * 3
    assert catalogue.unreadable == {SPOILED}
    [record] = caplog.records
    assert SPOILED in record.getMessage()
    repaired = await publish_model(redis_client, keys, SPOILED)
    assert await catalogue.models() == [card, repaired]
    assert catalogue.unreadable == frozenset()


async def test_a_malformed_list_of_models_counts_as_empty(
    redis_client: redis.asyncio.Redis, keys: Keys, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker can write that key too."""
    await redis_client.set(keys.of("models"), "x")
    catalogue = Catalogue(redis_client, keys)

    assert [await catalogue.models() for _ in range(2)] == [[], []]
    assert len(caplog.records) == 1


async def test_a_damaged_model_affects_no_other(
    gateways: Gateways, redis_client: redis.asyncio.Redis, keys: Keys, worker: FakeWorker
) -> None:
    """A damaged card, list of workers or worker report: models, metrics, readiness and calls of
    the other model work, and the metrics count what is unreadable."""
    card = await publish_model(redis_client, keys, "listed")
    await redis_client.set(keys.of("workers", "listed"), "x")
    await redis_client.rpush(keys.of("model", "typed"), "x")
    await redis_client.sadd(keys.of("models"), b"\xff", "typed")
    await spoil(redis_client, keys, b"x")

    async with gateways() as http:
        models = await http.get("/v1/models")
        ready = await http.get("/readyz")
        shown = await page_of(http)
        answer = await http.post("/v1/chat/completions", json=CHAT | {"model": MODEL})
        unknown = await http.post("/v1/chat/completions", json=CHAT | {"model": SPOILED})

    assert [model["id"] for model in models.json()["data"]] == [MODEL, card.name]
    assert ready.json()["workers"] == {MODEL: 1, card.name: 0}
    assert summed(shown, "workers", model_name=MODEL) == 1
    assert summed(shown, "unreadable_models") == 3
    assert answer.status_code == 200
    assert unknown.status_code == 404


def stored(raw: bytes) -> tuple[str, bytes]:
    packed = zlib.compress(raw, 9)
    return hashlib.sha256(packed).hexdigest(), packed


TOKENIZERS = {
    "nothing there": ("1" * 64, b""),
    "another hash": ("2" * 64, stored(b"x")[1]),
    "no zlib": (hashlib.sha256(b"x").hexdigest(), b"x"),
    "no msgpack": stored(b"\xc1"),
    "nested deeply": stored(b"\x91" * 50_000),
    "cut short": stored(msgspec.msgpack.encode(hash_tokenizer())[:-9]),
    "no tokenizer": encode_tokenizer(replace(hash_tokenizer(), tokenizer_json="{}")),
    "nested JSON": encode_tokenizer(replace(hash_tokenizer(), tokenizer_json="[" * 10**6)),
}


async def test_a_tokenizer_that_cannot_be_read_costs_its_model_alone(
    redis_client: redis.asyncio.Redis, keys: Keys, http: httpx.AsyncClient, worker: FakeWorker
) -> None:
    """503 with its own code."""
    names = {SPOILED + name.replace(" ", ""): given for name, given in TOKENIZERS.items()}
    for name, (sha256, packed) in names.items():
        card = await publish_model(redis_client, keys, name)
        await redis_client.set(keys.of("tokenizer", sha256), packed)
        spoiled = encode(replace(card, tokenizer_sha256=sha256))
        await redis_client.set(keys.of("model", card.name), spoiled)
        await FakeWorker(worker.functions, name, f"w-{name}").beat()
    await until_listed(http, {*names})
    for name in names:
        answer = await http.post("/v1/chat/completions", json=CHAT | {"model": name})
        refused = answer.status_code, answer.json()["error"]["code"]
        assert refused == (503, "model_unreadable"), name
    other = await http.post("/v1/chat/completions", json=CHAT | {"model": MODEL})
    assert other.status_code == 200


_DECODE = """
import resource, sys
from contract.codec import decode_tokenizer
from contract.errors import WireError
resource.setrlimit(resource.RLIMIT_AS, (2**29, 2**29))
try:
    decode_tokenizer(sys.argv[1], sys.stdin.buffer.read())
except WireError as exc:
    print(exc)
"""


def test_a_tokenizer_is_decompressed_up_to_its_bound() -> None:
    """1.5 MB that would decompress to 1.5 GB, with the right hash: a process limited to 512 MiB
    rejects it."""
    deflate = zlib.compressobj()
    part = deflate.compress(bytes(2**24)) + deflate.flush(zlib.Z_FULL_FLUSH)
    packed = part + part[2:] * 95  # without the two bytes of the head
    sha256 = hashlib.sha256(packed).hexdigest()

    done = subprocess.run(
        [sys.executable, "-c", _DECODE, sha256], input=packed, capture_output=True, check=True
    )

    assert len(packed) < 2 * 10**6
    assert f"over {MAX_TOKENIZER_BYTES} bytes" in done.stdout.decode()


def test_files_beyond_the_bound_are_not_published() -> None:
    files = TokenizerFiles(tokenizer_json="x" * MAX_TOKENIZER_BYTES, chat_template=None)
    with pytest.raises(ValueError, match="are published"):
        encode_tokenizer(files)


async def test_oversized_values_in_redis_are_not_fetched(
    redis_client: redis.asyncio.Redis, keys: Keys
) -> None:
    await redis_client.setrange(keys.of("tokenizer", "a"), MAX_TOKENIZER_BYTES + 1, b"x")
    with pytest.raises(WireError, match="longer"):
        await Catalogue(redis_client, keys).tokenizer("a")
