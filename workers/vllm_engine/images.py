"""Images in vLLM: decodes them, and finds by trying how many tokens the model's processor makes of
an image."""

import hashlib
import io
import logging
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
from contract.model_cards import MAX_PIXELS, ImageTokens, TokenizerFiles
from workers.engine.sequence import RequestRefused, Sequence

log = logging.getLogger("batchway.engine")

_NUMBERS = ("of_image", "of_row", "of_cell")
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
# Widths and heights of the images that are tried: small, square, wide, high, large.
_SIZES = (
    *((28, 28), (64, 48), (48, 64), (100, 99), (224, 224), (333, 250), (250, 333), (640, 200)),
    *((200, 640), (513, 512), (1000, 100), (100, 1000), (1200, 800), (800, 1200), (1600, 1600)),
)


def with_images(llm: LLMEngine, prompt: dict[str, Any], sequence: Sequence) -> Any:
    """Returns vLLM's input of a sequence with images, after the model's processor. Notes in the
    sequence how many tokens they have become. Raises RequestRefused."""
    images = [decoded(data, number) for number, data in enumerate(sequence.images, 1)]
    # Tenants share no features of an image, as they share no KV.
    names = [f"{sequence.tenant}/{hashlib.sha256(data).hexdigest()}" for data in sequence.images]
    try:
        found = _processed(llm, prompt, images, names)
    except Exception as exc:  # of the model's processor, which may raise anything
        message = "the model's processor cannot read the images with this prompt"
        raise RequestRefused(ErrorCode.BAD_PARAMETER, message) from exc
    num_tokens = len(found["prompt_token_ids"]) - len(sequence.token_ids)
    if num_tokens > sequence.num_image_tokens:
        message = (
            f"the images have {num_tokens} tokens, over the {sequence.num_image_tokens} admitted"
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
        upright: Image.Image = convert_image_mode(ImageOps.exif_transpose(image), "RGB")
        upright.load()
        return upright
    except Exception as exc:  # Pillow's decoders raise errors of many kinds
        message = f"image {number} of the chat cannot be decoded"
        raise RequestRefused(ErrorCode.BAD_PARAMETER, message) from exc


def image_tokens_of(llm: LLMEngine, files: TokenizerFiles) -> ImageTokens | None:
    """Returns how the model's processor counts images: a rule that is right for all that are tried,
    else the most of these for each image. None, which the log says, if it reads none."""
    try:
        text = get_model_cls(llm.model_config).get_placeholder_str("image", 1)
        encoded = Tokenizer.from_str(files.tokenizer_json).encode(text, add_special_tokens=False)
        counts = {}
        for size in _SIZES:
            prompt = {"prompt_token_ids": encoded.ids}
            found = _processed(llm, prompt, [Image.new("RGB", size)], [f"trial/{size}"])
            counts[size] = len(found["prompt_token_ids"]) - len(encoded.ids)
        rule = _rule(llm, counts, ImageTokens(placeholder=text, of_image=max(counts.values())))
    except Exception as exc:
        log.warning("images are refused: %s: %s", type(exc).__name__, exc)
        return None
    log.info("images become tokens by %s", rule)
    return rule


def _processed(llm: LLMEngine, prompt: Any, images: Seq[Any], names: Seq[str]) -> Any:
    given = {"multi_modal_data": {"image": images}, "multi_modal_uuids": {"image": names}}
    [found] = llm.renderer.render_cmpl([prompt | given])
    return found


def _rule(llm: LLMEngine, counts: dict[tuple[int, int], int], most: ImageTokens) -> ImageTokens:
    """Returns a rule of a layout that the processor's settings may mean, with the numbers of tokens
    that give all these counts by size; `most` if there is none."""
    load: Any = AutoImageProcessor.from_pretrained
    processor = load(llm.model_config.model, revision=llm.model_config.revision)
    size = dict(getattr(processor, "size", None) or {})
    longest, shortest = size.get("longest_edge"), size.get("shortest_edge")
    layouts: list[dict[str, Any]] = []
    if longest and (tile := dict(getattr(processor, "max_image_size", None) or {})):
        layouts.append({"layout": "tiles", "cell": tile["longest_edge"], "most": longest})
    if longest and shortest and hasattr(processor, "merge_size"):
        cell = processor.patch_size * processor.merge_size
        layouts.append({"layout": "grid", "cell": cell, "least": shortest, "most": longest})
    for layout in layouts:
        rule = replace(most, **layout)
        cells = [rule.cells(*each) for each in counts]
        terms = np.array([(1, rows, rows * columns) for rows, columns in cells], float)
        numbers = np.linalg.lstsq(terms, np.array([*counts.values()], float))[0].round()
        rule = replace(rule, **dict(zip(_NUMBERS, map(int, numbers), strict=True)))
        if all(rule.num_tokens(*each) == count for each, count in counts.items()):
            return rule
    return most
