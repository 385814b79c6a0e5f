"""The template's own policies, which moto enforces: what each role may do with objects."""

import json
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import boto3
import httpx
import pytest

from contract.jobs import ObjectRef
from contract.payloads.s3 import S3Store
from contract.payloads.store import PayloadLost, PayloadUnavailable, prompt_key, result_key
from gateway.files import Joined
from tests.aws.template import as_list, chosen, statements, transformed

JOB, OTHER = "job-0-" + "0" * 32, "job-0-" + "1" * 32
BUCKETS = {"PayloadBucket": "stack-payloads", "WeightsBucket": "stack-weights"}
WRITING = ("ApiRole", "StreamRole", "WorkerTaskRole", "FlowsTaskRole")
READING = ("CallbacksTaskRole",)


def resolved(value: Any) -> Any:
    """A part of a policy with the buckets' names; other resources become one that is not there."""
    match value:
        case {"Fn::Sub": str(text)}:
            for name, bucket in BUCKETS.items():
                text = text.replace(f"${{{name}.Arn}}", f"arn:aws:s3:::{bucket}")
            return text if "$" not in text else "arn:aws:none:::x"
        case {"Fn::GetAtt": [name, "Arn"]} if name in BUCKETS:
            return f"arn:aws:s3:::{BUCKETS[name]}"
        case {"Fn::GetAtt": _} | {"Ref": _}:
            return "arn:aws:none:::x"
        case dict():
            return {name: resolved(part) for name, part in value.items()}
        case list():
            return [resolved(part) for part in value]
    return value


@contextmanager
def enforcing(aws_url: str) -> Iterator[None]:
    """Moto checks the rights of each call."""

    def after(num_calls: str) -> None:
        httpx.post(f"{aws_url}/moto-api/reset-auth", content=num_calls).raise_for_status()

    after("0")
    try:
        yield
    finally:
        after("inf")


@pytest.fixture
def buckets(aws_environ: dict[str, str]) -> None:
    s3 = boto3.client("s3")
    where: Any = {"LocationConstraint": "eu-central-1"}
    for bucket in BUCKETS.values():
        if bucket not in {found["Name"] for found in s3.list_buckets()["Buckets"]}:
            s3.create_bucket(Bucket=bucket, CreateBucketConfiguration=where)


def for_moto(statement: dict[str, Any]) -> dict[str, Any]:
    """For the deletion of several objects moto asks for a right on the bucket instead of them."""
    if "s3:DeleteObject" not in as_list(statement["Action"]):
        return statement
    arn = statement["Resource"]
    return statement | {"Resource": [arn, arn.removesuffix("/*")]}


def take(role: str, monkeypatch: pytest.MonkeyPatch, *, as_moto_asks: bool = True) -> None:
    """Makes a role of the template, and acts as it from now on."""
    iam = boto3.client("iam")
    given = transformed()["Resources"][role]["Properties"]
    everything = list(transformed()["Conditions"])
    documents = [resolved(chosen(p["PolicyDocument"], *everything)) for p in given["Policies"]]
    for document in documents if as_moto_asks else []:
        document["Statement"] = [for_moto(one) for one in document["Statement"]]
    role = f"{role}-{secrets.token_hex(4)}"
    made = iam.create_role(RoleName=role, AssumeRolePolicyDocument="{}")["Role"]["Arn"]
    for document in documents:
        text = json.dumps(document)
        iam.put_role_policy(RoleName=role, PolicyName="least", PolicyDocument=text)
    who = boto3.client("sts").assume_role(RoleArn=made, RoleSessionName="test")["Credentials"]
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", who["AccessKeyId"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", who["SecretAccessKey"])
    monkeypatch.setenv("AWS_SESSION_TOKEN", who["SessionToken"])


def store_of(aws_url: str) -> S3Store:
    return S3Store(BUCKETS["PayloadBucket"], "jobs/", aws_url)


@pytest.mark.usefixtures("buckets")
@pytest.mark.parametrize("role", WRITING)
def test_a_job_is_deleted_by_every_role_that_writes(
    aws_url: str, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All its objects and no other's. Neither the other bucket nor the bucket itself is open."""
    other = store_of(aws_url).put(prompt_key(OTHER), b"other")
    take(role, monkeypatch)
    store = store_of(aws_url)
    with enforcing(aws_url):
        refs = [store.put(key, b"x") for key in (prompt_key(JOB), result_key(JOB, 1))]
        assert store.get(refs[0]) == b"x"
        store.delete_job(JOB)
        for ref in refs:
            with pytest.raises(PayloadLost):
                store.get(ref)
        assert store.get(other) == b"other"
        with pytest.raises(PayloadUnavailable, match="AccessDenied"):
            S3Store(BUCKETS["WeightsBucket"], "jobs/", aws_url).put(prompt_key(JOB), b"x")


@pytest.mark.usefixtures("buckets")
@pytest.mark.parametrize("role", ["ApiRole", "StreamRole"])
def test_both_functions_take_a_file_in_parts(
    aws_url: str, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They list, join and delete them, and read what they make, as those do whom they give a URL;
    moto checks no rights of URLs."""
    upload, file = "upload_" + secrets.token_hex(16), f"file-{secrets.token_hex(16)}/content"
    take(role, monkeypatch)
    store = store_of(aws_url)
    with enforcing(aws_url):
        part = f"{upload}/part_{secrets.token_hex(16)}"
        store.put(part, b"abc")
        assert list(store.sizes(upload).values()) == [3]
        store.write(file, Joined(store, [(part, 3), (part, 3)]).buffered())
        store.delete_job(upload)
        assert store.sizes(upload) == {}
        assert store.read(file, 0, 9) == b"abcabc"


@pytest.mark.usefixtures("buckets")
@pytest.mark.parametrize("role", READING)
def test_callbacks_read_results_and_delete_nothing(
    aws_url: str, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = store_of(aws_url).put(prompt_key(OTHER), b"other")
    take(role, monkeypatch)
    store = store_of(aws_url)
    with enforcing(aws_url):
        assert store.get(ref) == b"other"
        with pytest.raises(PayloadLost):
            store.get(ObjectRef(store.name, prompt_key(JOB), "0" * 64, 1))
        with pytest.raises(PayloadUnavailable, match="AccessDenied"):
            store.delete_job(OTHER)


@pytest.mark.usefixtures("buckets")
def test_a_refused_deletion_is_an_error(aws_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """S3 answers with success and an error for each object. Once, this was tried for ever."""
    ref = store_of(aws_url).put(prompt_key(JOB), b"x")
    take("ApiRole", monkeypatch, as_moto_asks=False)
    with enforcing(aws_url), pytest.raises(PayloadUnavailable, match=r"deletion \(AccessDenied"):
        store_of(aws_url).delete_job(JOB)
    assert store_of(aws_url).get(ref) == b"x"


def test_who_reads_from_a_bucket_may_list_it() -> None:
    """Otherwise S3 answers a missing object with 403 instead of 404, which moto does not show. A
    condition on the prefix would not hold there."""
    reads, lists = set(), set()
    for role, statement in statements():
        for resource in as_list(statement.get("Resource", [])):
            arn = resolved(resource)
            for action in as_list(statement["Action"]):
                if action == "s3:GetObject" and arn.startswith("arn:aws:s3:::"):
                    reads.add((role, arn.removesuffix("/*")))
                if action == "s3:ListBucket" and "Condition" not in statement:
                    lists.add((role, arn))
    assert {role for role, _ in reads} == {*WRITING, *READING}
    assert reads == lists
