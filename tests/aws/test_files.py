"""Files on Lambda, longer than an event or an answer may be: OpenAI's client at API Gateway's door,
ApiFunction in the emulator, S3 by moto."""

import hashlib
import os
import random
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import openai
import pytest
from openai import AsyncOpenAI

from infra.embedded_redis import EmbeddedRedis
from tests.aws.door import Door
from tests.aws.emulator import EMULATOR, emulating, function_environ, serving_web
from tests.aws.lambda_events import HEADERS, KEY
from tests.gateway.fake_worker import FakeWorker
from tests.payloads.bucket import CREDENTIALS
from tests.payloads.conftest import s3_bucket, s3_setting

__all__ = ["s3_bucket", "s3_setting"]

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(not EMULATOR.exists(), reason="no aws-lambda-rie: scripts/setup says why"),
]

# By hand, once: BATCHWAY_TEST_FILE_MB=200
FILE_BYTES = int(os.environ.get("BATCHWAY_TEST_FILE_MB", "9")) * 10**6
PART_BYTES = 4 * 2**20  # as docs/batches.md says


@pytest.fixture
async def client(
    redis_server: EmbeddedRedis, idle_worker: FakeWorker, s3_setting: str
) -> AsyncIterator[AsyncOpenAI]:
    """OpenAI's client of the API; other addresses are reached as ever."""
    environ = function_environ(redis_server.url, BATCHWAY_OBJECT_STORE=s3_setting, **CREDENTIALS)
    host = HEADERS["Host"]
    async with (
        serving_web(environ) as stream_url,
        emulating(environ) as emulator,
        openai.DefaultAsyncHttpxClient(
            mounts={f"https://{host}": Door(emulator, stream_url)}, timeout=httpx2.Timeout(120)
        ) as http,
        AsyncOpenAI(
            base_url=f"https://{host}/v1", api_key=KEY, max_retries=0, http_client=http
        ) as client,
    ):
        yield client


@pytest.mark.campaign
async def test_a_long_file_goes_up_in_parts_and_down_from_the_store(
    client: AsyncOpenAI, tmp_path: Path
) -> None:
    """A part passes the door; the content comes by a redirect, whole or a range of it."""
    content, path = random.Random(1).randbytes(FILE_BYTES), tmp_path / "in.jsonl"
    path.write_bytes(content)
    with pytest.raises(openai.APIStatusError) as refused:
        await client.files.create(file=path, purpose="batch")
    assert (refused.value.status_code, refused.value.code) == (413, "body_too_large")

    upload = await client.uploads.upload_file_chunked(
        file=path,
        mime_type="application/jsonl",
        purpose="batch",
        part_size=PART_BYTES,
        md5=hashlib.md5(content, usedforsecurity=False).hexdigest(),
    )
    assert upload.file is not None
    assert upload.file.bytes == FILE_BYTES
    read = await client.files.content(upload.file.id)
    assert read.content == content
    assert "in.jsonl" in read.response.headers["content-disposition"]
    [redirect] = read.response.history
    assert redirect.status_code == 307
    assert "authorization" not in read.response.request.headers
    headers = {"Range": f"bytes=1-{PART_BYTES + 1}"}
    part = await client.files.content(upload.file.id, extra_headers=headers)
    assert (part.response.status_code, part.content) == (206, content[1 : PART_BYTES + 2])


async def test_a_short_file_passes_the_door_as_it_is(client: AsyncOpenAI) -> None:
    """Bytes that are no text, up and down, and a range of a file."""
    content = random.Random(1).randbytes(PART_BYTES)
    file = await client.files.create(file=("in.jsonl", content), purpose="batch")
    read = await client.files.content(file.id)
    assert (read.response.history, read.content) == ([], content)
    part = await client.files.content(file.id, extra_headers={"Range": "bytes=5-8"})
    assert (part.response.status_code, part.content) == (206, content[5:9])
