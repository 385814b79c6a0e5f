"""Tiny decoders with random weights, made on the spot and saved as checkpoints.

Their greedy outputs vary, so that a wrong position, mask or neighbour changes tokens.
torch is imported where a model is made: those who only name families do without.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.tiny_families import EOS_ID, FAMILIES, VOCAB_SIZE

__all__ = ["EOS_ID", "FAMILIES", "VOCAB_SIZE"]

CHAT_TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
# Keep initial values: with random ones a recurrent state would vanish or explode.
_SCAN_PARAMETERS = ("A_log", "dt_bias", ".D", "time_", "recurrent_param")


def make_config(family: str, **changes: Any) -> Any:
    """The configuration (a PretrainedConfig) of a tiny model of a family."""
    import transformers

    class_name, arguments = FAMILIES[family]
    return getattr(transformers, class_name)(**(arguments | changes))


def make_model(family: str, seed: int = 0, **changes: Any) -> Any:
    """A tiny random model (a PreTrainedModel) whose greedy outputs vary."""
    return random_model(make_config(family, **changes), seed)


def random_model(config: Any, seed: int = 0) -> Any:
    """A random model of this configuration whose greedy outputs vary."""
    import torch
    import transformers

    torch.manual_seed(seed)
    auto_class: Any = transformers.AutoModelForCausalLM
    model = auto_class.from_config(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            _enliven(name, parameter, generator)
    return model.eval()


def _enliven(name: str, parameter: Any, generator: Any) -> None:
    """Scales the weights, so that attention decides the next token."""
    import torch

    noise = torch.randn(parameter.shape, generator=generator)
    if any(part in name for part in _SCAN_PARAMETERS):
        return
    if "norm" in name or "ln_" in name:
        parameter.add_(noise, alpha=0.1)
    elif parameter.ndim < 2:
        parameter.copy_(noise * 0.2)
    elif any(part in name for part in ("embed", "wte", "wpe", "lm_head", "embed_out")):
        parameter.copy_(noise)
    else:
        parameter.copy_(noise * 1.5 * parameter.shape[-1] ** -0.5)


@cache
def _tokenizer_json() -> str:
    """Bytes as tokens, behind the special tokens 0 … 3."""
    special = {"<s>": 0, "</s>": 1, "<pad>": 2, "<unk>": 3}
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = special | {char: 4 + i for i, char in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    text: str = tokenizer.to_str()
    return text


def save_tokenizer(folder: Path) -> None:
    """Writes a byte tokenizer with a chat template."""
    from transformers import PreTrainedTokenizerFast

    tokenizer_class: Any = PreTrainedTokenizerFast
    tokenizer = tokenizer_class(
        tokenizer_object=Tokenizer.from_str(_tokenizer_json()),
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)


def save_tiny_model(family: str, folder: Path, seed: int = 0, **changes: Any) -> Path:
    """Writes a tiny model with its tokenizer; returns the folder."""
    make_model(family, seed, **changes).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def edit_json(file: Path, **changes: Any) -> None:
    """Sets keys of a JSON file."""
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
