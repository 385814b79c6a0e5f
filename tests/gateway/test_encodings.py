"""Bodies with a Content-Encoding: decoded as they come, within the bound of their decoded bytes."""

import gzip
import json
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.app import create_app
from gateway.http.bodies import Decoder, TooMuch
from gateway.http.errors import ApiError
from gateway.settings import GatewaySettings
from tests.gateway.fake_worker import MODEL, FakeWorker

pytestmark = pytest.mark.anyio

BOUND = 5_000
KEY = "a-gateway-s-own-key"


def _raw(data: bytes) -> bytes:
    stream = zlib.compressobj(wbits=-15)
    return stream.compress(data) + stream.flush()


def _members(data: bytes) -> bytes:
    half = len(data) // 2
    return gzip.compress(data[:half]) + gzip.compress(data[half:])


ENCODERS: Sequence[tuple[str, Callable[[bytes], bytes]]] = (
    ("", bytes),
    ("identity", bytes),
    ("gzip", gzip.compress),
    (" GZIP ", gzip.compress),
    ("x-gzip", _members),
    ("deflate", zlib.compress),
    ("deflate", _raw),
)
CONTENTS = st.one_of(
    st.binary(max_size=300),
    st.builds(bytes.__mul__, st.binary(min_size=1, max_size=3), st.integers(0, BOUND // 3)),
)


def decoded(encoding: str, data: bytes, sizes: Sequence[int], bound: int = BOUND) -> bytes:
    """In parts of these sizes, and the rest."""
    decoder, found = Decoder(encoding, bound), b""

    def take(part: bytes, is_last: bool) -> None:
        nonlocal found
        found += decoder.decode(part, is_last=is_last)
        while decoder.has_more:
            found += decoder.decode(b"", is_last=is_last)

    for size in sizes:
        take(data[:size], False)
        data = data[size:]
    take(data, True)
    return found


@settings(max_examples=500, deadline=None)
@given(st.sampled_from(ENCODERS), CONTENTS, st.lists(st.integers(0, 40), max_size=20))
def test_whatever_was_encoded_comes_back(
    encoder: tuple[str, Callable[[bytes], bytes]], data: bytes, sizes: list[int]
) -> None:
    """In any parts; an empty body is none."""
    name, encode = encoder
    assert decoded(name, encode(data), sizes) == data


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(ENCODERS), st.integers(1, 10**6), st.lists(st.integers(0, 40), max_size=5))
def test_no_more_is_decoded_than_allowed(
    encoder: tuple[str, Callable[[bytes], bytes]], excess: int, sizes: list[int]
) -> None:
    """Of a few bytes that stand for many, too."""
    name, encode = encoder
    with pytest.raises(TooMuch):
        decoded(name, encode(bytes(BOUND + excess)), sizes)
    assert decoded(name, encode(bytes(BOUND)), sizes) == bytes(BOUND)


@settings(max_examples=500, deadline=None)
@given(
    st.sampled_from([pair for pair in ENCODERS if pair[1] not in (bytes, _members)]),
    st.binary(min_size=1, max_size=60),
    st.data(),
)
def test_damaged_and_cut_data_is_refused(
    encoder: tuple[str, Callable[[bytes], bytes]], data: bytes, draw: st.DataObject
) -> None:
    """With 400, never another error; what a checksum does not find comes back changed."""
    name, encode = encoder
    whole = encode(data)
    with pytest.raises(ApiError) as cut:
        decoded(name, whole[: draw.draw(st.integers(0, len(whole) - 1))], [])
    assert cut.value.status == 400
    with pytest.raises(ApiError):
        decoded(name, whole + b"\0more", [])
    at = draw.draw(st.integers(0, len(whole) - 1))
    changed = bytearray(whole)
    changed[at] ^= draw.draw(st.integers(1, 255))
    with suppress(ApiError, TooMuch):
        decoded(name, bytes(changed), [])


@pytest.mark.parametrize("encoding", ["br", "zstd", "gzip, gzip", "compress", "\xff"])
async def test_other_encodings_are_refused_with_those_that_are_taken(encoding: str) -> None:
    app = create_app(GatewaySettings(redis_url="redis://127.0.0.1:1", api_key=KEY))
    transport = httpx.ASGITransport(app)
    headers = {"content-type": "application/json", "x-api-key": KEY, "content-encoding": encoding}
    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
        answer = await http.post("/v1/chat/completions", content=b"{}", headers=raw)
    assert answer.status_code == 415
    assert answer.headers["accept-encoding"] == "gzip, deflate"


async def test_calls_with_encoded_bodies_are_answered(
    worker: FakeWorker, http: httpx.AsyncClient
) -> None:
    """What is not encoded as it says is refused."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
    for encoding, encode in ENCODERS:
        headers = {"content-type": "application/json", "content-encoding": encoding.strip()}
        content = encode(json.dumps(body).encode())
        answer = await http.post("/v1/chat/completions", content=content, headers=headers)
        assert answer.status_code == 200, answer.text
    headers["content-encoding"] = "gzip"
    answer = await http.post("/v1/chat/completions", content=b"{}", headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "bad_request")


def test_the_default_limit_admits_a_context_of_131072_tokens() -> None:
    """Of text that JSON escapes, of which a token has up to three characters, and of token ids."""
    limit = GatewaySettings(redis_url="redis://127.0.0.1:1").max_body_bytes
    cyrillic = json.dumps({"content": "абв" * 131_072})
    ids = json.dumps({"prompt": [262_143] * 131_072})
    assert len(cyrillic) < limit
    assert len(ids) < limit
