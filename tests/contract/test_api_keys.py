"""API keys: created once, stored as a digest, found by prefix, and ended by expiry or
revocation."""

import hmac
from typing import Any
from unittest.mock import AsyncMock

import pytest
import redis.asyncio

from contract.api_keys import ApiKeys, KeyTerms, Pepper, is_same_key, prefix_of
from contract.keys import Keys

pytestmark = pytest.mark.anyio

TERMS = KeyTerms(tenant="acme", lanes=("batch",), requests_per_minute=60)


@pytest.fixture
def api_keys(redis_client: redis.asyncio.Redis, keys: Keys) -> ApiKeys:
    return ApiKeys(redis_client, keys)


async def pepper_of(api_keys: ApiKeys) -> Pepper:
    pepper = await api_keys.pepper()
    assert pepper is not None
    return pepper


async def test_a_key_is_found_by_its_prefix_and_checked(api_keys: ApiKeys) -> None:
    """The whole key is compared, not only its prefix. What the key grants is returned as it was
    stored."""
    assert not await api_keys.exist()
    key, prefix = await api_keys.create(TERMS)
    other, _ = await api_keys.create(TERMS)
    assert (prefix_of(key), len(prefix)) == (prefix, 8)
    record = await api_keys.find(prefix)
    assert record is not None
    assert (record.terms, record.state) == (TERMS, "active")
    pepper = await pepper_of(api_keys)
    assert is_same_key(key, record, pepper)
    for wrong in (other, key[:-1] + ("0" if key[-1] != "0" else "1"), ""):
        assert not is_same_key(wrong, record, pepper)
    assert not is_same_key(key, None, pepper)
    assert await api_keys.exist()


async def test_a_key_has_256_random_bits_and_no_two_are_alike(api_keys: ApiKeys) -> None:
    """64 hexadecimal digits after the prefix."""
    made = {(await api_keys.create(TERMS))[0] for _ in range(50)}
    assert len({key.split("-")[1] for key in made}) == 50
    secrets_ = {key.split("-")[2] for key in made}
    assert {len(bytes.fromhex(secret)) for secret in secrets_} == {32}
    assert len(secrets_) == 50


@pytest.mark.parametrize("pepper", [None, Pepper(b"an operator's pepper")])
async def test_no_key_is_anywhere_in_redis(
    redis_client: redis.asyncio.Redis, keys: Keys, pepper: Pepper | None
) -> None:
    """The test searches every value of every key, also for the operator's pepper."""
    api_keys = ApiKeys(redis_client, keys, pepper)
    key, prefix = await api_keys.create(TERMS)
    dump = await dump_of(redis_client)
    assert prefix.encode() in dump
    secret = key.split("-")[2]
    for hidden in (key, secret, secret[:16], secret[-16:]):
        assert hidden.encode() not in dump
    assert bytes.fromhex(secret) not in dump
    if pepper is not None:
        assert pepper.secret not in dump


async def dump_of(client: redis.asyncio.Redis) -> bytes:
    """Everything that a server stores, each value in its stored form."""
    parts: list[bytes] = []
    async for name in client.scan_iter():
        kind = str(await client.type(name), "ascii")  # type: ignore[arg-type]
        read: dict[str, Any] = {"hash": client.hgetall, "set": client.smembers}
        value = await read.get(kind, client.get)(name)
        parts += [name, repr(value).encode("latin-1"), *flat(value)]
    return b"\n".join(parts)


def flat(value: Any) -> list[bytes]:
    if isinstance(value, bytes):
        return [value]
    return [part for item in (value.items() if isinstance(value, dict) else value)
            for part in (flat(item) if isinstance(item, tuple) else [item])]  # fmt: skip


async def test_keys_are_compared_in_constant_time(
    api_keys: ApiKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Known or unknown, each key takes one compare_digest of two digests of equal length."""
    key, prefix = await api_keys.create(TERMS)
    record, pepper = await api_keys.find(prefix), await pepper_of(api_keys)
    compared: list[tuple[int, int]] = []

    really = hmac.compare_digest

    def compare(a: str, b: str) -> bool:
        compared.append((len(a), len(b)))
        return really(a, b)

    monkeypatch.setattr(hmac, "compare_digest", compare)
    for given, known in ((key, record), ("wrong", record), (key, None)):
        is_same_key(given, known, pepper)
    assert compared == [(64, 64)] * 3


async def test_a_rotated_key_has_a_successor_and_an_end(
    redis_client: redis.asyncio.Redis, api_keys: ApiKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both keys work until the overlap ends; then only the new one does. The old key's end is never
    postponed."""
    _, old = await api_keys.create(TERMS)
    made = await api_keys.rotate(old, overlap_s=60, lifetime_s=1000)
    assert made is not None
    new = made[1]
    assert await states(api_keys, old, new) == ["active", "active"]
    assert await api_keys.rotate(old, overlap_s=600) is not None
    seconds, _ = await redis_client.time()
    monkeypatch.setattr(redis_client, "time", AsyncMock(return_value=(seconds + 61, 0)))
    assert await states(api_keys, old, new) == ["expired", "active"]
    assert await api_keys.rotate(old, overlap_s=60) is None
    record = await api_keys.find(new)
    assert record is not None
    assert record.terms == TERMS
    assert 900 < record.expires_in_s < 940


async def states(api_keys: ApiKeys, *prefixes: str) -> list[str]:
    found = [await api_keys.find(prefix) for prefix in prefixes]
    return [key.state for key in found if key is not None]


async def test_a_revoked_key_stays_revoked_and_on_record(api_keys: ApiKeys) -> None:
    """Otherwise authentication would be off once the last key is gone."""
    _, prefix = await api_keys.create(TERMS)
    assert await api_keys.revoke(prefix)
    first = await api_keys.find(prefix)
    assert await api_keys.revoke(prefix)
    second = await api_keys.find(prefix)
    assert first is not None
    assert second is not None
    assert (first.state, first.revoked_ms) == ("revoked", second.revoked_ms)
    assert await api_keys.exist()
    assert not await api_keys.revoke("aaaaaaaa")
    assert [key.prefix for key in await api_keys.all()] == [prefix]


@pytest.mark.parametrize("tenant", ["", "a:b", "a b", "{a}", "*", "x" * 65, "-a"])
def test_a_tenant_s_name_cannot_change_a_name_in_redis(tenant: str) -> None:
    """The tenant's name is part of the names of queues."""
    with pytest.raises(ValueError, match="a tenant is named"):
        KeyTerms(tenant=tenant)
