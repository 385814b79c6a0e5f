"""Files and batches, by the official client for Python."""

import json
import time
from functools import partial

import openai
from exercises import BASE_URL, KEY, MODEL, QUESTION, error_of, says, works_on_demo

client = openai.OpenAI(base_url=BASE_URL, api_key=KEY, max_retries=0)
URL = "/v1/chat/completions"
HOUR_S = 3_600
EXPIRES = {"anchor": "created_at", "seconds": HOUR_S}
NUM_MANY = 500  # lines of a batch that does not end before it is cancelled


def upload(content, **options):
    return client.files.create(file=("in.jsonl", content), purpose="batch", **options)


def line(number, **fields):
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        **fields,
    }
    return {"custom_id": f"id-{number}", "method": "POST", "url": URL, "body": body}


def start(lines, **options):
    file = upload("".join(json.dumps(each) + "\n" for each in lines).encode())
    return client.batches.create(
        input_file_id=file.id, endpoint=URL, completion_window="24h", **options
    )


def reached(batch, *statuses):
    """The batch, once it has one of these states or has ended."""
    while batch.status not in (*statuses, "completed", "failed", "expired", "cancelled"):
        time.sleep(0.1)
        batch = client.batches.retrieve(batch.id)
    return batch


def results(file_id):
    return [json.loads(each) for each in client.files.content(file_id).iter_lines()]


@works_on_demo("files with pages and expiry")
def files():
    stored = [upload(f"{number}\n".encode(), expires_after=EXPIRES) for number in range(3)]
    assert stored[0].expires_at == stored[0].created_at + HOUR_S
    assert client.files.retrieve(stored[0].id) == stored[0]
    assert client.files.wait_for_processing(stored[0].id).status == "processed"
    for order, wanted in (("asc", stored), ("desc", stored[::-1])):
        listed = client.files.list(limit=1, order=order, purpose="batch")
        assert [file for file in listed if file in stored] == wanted
    assert [client.files.content(file.id).read() for file in stored] == [b"0\n", b"1\n", b"2\n"]
    for file in stored:
        assert client.files.delete(file.id).deleted
        for ask in (client.files.retrieve, client.files.content, client.files.delete):
            error_of(openai.NotFoundError, partial(ask, file.id))


@works_on_demo("batch with output and error file")
def batch():
    lines = [*map(line, range(3)), line(3, temperature=9)]
    started = start(lines, metadata={"run": "1"}, output_expires_after=EXPIRES)
    assert started.expires_at == started.created_at + 24 * HOUR_S
    ended = reached(started)
    assert (ended.status, ended.metadata) == ("completed", {"run": "1"}), ended
    assert ended.request_counts.model_dump() == {"total": 4, "completed": 3, "failed": 1}
    output, [error] = results(ended.output_file_id), results(ended.error_file_id)
    assert [each["custom_id"] for each in output] == ["id-0", "id-1", "id-2"]
    for each in output:
        says(each["response"]["body"]["choices"][0]["message"]["content"])
    assert (error["custom_id"], error["response"]["status_code"]) == ("id-3", 400)
    file = client.files.retrieve(ended.output_file_id)
    assert (file.purpose, file.expires_at) == ("batch_output", file.created_at + HOUR_S)
    other = reached(start(lines))
    listed = [each.id for each in client.batches.list(limit=1)]
    assert listed[:2] == [other.id, ended.id]


@works_on_demo("batch of a bad file")
def bad_batch():
    failed = reached(start([line(0), line(0), line(1, model="other"), line(2, stream=True)]))
    assert failed.status == "failed"
    assert [(error.line, error.code, error.param) for error in failed.errors.data] == [
        (2, "duplicate_custom_id", "custom_id"),
        (3, "mismatched_model", "body.model"),
        (4, "unsupported_parameter", "body.stream"),
    ]


@works_on_demo("cancelled batch")
def cancelled_batch():
    lines = list(map(line, range(NUM_MANY)))
    running = reached(start(lines), "in_progress")
    assert client.batches.cancel(running.id).status == "cancelling"
    ended = reached(running)
    assert (ended.status, ended.request_counts.total) == ("cancelled", NUM_MANY), ended
    errors = results(ended.error_file_id)
    assert {error["error"]["code"] for error in errors} == {"batch_cancelled"}
    output = results(ended.output_file_id) if ended.output_file_id else []
    found = [each["custom_id"] for each in [*output, *errors]]
    assert sorted(found) == sorted(each["custom_id"] for each in lines)


@works_on_demo("uploads in parts")
def uploads():
    content = b"0123456789" * 1000
    done = client.uploads.upload_file_chunked(
        file=content,
        filename="in.jsonl",
        bytes=len(content),
        mime_type="text/plain",
        purpose="batch",
        part_size=4096,
    )
    assert done.status == "completed"
    assert client.files.content(done.file.id).read() == content
    client.files.delete(done.file.id)
