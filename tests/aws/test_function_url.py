"""The function URL, whose callers IAM lets in: a signature takes the header Authorization, and the
API key comes as x-api-key."""

import asyncio
import json
import shutil
import subprocess
from collections.abc import AsyncIterator, Generator
from pathlib import Path

import httpx2
import openai
import pytest
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from openai import AsyncOpenAI

from infra.embedded_redis import EmbeddedRedis
from tests.aws.emulator import function_environ, serving_web
from tests.aws.iam_door import CALLER, REGION, function_url
from tests.aws.lambda_events import KEY
from tests.aws.template import ROOT, chosen, of_type, transformed
from tests.gateway.fake_worker import MODEL, FakeWorker
from tests.markdown import code_blocks

pytestmark = pytest.mark.anyio


class Signed(httpx2.Auth):
    """Signs each call as AWS' own clients do. Takes the place of OpenAI's Authorization."""

    requires_request_body = True

    def auth_flow(self, request: httpx2.Request) -> Generator[httpx2.Request, httpx2.Response]:
        kept = {"host": request.headers["host"], "content-type": "application/json"}
        signed = AWSRequest(request.method, str(request.url), headers=kept, data=request.content)
        SigV4Auth(CALLER, "lambda", REGION).add_auth(signed)
        request.headers.update(dict(signed.headers))
        yield request


@pytest.fixture
async def url(redis_server: EmbeddedRedis, worker: FakeWorker) -> AsyncIterator[str]:
    async with serving_web(function_environ(redis_server.url)) as stream_url:
        with function_url(stream_url) as url:
            yield url


def client(url: str, key: str, auth: httpx2.Auth | None = None) -> AsyncOpenAI:
    http = openai.DefaultAsyncHttpxClient(auth=auth)
    headers = {"x-api-key": key}
    return AsyncOpenAI(
        base_url=f"{url}/v1", api_key=key, default_headers=headers, max_retries=0, http_client=http
    )


async def test_a_signature_and_a_key_open_it(url: str) -> None:
    """With OpenAI's client, streamed or not. Either alone is refused, by Lambda or the gateway."""
    async with client(url, KEY, Signed()) as signed:
        assert [model.id async for model in signed.models.list()] == [MODEL]
        stream = await signed.completions.create(model=MODEL, prompt="ab", stream=True)
        parts = [part async for part in stream]
        assert parts[-1].choices[0].finish_reason
    async with client(url, KEY) as unsigned:
        with pytest.raises(openai.PermissionDeniedError) as refused:
            await unsigned.models.list()
        assert refused.value.body == {"Message": "Forbidden"}
    async with client(url, "x" * 32, Signed()) as stranger:
        with pytest.raises(openai.AuthenticationError, match="x-api-key"):
            await stranger.models.list()


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl")
async def test_the_documented_call_works(url: str, tmp_path: Path) -> None:
    """By curl, which signs by itself."""
    blocks = code_blocks((ROOT / "docs" / "deployment.md").read_text())
    [command] = [block.text for block in blocks if "--aws-sigv4" in block.text]
    environ = {
        "FunctionUrl": f"{url}/",
        "key": KEY,
        "AWS_REGION": REGION,
        "AWS_ACCESS_KEY_ID": str(CALLER.access_key),
        "AWS_SECRET_ACCESS_KEY": str(CALLER.secret_key),
    }
    done = await asyncio.to_thread(
        subprocess.run, ["/bin/sh", "-c", command], env=environ, stdout=subprocess.PIPE, check=True
    )
    [model] = json.loads(done.stdout)["data"]
    assert model["id"] == MODEL


def test_it_is_iams_and_of_the_function_that_streams() -> None:
    """On its alias; only where it is asked for. No permission lets anybody in beside policies."""
    [(name, found)] = of_type("AWS::Lambda::Url").items()
    assert transformed()["Resources"][name]["Condition"] == "HasFunctionUrl"
    assert (found["AuthType"], found["InvokeMode"]) == ("AWS_IAM", "RESPONSE_STREAM")
    for condition, function in (
        ("", "StreamFunction"),
        ("HasStreamInstances", "StreamInstancesFunction"),
    ):
        assert chosen(found["TargetFunctionArn"], condition) == {"Ref": f"{function}Aliaslive"}
    permissions = of_type("AWS::Lambda::Permission").values()
    assert not any("FunctionUrl" in permission["Action"] for permission in permissions)
