"""`batchway keys`, and the addresses that need a key."""

import asyncio
import json
import stat
from pathlib import Path
from typing import Any

import pytest
import redis

from contract.api_keys import ApiKeys, KeyTerms
from contract.connection import connect
from contract.keys import Keys
from infra import cli
from infra.embedded_redis import EmbeddedRedis
from infra.parser import build_parser

pytestmark = pytest.mark.anyio


@pytest.fixture
def empty_redis(redis_server: EmbeddedRedis) -> str:
    """The URL of an empty server."""
    with redis.Redis.from_url(redis_server.url) as client:
        client.flushall()
    return redis_server.url


@pytest.fixture
def keys_of(
    empty_redis: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Any:
    """Runs `batchway keys …` on the empty server; returns status, output and errors."""
    monkeypatch.setenv("REDIS_URL", empty_redis)
    monkeypatch.setenv("BATCHWAY_NAMESPACE", "test")

    def run(*arguments: str) -> tuple[int, str, str]:
        status = cli.main(["keys", *arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def test_a_key_is_created_listed_rotated_and_revoked(keys_of: Any) -> None:
    """Only `create` and `rotate` show the key. The list shows its state."""
    limits = ("--requests-per-minute=60", "--tokens-per-minute=9000", "--concurrent-tokens=5000")
    status, out, _ = keys_of(
        *("create", "--tenant=acme", "--scopes=inference,jobs:read", "--lanes=batch"),
        *(*limits, "--lane-share=0.5", "--weight=4", "--retention-s=3600", "--expires=30"),
    )
    key = out.strip()
    prefix = key.split("-")[1]
    assert (status, key[:3], len(key)) == (0, "bw-", 3 + 8 + 1 + 64)
    _, listed, _ = keys_of("list")
    assert key not in listed
    for word in (
        prefix,
        "acme",
        "inference,jobs:read",
        "batch",
        "60 requests/min",
        "3600 s kept",
        "weight 4",
        "active",
    ):
        assert word in listed
    status, out, errors = keys_of("rotate", prefix, "--overlap-s=0")
    assert (status, f"{prefix} works for 0 s more" in errors) == (0, True)
    new = out.strip().split("-")[1]
    assert keys_of("revoke", new)[:2] == (0, f"{new} is revoked\n")
    listed = json.loads(keys_of("list", "--json=-")[1])["keys"]
    assert [(k["prefix"], k["state"]) for k in listed] == [(prefix, "expired"), (new, "revoked")]
    assert [k["tokens_per_minute"] for k in listed] == [9000, 9000]
    assert [k["retention_s"] for k in listed] == [3600, 3600]
    assert [k["weight"] for k in listed] == [4, 4]


def test_only_the_owner_can_read_a_key_file(keys_of: Any, tmp_path: Path) -> None:
    path = tmp_path / "key.json"
    status, out, _ = keys_of("create", "--tenant=acme", "--json", str(path))
    assert status == 0
    assert json.loads(path.read_text())["api_key"] == out.strip()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("arguments", "status", "complaint"),
    [
        (("revoke", "aaaaaaaa"), 1, "there is no key 'aaaaaaaa'"),
        (("rotate", "aaaaaaaa"), 1, "there is no active key 'aaaaaaaa'"),
        (("create", "--tenant=a:b"), 2, "a tenant is named by"),
        (("list", "--redis-url=redis://127.0.0.1:1"), 2, "Redis does not answer"),
    ],
)
def test_an_impossible_command_gives_one_sentence(
    keys_of: Any, arguments: tuple[str, ...], status: int, complaint: str
) -> None:
    """Exit status 1 for a missing key, 2 for invalid options."""
    found, _, errors = keys_of(*arguments)
    assert found == status
    assert complaint in errors
    assert "Traceback" not in errors


def test_a_short_pepper_is_an_error(keys_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a gateway."""
    monkeypatch.setenv("BATCHWAY_KEY_PEPPER", "short")
    assert keys_of("list")[0] == 2


async def test_a_key_in_redis_allows_other_addresses(
    empty_redis: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`up` checks before it binds."""
    monkeypatch.delenv("BATCHWAY_API_KEY", raising=False)
    settings = cli._gateway_settings(
        build_parser().parse_args(["gateway", "--namespace=test"]), empty_redis
    )
    assert not await asyncio.to_thread(cli._has_keys, settings)
    client = connect(empty_redis, Keys("test"))
    await ApiKeys(client, Keys("test")).create(KeyTerms(tenant="acme"))
    await client.aclose()
    assert await asyncio.to_thread(cli._has_keys, settings)
