"""Objects are written atomically, verified when read, and deleted with their job."""

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import httpx
import pytest
from msgspec.structs import replace

from contract.events import ChoiceDelta, LogEntry, Tokens
from contract.jobs import ObjectRef
from contract.payloads import open_store
from contract.payloads.directory import DirectoryStore
from contract.payloads.encoding import encode_result
from contract.payloads.s3 import S3Store
from contract.payloads.store import PayloadLost, PayloadUnavailable, prompt_key, result_key
from gateway.redis.broker import Payloads
from tests.contract.some_calls import make_job
from tests.payloads.bucket import CREDENTIALS

JOB = "job-0-" + "0" * 32
OTHER = "job-0-" + "1" * 32
DATA = b"some bytes\x00\xff" * 1000


def test_an_object_is_read_as_it_was_written(store: DirectoryStore | S3Store) -> None:
    """By its reference, repeatedly. Writing again creates another object."""
    ref = store.put(prompt_key(JOB), DATA)
    assert (store.get(ref), store.get(ref)) == (DATA, DATA)
    assert ref.num_bytes == len(DATA)
    again = store.put(prompt_key(JOB), b"other")
    assert store.get(again) == b"other"
    with pytest.raises(PayloadLost, match="damaged"):
        store.get(ref)


def test_a_missing_object_is_lost(store: DirectoryStore | S3Store) -> None:
    """Not unavailable, because waiting would not help."""
    ref = store.put(prompt_key(JOB), DATA)
    with pytest.raises(PayloadLost, match="not there"):
        store.get(replace(ref, key=prompt_key(OTHER)))


def test_a_deletion_removes_all_objects_of_one_job(store: DirectoryStore | S3Store) -> None:
    """Prompt and results of every epoch. A repetition is harmless."""
    refs = [store.put(key, DATA) for key in (prompt_key(JOB), result_key(JOB, 1))]
    other = store.put(result_key(OTHER, 2), DATA)
    store.delete_job(JOB)
    store.delete_job(JOB)
    for ref in refs:
        with pytest.raises(PayloadLost):
            store.get(ref)
    assert store.get(other) == DATA


def test_a_reference_to_another_store_is_an_error(
    store: DirectoryStore | S3Store, tmp_path: Path
) -> None:
    """For example of another machine with the same path, or of another bucket."""
    ref = DirectoryStore(tmp_path / "another").put(prompt_key(JOB), DATA)
    with pytest.raises(PayloadLost, match="another store"):
        store.get(ref)


@pytest.mark.parametrize("key", ["../../etc/passwd", "/etc/passwd", f"{JOB}/../x", f"{JOB}/x", ""])
def test_a_key_outside_the_store_reads_nothing(store: DirectoryStore | S3Store, key: str) -> None:
    """A writer to Redis must not be able to read files."""
    with pytest.raises(PayloadLost, match="invalid key"):
        store.get(ObjectRef(store.name, key, "0" * 64, 1))


def test_objects_in_a_directory_are_not_readable_by_others(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "objects")
    store.put(prompt_key(JOB), DATA)
    paths = [path for path in (tmp_path / "objects").rglob("*") if path.is_file()]
    assert {path.stat().st_mode & 0o077 for path in paths} == {0}


def test_a_directory_that_cannot_be_used_is_unavailable(tmp_path: Path) -> None:
    """The error has the reason without the path."""
    (tmp_path / "file").write_text("")
    with pytest.raises(PayloadUnavailable, match=r"Not a directory|File exists"):
        DirectoryStore(tmp_path / "file" / "objects").put(prompt_key(JOB), DATA)


def test_two_processes_use_the_same_name_for_a_directory(tmp_path: Path) -> None:
    """The first one creates the name."""
    first, second = DirectoryStore(tmp_path), DirectoryStore(tmp_path)
    assert first.name == second.name
    assert second.get(first.put(prompt_key(JOB), DATA)) == DATA


def test_old_objects_are_deleted(tmp_path: Path) -> None:
    """Crashes may leave objects without a job. Only their age counts."""
    store = DirectoryStore(tmp_path)
    old, young = store.put(prompt_key(JOB), DATA), store.put(prompt_key(OTHER), DATA)
    long_ago_s = time.time() - 1000
    os.utime(tmp_path / JOB, (long_ago_s, long_ago_s))
    assert store.delete_older(900) == 1
    with pytest.raises(PayloadLost):
        store.get(old)
    assert store.get(young) == DATA


def test_a_signed_url_of_a_directory_opens_one_object(tmp_path: Path) -> None:
    """It expires, and no part of it can be changed."""
    store = DirectoryStore(tmp_path)
    ref = store.put(result_key(JOB, 1), DATA)
    parts = urlsplit(store.url(ref, ttl_s=60))
    key, query = parts.path.removeprefix("/v1/objects/"), dict(parse_qsl(parts.query))
    assert store.opened(key, query) == ref
    assert store.opened(result_key(OTHER, 1), query) is None
    for name in query:
        assert store.opened(key, query | {name: query[name] + "0"}) is None
    expired = urlsplit(store.url(ref, ttl_s=-1))
    assert store.opened(key, dict(parse_qsl(expired.query))) is None


def test_a_presigned_url_of_s3_needs_no_credentials(s3_setting: str) -> None:
    """It has an expiry and a signature. moto's server checks neither."""
    store = open_store(s3_setting)
    assert store is not None
    ref = store.put(result_key(JOB, 1), DATA)
    url = store.url(ref, ttl_s=90)
    assert httpx.get(url).content == DATA
    query = dict(parse_qsl(urlsplit(url).query))
    assert query["X-Amz-Expires"] == "90"
    assert query["X-Amz-Signature"]


def test_sizes_are_those_of_one_upload(store: DirectoryStore | S3Store) -> None:
    """By the names of its parts; none without any."""
    upload, part = "upload_" + "0" * 32, "part_" + "a" * 32
    assert store.sizes(upload) == {}
    store.put(f"{upload}/{part}", DATA)
    store.put(prompt_key(JOB), b"1")
    assert store.sizes(upload) == {part: len(DATA)}


def test_a_download_has_the_name_of_its_file(s3_setting: str, tmp_path: Path) -> None:
    """From S3; a directory has no server of its own."""
    key, store = "file-" + "0" * 32 + "/content", open_store(s3_setting)
    assert store is not None
    store.put(key, DATA)
    url = store.download_url(key, "ü.jsonl", 60)
    assert url is not None
    answer = httpx.get(url)
    assert answer.content == DATA
    assert answer.headers["content-disposition"] == "attachment; filename*=UTF-8''%C3%BC.jsonl"
    assert DirectoryStore(tmp_path).download_url(key, "ü.jsonl", 60) is None


def test_a_url_of_aws_names_the_bucket_in_its_region(monkeypatch: pytest.MonkeyPatch) -> None:
    """The global name leads there by a redirect while the bucket is young, and no signature
    survives that."""
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    store = S3Store("a-bucket", "jobs/")
    url = urlsplit(store.url(ObjectRef(store.name, prompt_key(JOB), "", 1), 60))
    assert (url.hostname, url.path) == (
        "a-bucket.s3.eu-central-1.amazonaws.com",
        f"/jobs/{prompt_key(JOB)}",
    )


def test_an_s3_that_does_not_answer_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-central-1")
    store = open_store("s3://nowhere?endpoint=http://127.0.0.1:1")
    assert store is not None
    with pytest.raises(PayloadUnavailable, match="does not answer"):
        store.put(prompt_key(JOB), DATA)


@pytest.mark.parametrize(
    "setting",
    ["relative/path", "gs://bucket", "s3://", "s3://b?region=x", "s3://b?endpoint=a&endpoint=b"],
)
def test_a_malformed_setting_is_an_error(setting: str) -> None:
    with pytest.raises(ValueError, match="store is"):
        open_store(setting)


@pytest.mark.anyio
async def test_a_deleted_result_is_no_longer_in_memory(tmp_path: Path) -> None:
    """Nor that of an earlier attempt, once another one is the job's."""
    payloads, store = Payloads(str(tmp_path), 1), open_store(str(tmp_path))
    assert store is not None
    job = make_job("t")

    async def page(epoch: int) -> list[LogEntry]:
        log = [LogEntry(2, "1-1", Tokens((ChoiceDelta(0, 0, (epoch,), "word"),)))]
        ref = store.put(result_key(job.id, epoch), encode_result(job, log))
        view: Any = SimpleNamespace(result=ref, job=job)
        return await payloads.joined(view, 0, 10, [])

    assert await page(1) != await page(2)
    assert payloads._logs.num_bytes > 0
    await payloads.discard(job.id)
    assert payloads._logs.num_bytes == 0
