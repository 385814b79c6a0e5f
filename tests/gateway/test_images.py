"""Images of chats: what a gateway takes, keeps and counts, and what it refuses. It decodes none."""

import base64
import io
import itertools
import random
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis.asyncio
from msgspec.structs import replace
from PIL import Image

from contract.functions import Functions
from contract.jobs import Job
from contract.keys import Keys
from contract.model_cards import MAX_PIXELS, Capabilities, ImageTokens
from contract.payloads import open_store
from gateway.http.errors import ApiError
from gateway.prepare import images
from tests.fakes import hash_tokenizer
from tests.gateway.conftest import Bearer, Gateways, error_of
from tests.gateway.fake_worker import MODEL, FakeWorker, publish_model

pytestmark = pytest.mark.anyio

SEES = "sees"  # a model of images
MARK = "<image>"
COUNTED = ImageTokens(
    placeholder=MARK, layout="grid", cell=28, least=28 * 28 * 4, most=28 * 28 * 64, of_cell=1
)
TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}<image>{% else %}{{ p.text }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)
URL = "messages.0.content.0.image_url.url"
FILE = "messages.0.content.0.image_url.file_id"


def picture(kind: str = "PNG", size: tuple[int, int] = (60, 90), mode: str = "RGB") -> bytes:
    """An image file of noise."""
    width, height = size
    noise = random.Random(1).randbytes(width * height)
    image = Image.frombytes("L", size, noise).convert(mode)
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


def data_url(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def image_part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def chat(*parts: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A chat of one message with these parts."""
    messages = [{"role": "user", "content": [*parts]}]
    return {"model": SEES, "max_tokens": 20, "messages": messages} | fields


async def refused(http: httpx.AsyncClient, body: dict[str, Any]) -> tuple[int, str | None, str]:
    return error_of(await http.post("/v1/chat/completions", json=body))


@pytest.fixture
async def seeing(
    gateways: Gateways,
    redis_client: redis.asyncio.Redis,
    keys: Keys,
    worker: FakeWorker,
    functions: Functions,
    tmp_path: Path,
) -> AsyncIterator[tuple[httpx.AsyncClient, FakeWorker]]:
    """A client of a gateway with an object store, and an idle worker of a model with images."""
    files = replace(hash_tokenizer(), chat_template=TEMPLATE)
    can = Capabilities(structured_output=True, images=COUNTED)
    await publish_model(
        redis_client, keys, SEES, files=files, capabilities=can, context_length=2048
    )
    seer = FakeWorker(functions, SEES, incarnation="w2")
    await seer.beat()
    async with gateways(object_store=str(tmp_path)) as http:
        yield http, seer


async def job_of(http: httpx.AsyncClient, seer: FakeWorker, body: dict[str, Any]) -> Job:
    """The job that a worker gets of a call."""
    await submitted(http, body)
    return (await seer.claim()).job


async def submitted(http: httpx.AsyncClient, body: dict[str, Any]) -> str:
    answer = await http.post("/v1/jobs", json={"endpoint": "/v1/chat/completions", "body": body})
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])


def list_images(store: Path) -> list[Path]:
    return [*store.glob("job-*/image-*")]


async def uploaded(http: httpx.AsyncClient, data: bytes, purpose: str = "vision") -> str:
    answer = await http.post(
        "/v1/files", files={"file": ("a.png", data)}, data={"purpose": purpose}
    )
    assert answer.status_code == 200, answer.text
    assert answer.json()["purpose"] == purpose
    return str(answer.json()["id"])


# What is sent, the format's name, size and mode of the image.
FORMATS = [
    ("PNG", "png", (60, 90), "RGB"),
    ("PNG", "png", (1, 1), "L"),
    ("PNG", "png", (200, 7), "RGBA"),
    ("PNG", "png", (90, 60), "P"),
    ("PNG", "png", (90, 60), "I;16"),
    ("JPEG", "jpeg", (333, 250), "RGB"),
    ("JPEG", "jpg", (31, 300), "L"),
    ("JPEG", "jpeg", (64, 64), "CMYK"),
    ("WEBP", "webp", (100, 40), "RGB"),
    ("WEBP", "webp", (40, 100), "RGBA"),
    ("GIF", "gif", (28, 28), "P"),
    ("GIF", "gif", (600, 500), "L"),
]


@pytest.mark.parametrize(("kind", "name", "size", "mode"), FORMATS)
async def test_an_image_becomes_an_object_of_its_job_and_its_tokens_count(
    seeing: tuple[httpx.AsyncClient, FakeWorker],
    tmp_path: Path,
    kind: str,
    name: str,
    size: tuple[int, int],
    mode: str,
) -> None:
    """The prompt has a mark; the object has the caller's bytes, and is gone with the job."""
    http, seer = seeing
    data = picture(kind, size, mode)
    body = chat({"type": "text", "text": "What? "}, image_part(data_url(data, name)))
    job_id = await submitted(http, body)
    claimed = await seer.claim()
    job = claimed.job
    [ref] = job.images
    store = open_store(str(tmp_path))
    assert store is not None
    assert (ref.key, job.image_data) == (f"{job_id}/image-0", ())
    assert store.get(ref) == data
    assert bytes(job.prompt_ids) == b"What? <image>"
    assert job.num_image_tokens == COUNTED.num_tokens(*size) >= 4
    view = (await http.get(f"/v1/jobs/{job_id}")).json()
    assert view["usage"]["prompt_tokens"] == len(job.prompt_ids) + job.num_image_tokens
    await seer.run(claimed)
    assert (await http.delete(f"/v1/jobs/{job_id}")).status_code == 200
    assert not list_images(tmp_path)


async def test_exif_turns_a_photo_before_its_tokens_are_counted(
    seeing: tuple[httpx.AsyncClient, FakeWorker], redis_client: redis.asyncio.Redis, keys: Keys
) -> None:
    """As transformers and vLLM turn it before they read it."""
    http, seer = seeing
    exif = Image.Exif()
    exif[0x0112] = 6
    file = io.BytesIO()
    Image.new("RGB", (280, 56)).save(file, "JPEG", exif=exif)
    job = await job_of(http, seer, chat(image_part(data_url(file.getvalue(), "jpeg"))))
    assert job.num_image_tokens == COUNTED.num_tokens(56, 280)
    assert images._size(file.getvalue(), "x") == (56, 280)


async def test_a_file_of_the_tenant_is_an_image_in_each_form(
    seeing: tuple[httpx.AsyncClient, FakeWorker], tmp_path: Path
) -> None:
    """As a part of a chat, as a file, and in a response; its content is copied for the job, so that
    the file may be deleted."""
    http, seer = seeing
    data = picture()
    store = open_store(str(tmp_path))
    assert store is not None
    for purpose in ("vision", "user_data"):
        file_id = await uploaded(http, data, purpose)
        for part in (
            {"type": "image_url", "image_url": {"file_id": file_id}},
            {"type": "file", "file": {"file_id": file_id}},
        ):
            job = await job_of(http, seer, chat(part, {"type": "text", "text": " ?"}))
            assert bytes(job.prompt_ids) == b"<image> ?"
            assert (await http.get(f"/v1/files/{file_id}")).status_code == 200
            assert store.get(job.images[0]) == data
        assert (await http.delete(f"/v1/files/{file_id}")).status_code == 200
        assert store.get(job.images[0]) == data


@pytest.mark.parametrize("form", ["url", "file"])
async def test_a_response_takes_images_and_a_chain_keeps_them(
    seeing: tuple[httpx.AsyncClient, FakeWorker], form: str
) -> None:
    http, seer = seeing
    source = {"image_url": data_url(picture())}
    if form == "file":
        source = {"file_id": await uploaded(http, picture())}
    text = {"type": "input_text", "text": "What?"}
    content = [text, {"type": "input_image", "detail": "auto", **source}]
    fields = {"model": SEES, "background": True, "max_output_tokens": 20}
    first = await http.post(
        "/v1/responses", json=fields | {"input": [{"role": "user", "content": content}]}
    )
    assert first.status_code == 200, first.text
    claimed = await seer.claim()
    assert len(claimed.job.images) == 1
    await seer.run(claimed)
    id_ = first.json()["id"]
    shown = (await http.get(f"/v1/responses/{id_}/input_items")).json()["data"][0]["content"]
    assert shown == [text, {"type": "input_image", **source}]
    chained = await http.post(
        "/v1/responses", json=fields | {"input": "And?", "previous_response_id": id_}
    )
    assert chained.status_code == 200, chained.text
    again = (await seer.claim()).job
    assert len(again.images) == 1
    assert bytes(again.prompt_ids).startswith(b"What?<image>")


async def test_a_function_may_return_images(seeing: tuple[httpx.AsyncClient, FakeWorker]) -> None:
    """As a coding agent's tool that shows a file."""
    http, seer = seeing
    call = {"type": "function_call", "call_id": "c", "name": "view", "arguments": "{}"}
    output = [
        {"type": "input_text", "text": "a.png "},
        {"type": "input_image", "image_url": data_url(picture())},
    ]
    result = {"type": "function_call_output", "call_id": "c", "output": output}
    body = {"model": SEES, "background": True, "max_output_tokens": 20, "input": [call, result]}
    answer = await http.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    job = (await seer.claim()).job
    assert bytes(job.prompt_ids).endswith(b"a.png <image>")
    assert len(job.images) == 1
    items = await http.get(f"/v1/responses/{answer.json()['id']}/input_items")
    assert items.json()["data"][0]["output"] == output
    body["model"] = MODEL
    answer = await http.post("/v1/responses", json=body)
    assert error_of(answer) == (400, "input", "unsupported_parameter")


async def test_a_replayed_job_has_images_of_its_own(
    seeing: tuple[httpx.AsyncClient, FakeWorker], tmp_path: Path
) -> None:
    http, seer = seeing
    job_id = await submitted(http, chat(image_part(data_url(picture()))))
    await seer.finish(await seer.claim(), 1, "engine_error", "no")
    begun = await http.post("/v1/jobs/replay", json={"status": "failed"})
    assert begun.status_code in (200, 202), begun.text
    claimed = await seer.claim()
    assert claimed.job.id != job_id
    [ref] = claimed.job.images
    store = open_store(str(tmp_path))
    assert store is not None
    assert ref.key.startswith(claimed.job.id)
    assert store.get(ref) == picture()
    assert claimed.job.num_image_tokens == COUNTED.num_tokens(60, 90)


def png_header(width: int, height: int) -> bytes:
    """The beginning of a PNG that says this size."""
    head = b"IHDR" + width.to_bytes(4, "big") + height.to_bytes(4, "big") + b"\x08\x02\0\0\0"
    chunk = (13).to_bytes(4, "big") + head + zlib.crc32(head).to_bytes(4, "big")
    return b"\x89PNG\r\n\x1a\n" + chunk


def gif_header(width: int, height: int) -> bytes:
    return b"GIF89a" + width.to_bytes(2, "little") + height.to_bytes(2, "little") + b"\0" * 20


def webp_header(width: int, height: int) -> bytes:
    size = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    return b"RIFF\x1e\0\0\0WEBPVP8X\x0a\0\0\0\0\0\0\0" + size + b"\0" * 32


def jpeg_header(width: int, height: int) -> bytes:
    size = height.to_bytes(2, "big") + width.to_bytes(2, "big")
    return b"\xff\xd8\xff\xc0\0\x11\x08" + size + b"\x03" + b"\0" * 40


HEADERS = [png_header, gif_header, webp_header, jpeg_header]
BOMBS = [(4097, 4096), (16_000, 16_000), (1, 201), (201, 1), (16_383, 1_025), (30_000, 30_000)]


@pytest.mark.parametrize(("header", "size"), [*itertools.product(HEADERS, BOMBS)])
async def test_a_bomb_is_refused_from_its_header(
    seeing: tuple[httpx.AsyncClient, FakeWorker], header: Any, size: tuple[int, int]
) -> None:
    """No pixel follows the header, so nothing could be decoded."""
    http, _ = seeing
    if header is webp_header:
        size = min(size[0], 2**24), size[1]
    body = chat(image_part(data_url(header(*size))))
    assert await refused(http, body) == (400, URL, "invalid_value")


NO_IMAGES = [
    b"",
    b"x",
    b"GIF89",
    b"BM" + b"\0" * 60,
    b"<svg width='10' height='10' xmlns='http://www.w3.org/2000/svg'/>",
    b"<?xml version='1.0'?><!DOCTYPE a [<!ENTITY b SYSTEM 'file:///etc/passwd'>]><svg>&b;</svg>",
    b"II*\0\x08\0\0\0\0\0",
    b"\0\0\0\x18ftypavif\0\0\0\0avifmif1",
    b"%PDF-1.7",
    png_header(10, 10)[:20],
    png_header(0, 10),
    gif_header(10, 0),
    b"\xff\xd8\xff\xe0\0\x01",
    b"\xff\xd8\xff" + b"\xff" * 300_000,
    b"\xff\xd8\xff" + b"\xd0\xff" * 150_000,
    b"RIFF\0\0\0\0WEBPVP8 ",
]


@pytest.mark.parametrize("data", NO_IMAGES)
async def test_what_is_no_image_is_refused(
    seeing: tuple[httpx.AsyncClient, FakeWorker], data: bytes
) -> None:
    """In a data URL and as a file, without a job or an object."""
    http, _ = seeing
    assert await refused(http, chat(image_part(data_url(data)))) == (400, URL, "invalid_value")
    file_id = await uploaded(http, data or b"x")
    part = {"type": "file", "file": {"file_id": file_id}}
    assert await refused(http, chat(part)) == (400, FILE, "invalid_value")


async def test_every_beginning_of_an_image_is_taken_or_refused(
    seeing: tuple[httpx.AsyncClient, FakeWorker],
) -> None:
    """A cut header has no size; what is cut behind it is for the engine to refuse."""
    for kind in ("PNG", "JPEG", "WEBP", "GIF"):
        data = picture(kind)
        found = set()
        for end in [*range(0, 64), *range(64, len(data), 97)]:
            try:
                found.add(images._size(data[:end], "x"))
            except ApiError as error:
                found.add((error.status_code, 0))
        assert found == {(60, 90), (400, 0)}, kind


@pytest.mark.parametrize("seed", range(20))
async def test_damaged_headers_raise_nothing_else(seed: int) -> None:
    draw = random.Random(seed)
    for _, kind in itertools.product(range(50), ("PNG", "JPEG", "WEBP", "GIF")):
        data = bytearray(picture(kind, (20, 30)))
        for _ in range(draw.randint(1, 8)):
            data[draw.randrange(min(len(data), 64))] = draw.randrange(256)
        try:
            width, height = images._size(bytes(data), "x")
        except ApiError:
            continue
        assert 1 <= width * height <= MAX_PIXELS


GOOD = data_url(picture())
SOURCES: list[tuple[Any, str]] = [
    ({"url": "https://example.com/cat.png"}, "image_url"),
    ({"url": "http://169.254.169.254/latest/meta-data"}, "image_url"),
    ({"url": "file:///etc/passwd"}, "image_url"),
    ({"url": "/etc/passwd"}, "image_url"),
    ({"url": "data:text/html;base64,AAAA"}, "image_url"),
    ({"url": "data:image/png,AAAA"}, "image_url"),
    ({"url": "data:image/svg+xml;base64,AAAA"}, "image_url"),
    ({"url": 3}, "image_url"),
    ({"url": ["data:image/png;base64,AAAA"]}, "image_url"),
    ({"url": ""}, "image_url"),
    ({}, "image_url"),
    (None, "image_url"),
    ("data:image/png;base64,AAAA", "image_url"),
    ({"url": GOOD, "file_id": "file-" + "0" * 32}, "image_url"),
    ({"file_id": "file-1"}, "image_url"),
    ({"file_id": "../../job-0-0/prompt"}, "image_url"),
    ({"file_id": {"a": 1}}, "image_url"),
    ({"url": "data:image/png;base64,A"}, "image_url.url"),
    ({"url": "data:image/png;base64,AAA"}, "image_url.url"),
    ({"url": "data:image/png;base64,AA\n=="}, "image_url.url"),
    ({"url": "data:image/png;base64,AAAA====A"}, "image_url.url"),
    ({"url": "data:image/png;base64,ÄÖÜ"}, "image_url.url"),
    ({"url": "data:image/png;base64,%41%41"}, "image_url.url"),
]


@pytest.mark.parametrize(("source", "place"), SOURCES)
async def test_a_source_of_another_kind_is_refused_by_name(
    seeing: tuple[httpx.AsyncClient, FakeWorker], source: Any, place: str
) -> None:
    """No URL is fetched: the message says so."""
    http, _ = seeing
    body = chat({"type": "image_url", "image_url": source})
    answer = await http.post("/v1/chat/completions", json=body)
    assert error_of(answer) == (400, f"messages.0.content.0.{place}", "invalid_value")
    if isinstance(source, dict) and str(source.get("url", "")).startswith("http"):
        assert "fetches no URLs" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "file", "file": {"file_data": GOOD}},
        {"type": "file", "file": None},
        {"type": "input_audio", "input_audio": {}},
        {"type": "video_url", "video_url": {"url": GOOD}},
    ],
)
async def test_other_parts_are_refused_by_name(
    seeing: tuple[httpx.AsyncClient, FakeWorker], part: dict[str, Any]
) -> None:
    http, _ = seeing
    place = "messages.0.content.0.type"
    assert await refused(http, chat(part)) == (400, place, "unsupported_parameter")


async def test_a_model_without_images_refuses_them(
    seeing: tuple[httpx.AsyncClient, FakeWorker],
) -> None:
    """The list of models says which takes them."""
    http, _ = seeing
    body = chat(image_part(GOOD), model="hash")
    assert await refused(http, body) == (400, URL, "unsupported_parameter")
    listed = (await http.get("/v1/models")).json()["data"]
    can = {model["id"]: model["capabilities"]["images"] for model in listed}
    assert (can["hash"], can[SEES]) == (False, True)


async def test_files_of_others_and_of_other_purposes_are_no_images(
    seeing: tuple[httpx.AsyncClient, FakeWorker], bearer: Bearer
) -> None:
    http, _ = seeing
    mine, theirs = await bearer("acme"), await bearer("other")
    http.headers.update(theirs)
    foreign = await uploaded(http, picture())
    http.headers.update(mine)
    for file_id, status, code in (
        (foreign, 404, "file_not_found"),
        ("file-" + "0" * 32, 404, "file_not_found"),
        (await uploaded(http, picture(), "batch"), 400, "invalid_value"),
    ):
        body = chat({"type": "file", "file": {"file_id": file_id}})
        assert await refused(http, body) == (status, FILE, code)


async def test_images_are_bounded_in_number_bytes_and_context(
    seeing: tuple[httpx.AsyncClient, FakeWorker],
) -> None:
    http, seer = seeing
    small = image_part(data_url(picture(size=(8, 8))))
    job = await job_of(http, seer, chat(*[small] * images.MAX_IMAGES))
    assert len(job.images) == images.MAX_IMAGES
    many = chat(*[small] * (images.MAX_IMAGES + 1))
    assert await refused(http, many) == (400, "messages", "invalid_value")
    # Padding behind a file's end is a part of it.
    file_id = await uploaded(http, picture() + b"\0" * (images.MAX_IMAGE_BYTES - 20_000))
    part = {"type": "file", "file": {"file_id": file_id}}
    assert len((await job_of(http, seer, chat(part))).images) == 1
    place = FILE.replace("content.0", "content.1")
    assert await refused(http, chat(part, part)) == (400, place, "invalid_value")
    large = image_part(data_url(picture(size=(224, 224))))  # 64 tokens
    over = chat(*[large] * 16, {"type": "text", "text": "x" * 1100})
    assert await refused(http, over) == (400, "messages", "context_length_exceeded")


async def test_each_image_has_one_place_in_the_prompt(
    seeing: tuple[httpx.AsyncClient, FakeWorker],
) -> None:
    """A text that contains the mark of an image would take another's place."""
    http, _ = seeing
    for text in (MARK, f"a{MARK}{MARK}"):
        body = chat({"type": "text", "text": text}, image_part(GOOD))
        assert await refused(http, body) == (400, "messages", "invalid_value")


@pytest.mark.parametrize(
    ("field", "value"), [("prompt_logprobs", 1), ("truncate_prompt_tokens", 9)]
)
async def test_parameters_of_the_prompts_tokens_are_refused_beside_images(
    seeing: tuple[httpx.AsyncClient, FakeWorker], field: str, value: int
) -> None:
    http, _ = seeing
    body = chat(image_part(GOOD), **{field: value})
    assert await refused(http, body) == (400, field, "unsupported_parameter")


async def test_without_an_object_store_images_are_refused(
    seeing: tuple[httpx.AsyncClient, FakeWorker], gateways: Gateways
) -> None:
    async with gateways() as http:
        answer = await http.post("/v1/chat/completions", json=chat(image_part(GOOD)))
        assert answer.json()["error"]["code"] == "no_object_store"


async def test_equal_chats_with_other_images_are_other_jobs(
    seeing: tuple[httpx.AsyncClient, FakeWorker], tmp_path: Path
) -> None:
    """The prompts are equal, the hashes of the images differ; text alone stays a string."""
    http, seer = seeing
    first, second = [
        await job_of(http, seer, chat(image_part(data_url(picture(size=size)))))
        for size in ((60, 90), (60, 91))
    ]
    assert first.prompt_ids == second.prompt_ids
    assert first.images[0].sha256 != second.images[0].sha256
    plain = await job_of(
        http, seer, chat({"type": "text", "text": "a"}, {"type": "text", "text": "b"})
    )
    assert (bytes(plain.prompt_ids), plain.images, plain.num_image_tokens) == (b"a\nb", (), 0)


async def test_a_refused_job_leaves_no_object(
    seeing: tuple[httpx.AsyncClient, FakeWorker], tmp_path: Path, gateways: Gateways
) -> None:
    async with gateways(object_store=str(tmp_path), lane_bound_tokens=1) as full:
        answer = await full.post("/v1/chat/completions", json=chat(image_part(GOOD)))
        assert answer.status_code in (429, 503), answer.text
    assert not list_images(tmp_path)
