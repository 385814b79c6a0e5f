"""The images of a chat, which callers send as data URLs or as files stored here: their bytes, and
how many tokens they become. Their sizes are read from their headers; only engines decode them.
"""

import asyncio
import binascii
import importlib
import io
import re
from collections.abc import Iterator

from contract.files import content_key
from contract.model_cards import ModelCard
from gateway.files import store_of
from gateway.http.errors import UNSUPPORTED, ApiError, bad_request, invalid_value, not_found
from gateway.prepare.schemas import ChatBody, ImageSource
from gateway.state import Gateway

MAX_IMAGES = 16  # of a chat, also in earlier turns
MAX_IMAGE_BYTES = 8 * 2**20  # of all images of a chat
MAX_PIXELS = 2**24  # of one; decoded, four bytes each
MAX_RATIO = 200  # of an image's sides
PURPOSES = frozenset({"vision", "user_data"})  # of files that hold images
_HEADER_BYTES = 256 * 1024
_SIGNATURES = re.compile(rb"\x89PNG\r\n\x1a\n|\xff\xd8\xff|GIF8[79]a|RIFF.{4}WEBPVP8", re.DOTALL)


async def read_images(
    gateway: Gateway, card: ModelCard, body: ChatBody, tenant: str
) -> tuple[tuple[bytes, ...], int]:
    """Returns the images of a chat in their order, and the tokens that they add to its prompt.
    Raises ApiError, PayloadError."""
    named = [*_sources(body)]
    if not named:
        return (), 0
    param, _ = named[0]
    counted = card.capabilities.images
    if counted is None:
        message = f"{param}: the engine of {card.name!r} takes no images"
        raise bad_request(UNSUPPORTED, message, param)
    if len(named) > MAX_IMAGES:
        raise invalid_value("messages", f"messages: at most {MAX_IMAGES} images, not {len(named)}")
    for name in ("prompt_logprobs", "truncate_prompt_tokens"):
        if getattr(body, name) is not None:
            raise bad_request(UNSUPPORTED, f"{name} cannot be combined with images", name)
    store_of(gateway)
    images, room, num_tokens = list[bytes](), MAX_IMAGE_BYTES, 0
    for param, source in named:
        data = await _read(gateway, source, tenant, param, room)
        room -= len(data)
        if room < 0:
            raise invalid_value(param, f"{param}: images may have {MAX_IMAGE_BYTES} bytes in all")
        num_tokens += counted.num_tokens(*await asyncio.to_thread(_size, data, param))
        images.append(data)
    return tuple(images), num_tokens


def _sources(body: ChatBody) -> Iterator[tuple[str, ImageSource]]:
    """Each image with the name of its parameter."""
    for i, message in enumerate(body.messages):
        for j, part in enumerate(message.parts):
            if part.type == "image_url":
                field = "url" if part.image_url.file_id is None else "file_id"
                yield f"messages.{i}.content.{j}.image_url.{field}", part.image_url


async def _read(gateway: Gateway, source: ImageSource, tenant: str, param: str, room: int) -> bytes:
    """Raises ApiError, PayloadError. Reads at most a byte more than there is room for."""
    if source.file_id is None:
        return await asyncio.to_thread(_decoded, source.url or "", param)
    shard = await gateway.broker.shards.of(source.file_id)
    file = await shard.ask("file", shard.files.find, source.file_id, tenant)
    if file is None:
        raise not_found("this file", "file_not_found", param)
    if file.purpose not in PURPOSES:
        raise invalid_value(param, f"{param}: the file's purpose is none of vision and user_data")
    read = store_of(gateway).read
    return await asyncio.to_thread(read, content_key(file.id), 0, room + 1)


def _decoded(url: str, param: str) -> bytes:
    """The bytes of a data URL. Raises ApiError."""
    try:
        return binascii.a2b_base64(url.partition(",")[2], strict_mode=True)
    except ValueError:
        raise invalid_value(param, f"{param}: its base64 is not valid") from None


def _size(data: bytes, param: str) -> tuple[int, int]:
    """Width and height in pixels, as they are shown. Raises ApiError."""
    # For its signature alone: imagesize also reads formats that refer to other files.
    if not _SIGNATURES.match(data):
        message = f"{param}: the image must be a PNG, JPEG, WebP or GIF"
        raise invalid_value(param, message)
    imagesize = importlib.import_module("imagesize")
    width, height = imagesize.get(io.BytesIO(data[:_HEADER_BYTES]))
    if min(width, height) < 1:
        message = f"{param}: its first {_HEADER_BYTES} bytes tell no size of an image"
        raise invalid_value(param, message)
    if width * height > MAX_PIXELS:
        message = f"{param}: the image has {width} × {height} pixels, over {MAX_PIXELS} in all"
        raise invalid_value(param, message)
    if max(width, height) > MAX_RATIO * min(width, height):
        message = f"{param}: one side of the image is over {MAX_RATIO} times as long as the other"
        raise invalid_value(param, message)
    return int(width), int(height)


def check_marks(card: ModelCard, body: ChatBody, rendered: str) -> None:
    """Raises ApiError unless the rendered chat has one placeholder for each of its images."""
    counted, num_images = card.capabilities.images, sum(1 for _ in _sources(body))
    if counted is None or not num_images:
        return
    if (num_marks := rendered.count(counted.placeholder)) != num_images:
        message = (
            f"messages: the prompt has {num_marks} places for {num_images} images; a text may not "
            f"contain {counted.placeholder!r}, and the model's chat template must show each image"
        )
        raise invalid_value("messages", message)


def no_images(body: ChatBody, model: str) -> ApiError | None:
    """The error for a chat with images to a flow; None if it has none."""
    for param, _ in _sources(body):
        message = f"{param}: {model!r} is a flow, and flows take no images"
        return bad_request(UNSUPPORTED, message, param)
    return None
