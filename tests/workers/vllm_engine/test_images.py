"""Images through vLLM: the tokens of transformers' `generate`, also after a resume, and what is
refused without harm to others."""

import io
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from PIL import Image
from tokenizers import Tokenizer

from contract.model_cards import ImageTokens
from tests.tiny_vision import (
    PLACEHOLDER,
    file_of,
    greedy_tokens,
    picture,
    save_tiny_vision_model,
)
from tests.vllm_environment import vllm_python
from tests.workers.vllm_engine.driven import Engine, job, options_of, running
from workers.ipc.messages import EngineReady, JobFailed, Request

pytestmark = [pytest.mark.anyio, pytest.mark.campaign]

NUM_TOKENS = 24
ONE = f"user: look {PLACEHOLDER} what is it?\n"
TWO = f"user: {PLACEHOLDER} or {PLACEHOLDER}?\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_vision_model(tmp_path_factory.mktemp("vision"))


@pytest.fixture(scope="module")
async def seeing(folder: Path) -> AsyncIterator[Engine]:
    async with running(options_of(folder), vllm_python()) as engine:
        yield engine


def counted(engine: Engine) -> ImageTokens:
    [ready] = engine.of(EngineReady) if engine.ready is None else [engine.ready]
    engine.ready = ready  # `run` forgets what was received
    assert ready.capabilities.images is not None
    return ready.capabilities.images


def asked(
    engine: Engine,
    folder: Path,
    name: str,
    prompt: str,
    files: tuple[bytes, ...],
    sizes: list[tuple[int, int]],
    outputs: tuple[tuple[int, ...], ...] = ((),),
    **params: Any,
) -> Request:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = tuple(tokenizer.encode(prompt, add_special_tokens=False).ids)
    fields = {"max_tokens": NUM_TOKENS, "temperature": 0.0, "ignore_eos": False} | params
    num_tokens = sum(counted(engine).num_tokens(*size) for size in sizes)
    return replace(
        job(name, outputs, prompt=ids, **fields), images=files, num_image_tokens=num_tokens
    )


def opened(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data)).convert("RGB")


def cases() -> list[tuple[str, bytes, Image.Image]]:
    """Name, file, and the image that transformers gets."""
    white = Image.new("RGB", (90, 60), "white")
    clear = picture((90, 60), 5, "RGBA")
    clear.putalpha(picture((90, 60), 6, "L"))
    white.paste(clear, mask=clear.getchannel("A"))
    turned = Image.Exif()
    turned[0x0112] = 6
    photo = file_of(picture((200, 70), 7), "JPEG", exif=turned)
    cmyk, plain = (file_of(picture((64, 64), 8, mode), "JPEG") for mode in ("CMYK", "RGB"))
    moving = file_of(
        picture((48, 40), 9, "P"), "GIF", save_all=True, append_images=[picture((48, 40), 1, "P")]
    )
    made = {
        "png": file_of(picture((60, 90), 1)),
        "wide": file_of(picture((300, 40), 2)),
        "one pixel": file_of(picture((1, 1), 2)),
        "grey": file_of(picture((90, 91), 3, "L")),
        "palette": file_of(picture((91, 90), 3, "P")),
        "deep": file_of(picture((30, 30), 3, "L").convert("I;16")),
        "jpeg": plain,
        "cmyk": cmyk,
        "webp": file_of(picture((70, 33), 4), "WEBP", lossless=True),
        "animated": moving,
    }
    found = [
        (name, data, Image.open(io.BytesIO(data)).convert("RGB")) for name, data in made.items()
    ]
    shown = opened(photo).transpose(Image.Transpose.ROTATE_270)
    return [*found, ("alpha", file_of(clear), white), ("turned", photo, shown)]


async def test_tokens_equal_those_of_transformers(seeing: Engine, folder: Path) -> None:
    """Of each kind of file, all at once, and of two images in one chat."""
    given = cases()
    jobs = [asked(seeing, folder, name, ONE, (data,), [image.size]) for name, data, image in given]
    first, second = given[0], given[1]
    jobs.append(
        asked(seeing, folder, "two", TWO, (first[1], second[1]), [first[2].size, second[2].size])
    )
    found = await seeing.run(*jobs)
    assert not seeing.of(JobFailed)
    expected = {
        (name, 0): greedy_tokens(folder, ONE, [image], NUM_TOKENS) for name, _, image in given
    }
    expected["two", 0] = greedy_tokens(folder, TWO, [first[2], second[2]], NUM_TOKENS)
    assert found == expected
    assert len({tuple(ids) for ids in found.values()}) > len(found) - 2  # the images decide


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "presence_penalty": 1.0}])
async def test_a_resume_goes_on_with_the_same_tokens(
    seeing: Engine, folder: Path, params: dict[str, Any]
) -> None:
    image = picture((200, 100), 11)
    fields = {"ignore_eos": True} | params

    def one(name: str, *logged: int) -> Request:
        files = (file_of(image),)
        return asked(seeing, folder, name, ONE, files, [image.size], (logged,), **fields)

    whole = (await seeing.run(one("whole")))["whole", 0]
    assert len(whole) == NUM_TOKENS
    rests = await seeing.run(*[one(f"{n}", *whole[:n]) for n in range(1, NUM_TOKENS)])
    assert rests == {(f"{n}", 0): whole[n:] for n in range(1, NUM_TOKENS)}


async def test_an_equal_prompt_with_another_image_is_another_prefix(
    seeing: Engine, folder: Path
) -> None:
    """One after the other, so that the second would find the first one's cached blocks."""
    prompt = "x" * 300 + ONE
    for seed in range(3):
        image = picture((100, 100), seed)
        found = await seeing.run(
            asked(seeing, folder, f"p{seed}", prompt, (file_of(image),), [image.size])
        )
        assert found[f"p{seed}", 0] == greedy_tokens(folder, prompt, [image], NUM_TOKENS)


async def test_what_cannot_be_decoded_or_counted_fails_its_job_alone(
    seeing: Engine, folder: Path
) -> None:
    """Cut files, bombs, other formats, more tokens than were admitted, another number of marks."""
    good, size = file_of(picture((60, 90), 1)), (60, 90)
    bomb = good[:16] + (30_000).to_bytes(4, "big") * 2 + good[24:]
    wrong = {
        "cut": good[:-2000],
        "empty": b"",
        "text": b"no image",
        "bomb": bomb,
        "bmp": file_of(picture((60, 90), 1), "BMP"),
        "damaged": good[:100] + bytes(200) + good[300:],
    }
    jobs = [asked(seeing, folder, name, ONE, (data,), [size]) for name, data in wrong.items()]
    fresh = file_of(picture(size, 77))
    jobs.append(replace(asked(seeing, folder, "more", ONE, (fresh,), [size]), num_image_tokens=3))
    jobs.append(asked(seeing, folder, "marks", "user: no place\n", (good,), [size]))
    jobs.append(asked(seeing, folder, "good", ONE, (good,), [size]))
    found = await seeing.run(*jobs)
    failed = {failure.job_id: failure for failure in seeing.of(JobFailed)}
    assert set(failed) == {*wrong, "more", "marks"}
    assert {failure.code for failure in failed.values()} == {"bad_parameter"}
    assert "cannot be decoded" in failed["bomb"].message
    assert "over the 3" in failed["more"].message
    image = picture((60, 90), 1)
    assert found["good", 0] == greedy_tokens(folder, ONE, [image], NUM_TOKENS)
    # What was refused after vLLM's processor had read it is read again.
    again = await seeing.run(asked(seeing, folder, "again", ONE, (fresh,), [size]))
    assert again["again", 0] == greedy_tokens(folder, ONE, [picture(size, 77)], NUM_TOKENS)


async def test_the_published_rule_counts_as_the_models_processor(
    seeing: Engine, folder: Path
) -> None:
    """Of sizes that were not tried at the start."""
    from transformers import AutoProcessor

    load: Any = AutoProcessor.from_pretrained
    processor, draw = load(folder), random.Random(0)
    sizes = [(draw.randint(1, 900), draw.randint(1, 900)) for _ in range(60)]
    for size in [*sizes, (1, 1), (900, 5), (5, 900), (168, 168), (169, 56)]:
        ids = processor(text=ONE, images=[Image.new("RGB", size)])["input_ids"][0]
        without = processor.tokenizer(ONE)["input_ids"]
        assert counted(seeing).num_tokens(*size) == len(ids) - len(without), size
