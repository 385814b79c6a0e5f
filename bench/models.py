"""Random models for measurements: Llama's architecture, saved as checkpoints."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

# About 5 M and 124 M parameters; embeddings are not tied.
SIZES: Mapping[str, Mapping[str, int]] = {
    "S": {
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "intermediate_size": 768,
        "vocab_size": 4096,
    },
    "M": {
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "intermediate_size": 2048,
        "vocab_size": 32000,
    },
}
CONTEXT_LENGTH = 8448  # 8,192 tokens of context and some to generate
_SPECIAL = ("<s>", "</s>", "<pad>", "<unk>")


def make_model(size: str, folder: Path, *, seed: int = 0) -> Path:
    """Writes a model of this size with a byte tokenizer; returns the folder.

    The matrices are large enough that attention decides the next token, so that a wrong position or
    neighbour changes the greedy tokens.
    """
    torch.manual_seed(seed)
    arguments: dict[str, Any] = dict(SIZES[size])
    config = LlamaConfig(
        **arguments,
        max_position_embeddings=CONTEXT_LENGTH,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                scale = 1.0 if "embed" in name else 1.5 * parameter.shape[-1] ** -0.5
                parameter.normal_(std=scale)
    model.save_pretrained(folder)
    save_tokenizer(folder, config.vocab_size)
    return folder


def save_tokenizer(folder: Path, vocab_size: int, *, has_pairs: bool = False) -> None:
    """Saves a tokenizer of bytes as tokens after the special ones; other ids get unique names. With
    pairs, special tokens are put around each text, as in encoders."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*_SPECIAL, *alphabet]
    words += [f"<{i}>" for i in range(len(words), vocab_size)]
    vocabulary = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if has_pairs:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>",
            pair="<s> $A </s> $B:1 </s>:1",
            special_tokens=[("<s>", 0), ("</s>", 1)],
        )
    tokenizer_class: Any = PreTrainedTokenizerFast
    saved = tokenizer_class(
        tokenizer_object=tokenizer,
        **dict(zip(("bos_token", "eos_token", "pad_token", "unk_token"), _SPECIAL, strict=True)),
    )
    saved.save_pretrained(folder)
