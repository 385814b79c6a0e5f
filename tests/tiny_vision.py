"""A tiny vision model with random weights, made on the spot and saved with its processor: Idefics3,
whose image processor needs no torchvision. It cuts an image into tiles."""

import io
import json
import random
from pathlib import Path
from typing import Any

from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

PLACEHOLDER = "<image>"
TILE, LONGEST = 56, 168  # pixels
_SPECIAL = ("<s>", "</s>", "<pad>", "<unk>", PLACEHOLDER, "<fake_token_around_image>")
_GLOBAL = ("<end_of_utterance>", "<global-img>")
_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for c in m['content'] %}{% if c['type'] == 'image' %}<image>{% else %}"
    "{{ c['text'] }}{% endif %}{% endfor %}{% endif %}\n{% endfor %}"
)


def picture(size: tuple[int, int], seed: int = 0, mode: str = "RGB") -> Image.Image:
    """An image of noise."""
    width, height = size
    noise = Image.frombytes("RGB", size, random.Random(seed).randbytes(3 * width * height))
    return noise.convert(mode)


def file_of(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def save_tiny_vision_model(folder: Path) -> Path:
    """Writes the model; returns the folder."""
    import torch
    import transformers

    tokenizer, vocabulary = _tokenizer()
    names: Any = transformers
    text = names.LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,  # of 32, the least on a CPU
        num_key_value_heads=1,
        max_position_embeddings=2048,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        tie_word_embeddings=False,
    )
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    vision |= {"num_attention_heads": 2, "image_size": TILE, "patch_size": 14}
    config = names.Idefics3Config(
        text_config=text,
        vision_config=vision,
        scale_factor=2,
        image_token_id=vocabulary[PLACEHOLDER],
        pad_token_id=2,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = names.Idefics3ForConditionalGeneration(config)
    _enliven(model)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    processor: Any = Idefics3ImageProcessorPil
    sizes = {"size": {"longest_edge": LONGEST}, "max_image_size": {"longest_edge": TILE}}
    processor(**sizes).save_pretrained(folder)
    name = {"processor_class": "Idefics3Processor"}
    _edit(folder / "preprocessor_config.json", **name)
    _edit(folder / "tokenizer_config.json", **name, tokenizer_class="PreTrainedTokenizerFast")
    _edit(folder / "processor_config.json", **name, image_seq_len=4)
    return folder


def greedy_tokens(folder: Path, prompt: str, images: list[Image.Image], most: int) -> list[int]:
    """The output of transformers' `generate`."""
    import torch
    import transformers

    names: Any = transformers
    processor = names.AutoProcessor.from_pretrained(folder)
    model = names.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    given = processor(text=prompt, images=images, return_tensors="pt")
    found = model.generate(**given, max_new_tokens=most, do_sample=False)
    ids: list[int] = found[0, given["input_ids"].shape[1] :].tolist()
    return ids


def _tokenizer() -> tuple[Any, dict[str, int]]:
    """Bytes as tokens, behind the special ones."""
    from transformers import PreTrainedTokenizerFast

    tiles = [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]
    special = [*_SPECIAL, *_GLOBAL, *tiles]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*special, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    made: Any = PreTrainedTokenizerFast
    fast = made(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
    )
    fast.chat_template = _TEMPLATE
    return fast, vocabulary


def _enliven(model: Any) -> None:
    """Scales the weights, so that the image and attention decide the next token."""
    import torch

    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.add_(noise, alpha=0.1)
            elif parameter.ndim < 2:
                parameter.copy_(noise * 0.2)
            elif "embed_tokens" in name or "lm_head" in name:
                parameter.copy_(noise)
            elif "embed" in name:
                parameter.copy_(noise * 0.1)
            else:
                parameter.copy_(noise * 1.5 * parameter.shape[-1] ** -0.5)


def _edit(file: Path, **changes: Any) -> None:
    known = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(known | changes))
