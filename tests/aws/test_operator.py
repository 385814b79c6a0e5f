"""The way in for operators on AWS, under the template's own users of the cache."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import redis

from contract.library import library_source
from infra import operator_function
from infra.embedded_redis import EmbeddedRedis
from tests.aws.template import of_type
from tests.aws.test_secrets import make_secret
from tests.gateway.conftest import make_settings, running_gateway

PASSWORD, PEPPER = "a-password", "p" * 43


def with_user(server_url: str, name: str) -> str:
    """The URL of a cache in which the template's user has its rights."""
    [user] = [u for u in of_type("AWS::ElastiCache::User").values() if u["UserName"] == name]
    rights = user["AccessString"].split()
    with redis.Redis.from_url(server_url) as admin:
        admin.execute_command("ACL SETUSER", name, "reset", f">{PASSWORD}", *rights)
    return server_url.replace("unix://", f"unix://{name}:{PASSWORD}@")


@pytest.fixture
def server(aws_environ: dict[str, str]) -> Iterator[EmbeddedRedis]:
    """A Redis of its own, as the housekeeper leaves it."""
    with EmbeddedRedis() as server:
        with redis.Redis.from_url(server.url) as admin:
            admin.function_load(library_source())
        yield server


@pytest.fixture
def as_operator(server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = make_secret("pepper", json.dumps({"BATCHWAY_KEY_PEPPER": PEPPER}))
    monkeypatch.setenv("BATCHWAY_KEY_PEPPER", "")  # restored afterwards
    monkeypatch.setenv("BATCHWAY_SECRET_ARNS", secret)
    monkeypatch.setenv("REDIS_URL", with_user(server.url, "operator"))


def run(*arguments: str) -> dict[str, Any]:
    return operator_function.handler({"arguments": list(arguments)}, None)


@pytest.mark.usefixtures("as_operator")
def test_an_operator_makes_lists_and_revokes_keys(
    server: EmbeddedRedis, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Three tenants call the gateway with their own keys, until one is revoked. A key is in the
    answer alone, and in no log."""
    made = [run("keys", "create", "--tenant", name) for name in ("a", "b", "c")]
    assert [answer["status"] for answer in made] == [0, 0, 0], made
    keys = [answer["output"].strip() for answer in made]
    settings = make_settings(
        with_user(server.url, "gateway"), key_pepper=PEPPER, namespace="default"
    )
    with running_gateway(settings) as url:

        def statuses() -> list[int]:
            sent = [{"authorization": f"Bearer {key}"} for key in keys]
            return [httpx.get(f"{url}/v1/jobs", headers=one).status_code for one in sent]

        assert statuses() == [200, 200, 200]
        assert httpx.get(f"{url}/v1/jobs").status_code == 401
    listed = json.loads(run("keys", "list", "--json", "-")["output"])["keys"]
    assert sorted(key["tenant"] for key in listed) == ["a", "b", "c"]
    [second] = [key["prefix"] for key in listed if key["tenant"] == "b"]
    assert run("keys", "revoke", second)["status"] == 0
    with running_gateway(settings) as url:
        assert statuses() == [200, 401, 200]
    printed = "".join(capfd.readouterr()) + caplog.text
    assert not any(key in printed for key in keys)


@pytest.mark.usefixtures("as_operator")
def test_other_commands_of_operators_run_too() -> None:
    for arguments in (
        ("jobs", "list"),
        ("lanes", "list"),
        ("check",),
        ("callbacks", "dead", "list"),
    ):
        answer = run(*arguments)
        assert answer["status"] == 0, answer


@pytest.mark.usefixtures("as_operator")
def test_what_an_operator_cannot_run_is_refused_with_a_reason() -> None:
    """Services, unknown words, events of another form, an unknown key."""
    for arguments in (["worker"], ["callbacks"], ["keys", "create"], ["nonsense"], "keys", None):
        answer = operator_function.handler({"arguments": arguments}, None)
        assert answer["status"] == 2
        assert answer["messages"], arguments
    assert run("keys", "revoke", "none")["status"] == 1
