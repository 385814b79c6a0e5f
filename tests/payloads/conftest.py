"""Both kinds of store, empty."""

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from contract.payloads import open_store
from contract.payloads.directory import DirectoryStore
from contract.payloads.s3 import S3Store
from tests.payloads.bucket import CREDENTIALS, make_bucket, running_s3


@pytest.fixture(scope="session")
def s3_bucket() -> Iterator[tuple[str, str]]:
    """The endpoint and the name of a bucket."""
    with running_s3() as endpoint:
        yield endpoint, make_bucket(endpoint)


@pytest.fixture
def s3_setting(s3_bucket: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> str:
    """The setting of a store under a new prefix."""
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    endpoint, bucket = s3_bucket
    return f"s3://{bucket}/{secrets.token_hex(4)}/a?endpoint={endpoint}"


@pytest.fixture(params=["directory", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> DirectoryStore | S3Store:
    is_s3 = request.param == "s3"
    setting = request.getfixturevalue("s3_setting") if is_s3 else str(tmp_path / "objects")
    opened = open_store(setting)
    assert opened is not None
    return opened
