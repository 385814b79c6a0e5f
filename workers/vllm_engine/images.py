"""Images in vLLM: decodes them, and finds by trying how many tokens the model's processor makes of
an image."""

import hashlib
import io
import logging
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
from msgspec.structs import replace
from PIL import Image, ImageOps
from tokenizers import Tokenizer
from transformers import AutoImageProcessor
from vllm import LLMEngine
from vllm.model_executor.model_loader import get_model_cls
from vllm.multimodal.image import convert_image_mode

from contract.errors import ErrorCode
from contract.model_cards import ImageTokens, TokenizerFiles
from workers.engine.sequence import RequestRefused, Sequence

log = logging.getLogger("batchway.engine")

MAX_PIXELS = 2**24  # as gateways allow; decoded, four bytes each
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
# Widths and heights of the images that are tried: small, square, wide, high, large.
_SIZES = (
    *((28, 28), (64, 48), (48, 64), (100, 99), (224, 224), (333, 250), (250, 333), (640, 200)),
    *((200, 640), (513, 512), (1000, 100), (100, 1000), (1200, 800), (800, 1200), (1600, 1600)),
)


def with_images(llm: LLMEngine, prompt: dict[str, Any], sequence: Sequence) -> Any:
    """Returns vLLM's input of a sequence with images, after the model's processor. Notes in the
    sequence how many tokens they have become. Raises RequestRefused."""
    images = [decoded(data, number) for number, data in enumerate(sequence.images)]
    # Tenants share no features of an image, as they share no KV.
    names = [f"{sequence.tenant}/{hashlib.sha256(data).hexdigest()}" for data in sequence.images]
    try:
        found = _processed(llm, prompt, images, names)
    except Exception as exc:  # of the model's processor, which may raise anything
        log.warning("images refused: %s job_id=%s", type(exc).__name__, sequence.job_id)
        message = "the model's processor cannot read the images with this prompt"
        raise RequestRefused(ErrorCode.BAD_PARAMETER, message) from exc
    num_tokens = len(found["prompt_token_ids"]) - len(sequence.token_ids)
    if num_tokens > sequence.num_image_tokens:  # more than was admitted
        message = (
            f"the images have {num_tokens} tokens, over {sequence.num_image_tokens}, as their "
            "headers told"
        )
        raise RequestRefused(ErrorCode.BAD_PARAMETER, message)
    sequence.num_image_tokens = num_tokens
    return found


def decoded(data: bytes, number: int) -> Image.Image:
    """The image in RGB, as transformers and vLLM show it: upright, on white; of an animation the
    first. Raises RequestRefused; nothing is decoded of an image with too many pixels."""
    try:
        image = Image.open(io.BytesIO(data), formats=_FORMATS)
        if image.width * image.height > MAX_PIXELS:
            raise ValueError("too many pixels")
        image.load()
        upright: Image.Image = convert_image_mode(ImageOps.exif_transpose(image), "RGB")
        return upright
    except Exception as exc:  # Pillow's decoders raise errors of many kinds
        message = f"image {number + 1} of the chat cannot be decoded"
        raise RequestRefused(ErrorCode.BAD_PARAMETER, message) from exc


def image_tokens_of(llm: LLMEngine, files: TokenizerFiles) -> ImageTokens | None:
    """Returns how the model's processor counts images: a rule that is right for all that are tried,
    else the most of these for each image. None, which the log says, if it reads none."""
    try:
        text = get_model_cls(llm.model_config).get_placeholder_str("image", 1)
        if text is None:
            raise ValueError("the model has no text in a prompt for an image")
        encoded = Tokenizer.from_str(files.tokenizer_json).encode(text, add_special_tokens=False)
        counts = dict(_counts(llm, encoded.ids))
        most = ImageTokens(placeholder=text, of_single=max(counts.values()))
        fitted = (_fitted(rule, counts) for rule in _rules(llm, most))
        found = next((rule for rule in fitted if rule is not None), None)
    except Exception as exc:
        log.warning("images are refused: %s: %s", type(exc).__name__, exc)
        return None
    log.info("images become tokens by %s", found or f"the most of {len(counts)} sizes")
    return found or most


def _processed(llm: LLMEngine, prompt: Any, images: Seq[Any], names: Seq[str]) -> Any:
    given = {"multi_modal_data": {"image": images}, "multi_modal_uuids": {"image": names}}
    [found] = llm.renderer.render_cmpl([prompt | given])
    return found


def _counts(llm: LLMEngine, prompt_ids: list[int]) -> Iterator[tuple[tuple[int, int], int]]:
    """Yields sizes, and the tokens that an image of the size adds. Leaves out those without room in
    the context."""
    for size in _SIZES:
        prompt = {"prompt_token_ids": list(prompt_ids)}
        found = _processed(llm, prompt, [Image.new("RGB", size)], [f"trial/{size}"])
        yield size, len(found["prompt_token_ids"]) - len(prompt_ids)


def _rules(llm: LLMEngine, one: ImageTokens) -> Iterator[ImageTokens]:
    """Yields layouts that the settings of the model's processor may mean."""
    yield one
    config = llm.model_config
    load: Any = AutoImageProcessor.from_pretrained
    processor = load(config.model, revision=config.revision)
    size = dict(getattr(processor, "size", None) or {})
    tile = dict(getattr(processor, "max_image_size", None) or {})
    longest, shortest = size.get("longest_edge"), size.get("shortest_edge")
    if longest and tile.get("longest_edge"):
        yield replace(one, layout="tiles", cell=tile["longest_edge"], most=longest)
    if longest and shortest and hasattr(processor, "merge_size"):
        cell = processor.patch_size * processor.merge_size
        yield replace(one, layout="grid", cell=cell, least=shortest, most=longest)


def _fitted(rule: ImageTokens, counts: dict[tuple[int, int], int]) -> ImageTokens | None:
    """Returns the rule with the numbers of tokens that give these counts; None if none do."""
    cells = {size: rule.cells(*size) for size in counts}
    single = [counts[size] for size, found in cells.items() if found == (1, 1)]
    several = [(*found, counts[size]) for size, found in cells.items() if found != (1, 1)]
    rule = replace(rule, of_single=max(single, default=0))
    if several:
        # of_image + of_row * rows + of_cell * rows * columns, by least squares
        found = np.linalg.lstsq(
            np.array([(1, rows, rows * columns) for rows, columns, _ in several], float),
            np.array([count for *_, count in several], float),
        )[0]
        of_image, of_row, of_cell = (int(number) for number in found.round())
        of_single = max(single, default=max(0, of_image + of_row + of_cell))
        numbers = {"of_image": of_image, "of_row": of_row, "of_cell": of_cell}
        rule = replace(rule, of_single=of_single, **numbers)
    return rule if all(rule.num_tokens(*size) == count for size, count in counts.items()) else None
