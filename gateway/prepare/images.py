"""The images of a chat, which callers send as data URLs or as files stored here: their bytes, and
how many tokens they become. Their sizes are read from their headers; only engines decode them.
"""

import asyncio
import binascii
import importlib
import io
import re

from contract.files import content_key
from contract.model_cards import MAX_PIXELS, ModelCard
from gateway.files import store_of
from gateway.http.errors import UNSUPPORTED, bad_request, invalid_value, not_found
from gateway.prepare.schemas import ChatBody, ImageSource
from gateway.state import Gateway

MAX_IMAGES = 16  # of a chat, also in earlier turns
MAX_IMAGE_BYTES = 8 * 2**20  # of all images of a chat
MAX_RATIO = 200  # of an image's sides
PURPOSES = frozenset({"vision", "user_data"})  # of files that hold images
_HEADER_BYTES = 256 * 1024
_SIGNATURES = re.compile(rb"\x89PNG\r\n\x1a\n|\xff\xd8\xff|GIF8[79]a|RIFF.{4}WEBPVP8", re.DOTALL)


async def read_images(
    gateway: Gateway, card: ModelCard, body: ChatBody, tenant: str
) -> tuple[tuple[bytes, ...], int]:
    """Returns the images of a chat in their order, and the tokens that they add to its prompt.
    Raises ApiError, PayloadError."""
    sources, counted = _sources(body), card.capabilities.images
    for param in sources if counted is None else ():
        message = f"{param}: images are not supported by {card.name!r}"
        raise bad_request(UNSUPPORTED, message, param)
    if counted is None or not sources:
        return (), 0
    store = store_of(gateway)
    if len(sources) > MAX_IMAGES:
        raise invalid_value("messages", f"messages: at most {MAX_IMAGES} images")
    for name in ("prompt_logprobs", "truncate_prompt_tokens"):
        if getattr(body, name) is not None:
            raise bad_request(UNSUPPORTED, f"{name} cannot be combined with images", name)
    images, num_tokens = list[bytes](), 0
    for param, source in sources.items():
        if source.file_id is None:
            images.append(await asyncio.to_thread(_decoded, source.url or "", param))
        else:
            file_id = await _image_file(gateway, source.file_id, tenant, param)
            key, most = content_key(file_id), MAX_IMAGE_BYTES + 1
            images.append(await asyncio.to_thread(store.read, key, 0, most))
        if sum(map(len, images)) > MAX_IMAGE_BYTES:
            raise invalid_value(param, f"{param}: images may have {MAX_IMAGE_BYTES} bytes in all")
        num_tokens += counted.num_tokens(*await asyncio.to_thread(_size, images[-1], param))
    return tuple(images), num_tokens


def _sources(body: ChatBody) -> dict[str, ImageSource]:
    """Each image by the name of its parameter."""
    return {
        f"messages.{i}.content.{j}.image_url.{part.image_url.kind}": part.image_url
        for i, message in enumerate(body.messages)
        for j, part in enumerate(message.parts)
        if part.type == "image_url"
    }


async def _image_file(gateway: Gateway, file_id: str, tenant: str, param: str) -> str:
    """The id of a tenant's file of images. Raises ApiError."""
    shard = await gateway.broker.shards.of(file_id)
    file = await shard.ask("file", shard.files.find, file_id, tenant)
    if file is None:
        raise not_found("this file", "file_not_found", param)
    if file.purpose not in PURPOSES:
        raise invalid_value(param, f"{param}: the file's purpose is none of vision and user_data")
    return file.id


def _decoded(url: str, param: str) -> bytes:
    """The bytes of a data URL. Raises ApiError."""
    try:
        return binascii.a2b_base64(url.partition(",")[2], strict_mode=True)
    except ValueError:
        raise invalid_value(param, f"{param}: its base64 is not valid") from None


def _size(data: bytes, param: str) -> tuple[int, int]:
    """Width and height in pixels, as they are shown. Raises ApiError."""
    width = height = 0
    if _SIGNATURES.match(data):  # imagesize also reads formats that refer to other files
        found = importlib.import_module("imagesize").get(io.BytesIO(data[:_HEADER_BYTES]))
        width, height = map(int, found)
    if min(width, height) < 1:
        message = (
            f"must be a PNG, JPEG, WebP or GIF, with its size in the first {_HEADER_BYTES} bytes"
        )
    elif width * height > MAX_PIXELS or max(width, height) > MAX_RATIO * min(width, height):
        message = f"has {width} × {height} pixels: over {MAX_PIXELS}, or too narrow"
    else:
        return width, height
    raise invalid_value(param, f"{param}: the image {message}")


def check_marks(card: ModelCard, body: ChatBody, rendered: str) -> None:
    """Raises ApiError unless the rendered chat has one placeholder for each of its images."""
    counted, num_images = card.capabilities.images, len(_sources(body))
    if counted and num_images and rendered.count(counted.placeholder) != num_images:
        message = (
            f"messages: the prompt has not one place for each of {num_images} images: a text may "
            f"not contain {counted.placeholder!r}, and the model's chat template must show each"
        )
        raise invalid_value("messages", message)
